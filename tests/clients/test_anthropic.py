"""Anthropic's client on /v1/messages: text, tools, streams, thinking, counting, errors."""

from typing import Any

import anthropic
import pytest
from clients.asks import (
    CITY,
    KEY,
    MODEL,
    PLACE,
    PLACE_WORDS,
    SUM_ANSWER,
    SUM_WORDS,
    THINK_WORDS,
    THOUGHT,
    WEATHER_ABOUT,
    WEATHER_ANSWER,
    WEATHER_NAME,
    WEATHER_RESULT,
    WEATHER_SCHEMA,
    WEATHER_WORDS,
    Place,
    user,
)

TOOL: Any = {"name": WEATHER_NAME, "description": WEATHER_ABOUT, "input_schema": WEATHER_SCHEMA}
# the client's methods have no temperature any more, which the API still takes
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "extra_body": {"temperature": 0}}
WRONG: dict[str, Any] = {"extra_body": {"temperature": -1}}


@pytest.fixture(scope="module")
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)


def test_text(client: Any) -> None:
    answer = client.messages.create(messages=user(SUM_WORDS), **GREEDY)
    [block] = answer.content
    assert block.type == "text" and block.text == SUM_ANSWER
    assert (answer.type, answer.role, answer.stop_reason) == ("message", "assistant", "end_turn")
    assert answer.usage.input_tokens > 5 and answer.usage.output_tokens > 5


def test_counted_tokens_are_those_of_the_answer(client: Any) -> None:
    asked: dict[str, Any] = {
        "system": [{"type": "text", "text": "You are a helpful assistant."}],
        "messages": user(SUM_WORDS),
        "tools": [TOOL],
    }
    counted = client.messages.count_tokens(model=MODEL, **asked)
    usage = client.messages.create(**asked, **GREEDY).usage
    cached = usage.cache_read_input_tokens or 0
    assert counted.input_tokens == usage.input_tokens + cached


def test_stream_of_text(client: Any) -> None:
    with client.messages.stream(messages=user(SUM_WORDS), **GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 2 and "".join(pieces) == SUM_ANSWER
    assert final.stop_reason == "end_turn" and final.usage.output_tokens > 5


async def test_stream_of_the_asynchronous_client(url: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        events = await client.messages.create(messages=user(SUM_WORDS), stream=True, **GREEDY)
        kinds = [event.type async for event in events]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1


def test_a_tool_is_called_and_its_result_reported(client: Any) -> None:
    messages = user(WEATHER_WORDS)
    answer = client.messages.create(messages=messages, tools=[TOOL], **GREEDY)
    [call] = answer.content
    assert answer.stop_reason == "tool_use" and call.type == "tool_use"
    assert (call.name, call.input) == (WEATHER_NAME, {"city": CITY})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": WEATHER_RESULT}
    messages += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(messages=messages, tools=[TOOL], **GREEDY)
    [block] = answer.content
    assert block.type == "text" and block.text == WEATHER_ANSWER


def test_a_call_in_a_stream(client: Any) -> None:
    with client.messages.stream(messages=user(WEATHER_WORDS), tools=[TOOL], **GREEDY) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    [call] = final.content
    assert call.type == "tool_use" and call.input == {"city": CITY}
    assert len(pieces) >= 2, "an object comes in parts: each member once it is whole, and its end"
    assert final.stop_reason == "tool_use"


def test_the_clients_own_loop_runs_a_tool(client: Any) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the weather."""
        asked.append(city)
        return WEATHER_RESULT

    runner = client.beta.messages.tool_runner(
        messages=user(WEATHER_WORDS), tools=[get_weather], **GREEDY
    )
    final = runner.until_done()
    assert asked == [CITY]
    assert final.content[-1].type == "text" and final.content[-1].text == WEATHER_ANSWER


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": WEATHER_NAME}])
def test_a_call_that_must_be_made(client: Any, choice: Any) -> None:
    for words in (WEATHER_WORDS, "Hello!"):
        answer = client.messages.create(
            messages=user(words),
            tools=[TOOL],
            tool_choice=choice | {"disable_parallel_tool_use": True},
            **GREEDY,
        )
        # the model may think first
        [call] = [block for block in answer.content if block.type != "thinking"]
        assert call.type == "tool_use" and call.name == WEATHER_NAME
        assert isinstance(call.input["city"], str)


def test_parse(client: Any) -> None:
    answer = client.messages.parse(messages=user(PLACE_WORDS), output_format=Place, **GREEDY)
    assert answer.parsed_output == Place(**PLACE)


def test_thinking_is_a_block_and_can_be_sent_back(client: Any) -> None:
    answer = client.messages.create(messages=user(THINK_WORDS), **GREEDY)
    thought, text = answer.content
    assert thought.type == "thinking" and thought.thinking == THOUGHT
    assert text.type == "text" and text.text == SUM_ANSWER
    messages = [
        *user(THINK_WORDS),
        {"role": "assistant", "content": answer.content},
        *user(SUM_WORDS),
    ]
    again = client.messages.create(messages=messages, **GREEDY)
    assert again.content[-1].type == "text" and again.content[-1].text == SUM_ANSWER


def test_thinking_in_a_stream(client: Any) -> None:
    with client.messages.stream(messages=user(THINK_WORDS), **GREEDY) as stream:
        pieces = [event.thinking for event in stream if event.type == "thinking"]
        final = stream.get_final_message()
    assert len(pieces) > 2 and "".join(pieces) == THOUGHT
    assert [block.type for block in final.content] == ["thinking", "text"]


def test_stop_sequences_and_the_end_of_tokens(client: Any) -> None:
    stopped = client.messages.create(messages=user(SUM_WORDS), stop_sequences=[" ="], **GREEDY)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " =")
    assert stopped.content[0].type == "text" and stopped.content[0].text == "23 + 54"
    cut = client.messages.create(messages=user(SUM_WORDS), **GREEDY | {"max_tokens": 3})
    assert cut.stop_reason == "max_tokens"


def test_the_answer_goes_on_from_the_assistants_words(client: Any) -> None:
    messages = [*user(SUM_WORDS), {"role": "assistant", "content": "23 + 54"}]
    answer = client.messages.create(messages=messages, **GREEDY)
    assert answer.content[0].type == "text" and answer.content[0].text == " = 77"


def test_errors_have_the_clients_classes(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(messages=user("Hello!"), **GREEDY | {"model": "claude"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(
            messages=user("Hello!"), **GREEDY | {"extra_body": {"temperature": -1}}
        )
    assert "temperature" in str(wrong.value)
