"""OpenAI's client on /v1/chat/completions: parse, tools, streams, errors."""

import json
from enum import Enum
from typing import Any

import openai
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
    THINK_WORDS,
    THOUGHT,
    WEATHER_ANSWER,
    WEATHER_NAME,
    WEATHER_RESULT,
    WEATHER_WORDS,
    Place,
    is_weather_call,
    user,
)
from openai.types.chat import ParsedChatCompletion
from pydantic import BaseModel, Field


class GetWeather(BaseModel):
    """Get the weather."""

    city: str


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "pdserve"


def test_text(client: Any) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user(SUM_WORDS), temperature=0)
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == (SUM_ANSWER, "stop")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id


async def test_text_of_the_asynchronous_client(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        chunks = await client.chat.completions.create(
            model=MODEL,
            messages=user(SUM_WORDS),
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        found = [chunk async for chunk in chunks]
    text = "".join(c.delta.content or "" for chunk in found for c in chunk.choices)
    assert text == SUM_ANSWER
    assert found[-1].usage is not None and found[-1].usage.completion_tokens > 0


def test_choices_and_log_probabilities(client: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=user(SUM_WORDS),
        n=2,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        seed=3,
    )
    assert [choice.message.content for choice in answer.choices] == [SUM_ANSWER] * 2
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        tokens = choice.logprobs.content
        assert bytes(b for token in tokens for b in token.bytes or ()).decode().startswith("23 +")
        assert all(len(token.top_logprobs) == 2 for token in tokens)


def test_parse(client: Any) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=user(PLACE_WORDS), response_format=Place, temperature=0
    )
    assert answer.choices[0].message.parsed == Place(**PLACE)


def test_parse_of_a_stream(client: Any) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=user(PLACE_WORDS), response_format=Place, temperature=0
    ) as stream:
        events = list(stream)
        final: ParsedChatCompletion[Place] = stream.get_final_completion()
    assert final.choices[0].message.parsed == Place(**PLACE)
    [done] = [event for event in events if event.type == "content.done"]
    assert done.parsed == Place(**PLACE)
    deltas = "".join(event.delta for event in events if event.type == "content.delta")
    assert deltas == done.content


class Mood(Enum):
    good = "good"
    bad = "bad"


class Stay(BaseModel):
    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=99)


class Guest(BaseModel):
    """Bounded, so that an answer has an end whatever the model writes."""

    name: str = Field(max_length=20)
    mood: Mood
    age: int | None = Field(ge=0, le=120)
    stays: list[Stay] = Field(max_length=2)


def test_parse_of_nested_models_enums_and_nulls(client: Any) -> None:
    """The demo model has not seen such schemas; the grammar makes its answers valid."""
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=user("Write this as JSON: The name is Mira. The mood is good. The age is 9."),
        response_format=Guest,
        temperature=0,
    )
    [choice] = answer.choices
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Guest)
    assert choice.message.parsed.name == "Mira"


def test_an_answer_that_is_cut_off_is_told_from_one_that_is_wrong(client: Any) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=MODEL, messages=user(PLACE_WORDS), response_format=Place, max_tokens=3
        )


def test_json_object(client: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=user(PLACE_WORDS),
        response_format={"type": "json_object"},
        temperature=0,
    )
    assert json.loads(answer.choices[0].message.content or "") == PLACE


def test_a_tool_is_called_and_its_result_reported(client: Any) -> None:
    messages = user(WEATHER_WORDS)
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=messages,
        tools=[openai.pydantic_function_tool(GetWeather, name=WEATHER_NAME)],
        temperature=0,
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city=CITY)
    messages += [
        choice.message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": WEATHER_RESULT},
    ]
    told = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[CHAT_TOOL], temperature=0
    )
    assert told.choices[0].message.content == WEATHER_ANSWER


def test_a_call_in_a_stream(client: Any) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=user(WEATHER_WORDS), tools=[CHAT_TOOL], temperature=0
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    [done] = [e for e in events if e.type == "tool_calls.function.arguments.done"]
    assert is_weather_call(done.name, done.arguments)
    pieces = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert len(pieces) > 2, "arguments come as they are generated"
    assert "".join(e.arguments_delta for e in pieces) == done.arguments
    assert final.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": WEATHER_NAME}}]
)
def test_a_call_that_must_be_made(client: Any, choice: object) -> None:
    """Also to words that ask for none."""
    for words in (WEATHER_WORDS, "Hello!"):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=user(words),
            tools=[CHAT_TOOL],
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
        )
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == WEATHER_NAME
        assert isinstance(json.loads(call.function.arguments)["city"], str)


def test_no_call_where_none_may_be_made(client: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=user(WEATHER_WORDS),
        tools=[CHAT_TOOL],
        tool_choice="none",
        temperature=0,
    )
    message = answer.choices[0].message
    assert not message.tool_calls and message.content


def test_reasoning(client: Any) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user(THINK_WORDS), temperature=0)
    message = answer.choices[0].message
    assert message.content == SUM_ANSWER
    assert (message.model_extra or {})["reasoning_content"] == THOUGHT
    assert answer.usage.completion_tokens_details.reasoning_tokens > 5


def test_errors_have_the_clients_classes(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5", messages=user("Hello!"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=user("Hello!"), temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(
            model=MODEL,
            messages=[*user("Hello!"), {"role": "tool", "tool_call_id": "x"}],
        )
    assert "messages[1].content" in str(wrong.value)


def test_a_tool_is_called_although_the_content_has_a_form(client: Any) -> None:
    """As agents with structured answers ask: calls first, the object when they are done."""
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=user(WEATHER_WORDS),
        tools=[openai.pydantic_function_tool(GetWeather, name=WEATHER_NAME)],
        response_format=Place,
        temperature=0,
    )
    calls = answer.choices[0].message.tool_calls or []
    assert len(calls) == 1, answer.choices[0].message.content
    assert calls[0].function.parsed_arguments == GetWeather(city=CITY)


def test_a_demanded_call_beside_a_form_of_the_content(client: Any) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=user(WEATHER_WORDS),
        tools=[openai.pydantic_function_tool(GetWeather, name=WEATHER_NAME)],
        tool_choice="required",
        response_format=Place,
        temperature=0,
    )
    [call] = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city=CITY)


def test_completions(client: Any) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["45 + 38 =", "23 + 54 ="], max_tokens=4, temperature=0, stop="\n"
    )
    assert [choice.text.split()[0] for choice in answer.choices] == ["83", "77"]
