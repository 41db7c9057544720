"""litellm: chat, streams, tools, and its bridges from /v1/responses and /v1/messages."""

import json
from typing import Any

import litellm
import pytest
from clients.asks import (
    CHAT_TOOL,
    CITY,
    KEY,
    MODEL,
    PLACE,
    PLACE_WORDS,
    SUM_ANSWER,
    SUM_WORDS,
    WEATHER_ABOUT,
    WEATHER_ANSWER,
    WEATHER_NAME,
    WEATHER_RESULT,
    WEATHER_SCHEMA,
    WEATHER_WORDS,
    Place,
    is_weather_call,
    user,
)

MESSAGES_TOOL = {
    "name": WEATHER_NAME,
    "description": WEATHER_ABOUT,
    "input_schema": WEATHER_SCHEMA,
}


@pytest.fixture
def greedy(url: str) -> dict[str, Any]:
    """hosted_vllm: litellm's name for servers that speak OpenAI's API with vLLM's extensions."""
    return {
        "model": f"hosted_vllm/{MODEL}",
        "api_base": f"{url}/v1",
        "api_key": KEY,
        "temperature": 0,
        "num_retries": 0,
    }


@pytest.fixture(params=["hosted_vllm", "openai"])
def chat(request: pytest.FixtureRequest, greedy: dict[str, Any]) -> dict[str, Any]:
    return greedy | {"model": f"{request.param}/{MODEL}"}


def test_text(chat: dict[str, Any]) -> None:
    answer = litellm.completion(messages=user(SUM_WORDS), **chat)
    assert answer.choices[0].message.content == SUM_ANSWER
    assert answer.usage.total_tokens > 10


def test_stream(chat: dict[str, Any]) -> None:
    stream = litellm.completion(
        messages=user(SUM_WORDS), stream=True, stream_options={"include_usage": True}, **chat
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == SUM_ANSWER
    whole = litellm.stream_chunk_builder(chunks)
    assert whole is not None and whole.usage.completion_tokens > 5


async def test_asynchronous_stream(chat: dict[str, Any]) -> None:
    stream = await litellm.acompletion(messages=user(SUM_WORDS), stream=True, **chat)
    text = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(text) == SUM_ANSWER


def test_a_tool_is_called_and_its_result_reported(chat: dict[str, Any]) -> None:
    messages = user(WEATHER_WORDS)
    answer = litellm.completion(messages=messages, tools=[CHAT_TOOL], **chat)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert is_weather_call(call.function.name, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": WEATHER_RESULT}
    messages += [choice.message.model_dump(), result]
    answer = litellm.completion(messages=messages, tools=[CHAT_TOOL], **chat)
    assert answer.choices[0].message.content == WEATHER_ANSWER


def test_a_call_in_a_stream(chat: dict[str, Any]) -> None:
    chunks = list(
        litellm.completion(
            messages=user(WEATHER_WORDS),
            tools=[CHAT_TOOL],
            tool_choice="required",
            stream=True,
            **chat,
        )
    )
    whole: Any = litellm.stream_chunk_builder(chunks)
    [call] = whole.choices[0].message.tool_calls
    assert is_weather_call(call.function.name, call.function.arguments)


def test_structured_output(chat: dict[str, Any]) -> None:
    answer = litellm.completion(messages=user(PLACE_WORDS), response_format=Place, **chat)
    assert json.loads(answer.choices[0].message.content) == PLACE


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_the_responses_api(greedy: dict[str, Any], provider: str) -> None:
    """litellm knows of both that they have it."""
    answer = litellm.responses(
        input=SUM_WORDS, **greedy | {"model": f"{provider}/{MODEL}", "store": False}
    )
    [item] = [item for item in answer.output if item.type == "message"]
    assert item.content[0].text == SUM_ANSWER


def test_a_call_of_the_responses_api_in_a_stream(greedy: dict[str, Any]) -> None:
    tool = {"type": "function", "name": WEATHER_NAME, "parameters": WEATHER_SCHEMA}
    stream = litellm.responses(
        input=WEATHER_WORDS,
        tools=[tool | {"description": WEATHER_ABOUT}],
        stream=True,
        **greedy | {"model": f"openai/{MODEL}"},
    )
    *_, last = list(stream)
    assert last.type == "response.completed"
    [call] = [item for item in last.response.output if item.type == "function_call"]
    assert is_weather_call(call.name, call.arguments)


def test_the_responses_api_through_the_bridge(greedy: dict[str, Any]) -> None:
    """The Responses API at the caller's side; litellm asks /v1/chat/completions."""
    asked = greedy | {"model": f"openai/{MODEL}", "use_chat_completions_api": True}
    answer = litellm.responses(input=SUM_WORDS, **asked)
    assert answer.output[-1].content[0].text == SUM_ANSWER
    tool = {"type": "function", "name": WEATHER_NAME, "parameters": WEATHER_SCHEMA}
    answer = litellm.responses(input=WEATHER_WORDS, tools=[tool], tool_choice="required", **asked)
    [call] = [item for item in answer.output if item.type == "function_call"]
    assert is_weather_call(call.name, call.arguments)


async def test_the_messages_api_through_the_bridge(greedy: dict[str, Any]) -> None:
    """Anthropic's form at the caller's side; litellm asks /v1/chat/completions."""
    answer: Any = await litellm.anthropic.messages.acreate(
        messages=user(WEATHER_WORDS), max_tokens=100, tools=[MESSAGES_TOOL], **greedy
    )
    [call] = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert (call["name"], call["input"]) == (WEATHER_NAME, {"city": CITY})
    assert answer["stop_reason"] == "tool_use"


def test_the_messages_api(url: str) -> None:
    """OpenAI's form at the caller's side; litellm asks /v1/messages."""
    asked: dict[str, Any] = {
        "model": f"anthropic/{MODEL}",
        "api_base": url,
        "api_key": KEY,
        "temperature": 0,
        "max_tokens": 100,
        "num_retries": 0,
    }
    answer = litellm.completion(messages=user(WEATHER_WORDS), tools=[CHAT_TOOL], **asked)
    [call] = answer.choices[0].message.tool_calls
    assert is_weather_call(call.function.name, call.function.arguments)
    chunks = litellm.completion(messages=user(SUM_WORDS), stream=True, **asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == SUM_ANSWER


def test_errors_have_litellms_classes(chat: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(messages=user("Hello!"), top_p=7, **chat)


LONG = user(f"{SUM_WORDS} " * 600)  # of three contexts


def test_a_prompt_that_is_too_long(chat: dict[str, Any]) -> None:
    """litellm knows it by its words, and a router of its then takes a model with more context."""
    for is_stream in (False, True):
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(messages=LONG, stream=is_stream, **chat)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=user("Hello!"), max_tokens=5000, **chat)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.responses(input=LONG[0]["content"], **chat)
    with pytest.raises(litellm.BadRequestError) as other:
        litellm.completion(messages=user("Hello!"), max_tokens=-1, **chat)
    assert not isinstance(other.value, litellm.ContextWindowExceededError)


async def test_a_prompt_that_is_too_long_for_the_messages_api(
    url: str, greedy: dict[str, Any]
) -> None:
    """Asked in OpenAI's form, in Anthropic's, and through the bridge to /v1/chat/completions."""
    asked = greedy | {"model": f"anthropic/{MODEL}", "api_base": url, "max_tokens": 10}
    with pytest.raises(litellm.ContextWindowExceededError, match="prompt is too long"):
        litellm.completion(messages=LONG, **asked)
    with pytest.raises(litellm.ContextWindowExceededError, match="prompt is too long"):
        await litellm.anthropic.messages.acreate(messages=LONG, **asked)
    with pytest.raises(litellm.ContextWindowExceededError):
        await litellm.anthropic.messages.acreate(messages=LONG, max_tokens=10, **greedy)
