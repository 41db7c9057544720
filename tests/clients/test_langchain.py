"""LangChain's ChatOpenAI and ChatAnthropic: structured output, bound tools, streams. And its
embeddings."""

from typing import Any

import pytest
from clients.asks import (
    CITY,
    KEY,
    MODEL,
    PLACE,
    PLACE_WORDS,
    SUM_ANSWER,
    SUM_WORDS,
    WEATHER_ANSWER,
    WEATHER_NAME,
    WEATHER_RESULT,
    WEATHER_WORDS,
    Place,
)
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings


@tool
def get_weather(city: str) -> str:
    """Get the weather."""
    return WEATHER_RESULT


def openai_model(url: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key=KEY, temperature=0, max_retries=0, **options
    )


@pytest.fixture(params=["chat", "responses", "messages"])
def model(request: pytest.FixtureRequest, url: str) -> Any:
    """The same questions over each dialect."""
    if request.param == "messages":
        return ChatAnthropic(
            model=MODEL, base_url=url, api_key=KEY, temperature=0, max_tokens=200, max_retries=0
        )
    return openai_model(url, use_responses_api=request.param == "responses")


def test_text(model: Any) -> None:
    answer = model.invoke(SUM_WORDS)
    assert answer.text == SUM_ANSWER
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 10


def test_stream(model: Any) -> None:
    chunks = list(model.stream(SUM_WORDS))
    assert len(chunks) > 3 and "".join(chunk.text for chunk in chunks) == SUM_ANSWER


async def test_asynchronous_stream(model: Any) -> None:
    chunks = [chunk async for chunk in model.astream(SUM_WORDS)]
    assert "".join(chunk.text for chunk in chunks) == SUM_ANSWER


def test_a_bound_tool_is_called_and_its_result_reported(model: Any) -> None:
    bound = model.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(WEATHER_WORDS)]
    answer = bound.invoke(messages)
    assert isinstance(answer, AIMessage) and not answer.invalid_tool_calls
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == (WEATHER_NAME, {"city": CITY})
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert bound.invoke([*messages, answer, result]).text == WEATHER_ANSWER


def test_a_call_in_a_stream(model: Any) -> None:
    chunks = list(model.bind_tools([get_weather]).stream(WEATHER_WORDS))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert len(chunks) > 3
    [call] = whole.tool_calls
    assert (call["name"], call["args"]) == (WEATHER_NAME, {"city": CITY})


def test_a_call_that_must_be_made(model: Any) -> None:
    bound = model.bind_tools([get_weather], tool_choice=WEATHER_NAME)
    [call] = bound.invoke("Hello!").tool_calls
    assert call["name"] == WEATHER_NAME and isinstance(call["args"]["city"], str)


def test_structured_output_by_a_schema(model: Any) -> None:
    asked = model.with_structured_output(Place, method="json_schema")
    assert asked.invoke(PLACE_WORDS) == Place(**PLACE)


def test_structured_output_by_a_call(model: Any) -> None:
    """The demo model calls the tool "Place" because it must, and fills it from the words."""
    asked = model.with_structured_output(Place, method="function_calling", include_raw=True)
    answer = asked.invoke(PLACE_WORDS)
    assert answer["parsing_error"] is None and isinstance(answer["parsed"], Place)
    assert answer["parsed"] == Place(**PLACE)


def test_structured_output_of_any_json(url: str) -> None:
    asked = openai_model(url).with_structured_output(Place, method="json_mode")
    assert asked.invoke(PLACE_WORDS) == Place(**PLACE)


def test_structured_output_in_a_stream(url: str) -> None:
    asked = openai_model(url).with_structured_output(Place, method="json_schema")
    assert list(asked.stream(PLACE_WORDS))[-1] == Place(**PLACE)


EMBEDDING_SIZE = 256  # the demo model's hidden size
TEXTS = ["Tom lives in", "What is 23 + 54?", "Once upon a"]  # the last token says what comes next


@pytest.mark.parametrize("encoding", [{}, {"model_kwargs": {"encoding_format": "float"}}])
def test_embeddings(embedding_url: str, encoding: dict[str, Any]) -> None:
    """Texts are sent as such: by default LangChain makes token ids of them with OpenAI's tokenizer.
    OpenAI's client asks for base64 where nothing is said."""
    embeddings = OpenAIEmbeddings(
        model=MODEL,
        base_url=f"{embedding_url}/v1",
        api_key=KEY,
        max_retries=0,
        check_embedding_ctx_length=False,
        chunk_size=2,  # two requests
        **encoding,
    )
    found = embeddings.embed_documents(TEXTS)
    assert len(found) == len(TEXTS) and {len(vector) for vector in found} == {EMBEDDING_SIZE}
    for vector in found:
        assert sum(value * value for value in vector) == pytest.approx(1, abs=1e-3)
    for index, text in enumerate(TEXTS):
        likeness = [dot(embeddings.embed_query(text), vector) for vector in found]
        assert likeness[index] == pytest.approx(1, abs=1e-3) == max(likeness)
        assert sorted(likeness)[-2] < 0.99


async def test_embeddings_of_the_asynchronous_client(embedding_url: str) -> None:
    embeddings = OpenAIEmbeddings(
        model=MODEL,
        base_url=f"{embedding_url}/v1",
        api_key=KEY,
        max_retries=0,
        check_embedding_ctx_length=False,
    )
    [vector] = await embeddings.aembed_documents(TEXTS[:1])
    assert dot(vector, await embeddings.aembed_query(TEXTS[0])) == pytest.approx(1, abs=1e-3)


def dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
