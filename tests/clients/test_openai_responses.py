"""OpenAI's client on /v1/responses: parse, tools, streams, errors."""

import json
from typing import Any

import openai
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
    is_weather_call,
    user,
)
from pydantic import BaseModel

TOOL: Any = {
    "type": "function",
    "name": WEATHER_NAME,
    "description": WEATHER_ABOUT,
    "parameters": WEATHER_SCHEMA,
    "strict": True,
}


class GetWeather(BaseModel):
    """Get the weather."""

    city: str


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def test_text(client: Any) -> None:
    answer = client.responses.create(model=MODEL, input=SUM_WORDS, temperature=0)
    assert (answer.output_text, answer.status) == (SUM_ANSWER, "completed")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_instructions_and_messages(client: Any) -> None:
    parts = [{"type": "input_text", "text": SUM_WORDS}]
    answer = client.responses.create(
        model=MODEL,
        instructions="You are a helpful assistant.",
        input=[{"role": "user", "content": parts}],
        temperature=0,
        store=False,
    )
    assert answer.output_text == SUM_ANSWER


def test_stream_of_text(client: Any) -> None:
    with client.responses.stream(model=MODEL, input=SUM_WORDS, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 2 and "".join(deltas) == final.output_text == SUM_ANSWER


def test_parse(client: Any) -> None:
    answer = client.responses.parse(
        model=MODEL, input=PLACE_WORDS, text_format=Place, temperature=0
    )
    assert answer.output_parsed == Place(**PLACE)


def test_parse_of_a_stream(client: Any) -> None:
    with client.responses.stream(
        model=MODEL, input=PLACE_WORDS, text_format=Place, temperature=0
    ) as stream:
        done = [event for event in stream if event.type == "response.output_text.done"]
        final = stream.get_final_response()
    assert [event.parsed for event in done] == [Place(**PLACE)]
    assert final.output_parsed == Place(**PLACE)


def test_a_tool_is_called_and_its_result_reported(client: Any) -> None:
    tool = openai.pydantic_function_tool(GetWeather, name=WEATHER_NAME)["function"]
    items: list[Any] = user(WEATHER_WORDS)
    answer = client.responses.parse(
        model=MODEL,
        input=items,
        tools=[{"type": "function", **tool}],
        temperature=0,
    )
    [call] = answer.output
    assert call.type == "function_call" and call.parsed_arguments == {"city": CITY}
    items += answer.output
    items.append(
        {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER_RESULT}
    )
    answer = client.responses.parse(model=MODEL, input=items, tools=[TOOL], temperature=0)
    assert answer.output_text == WEATHER_ANSWER


def test_a_call_in_a_stream(client: Any) -> None:
    with client.responses.stream(
        model=MODEL, input=WEATHER_WORDS, tools=[TOOL], temperature=0
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    [call] = final.output
    assert call.type == "function_call" and is_weather_call(call.name, call.arguments)
    deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 2 and "".join(event.delta for event in deltas) == call.arguments
    assert {event.item_id for event in deltas} == {call.id}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": WEATHER_NAME}])
def test_a_call_that_must_be_made(client: Any, choice: Any) -> None:
    for words in (WEATHER_WORDS, "Hello!"):
        answer = client.responses.create(
            model=MODEL,
            input=words,
            tools=[TOOL],
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
        )
        # the model may reason first
        [call] = [item for item in answer.output if item.type == "function_call"]
        assert call.name == WEATHER_NAME and not answer.output_text
        assert isinstance(json.loads(call.arguments)["city"], str)


def test_reasoning_is_an_item_and_can_be_sent_back(client: Any) -> None:
    answer = client.responses.create(model=MODEL, input=THINK_WORDS, temperature=0)
    thought, message = answer.output
    assert thought.type == "reasoning" and thought.content is not None
    assert "".join(part.text for part in thought.content) == THOUGHT
    assert message.type == "message" and answer.output_text == SUM_ANSWER
    items = [*user(THINK_WORDS), *answer.output, *user(SUM_WORDS)]
    again = client.responses.create(model=MODEL, input=items, temperature=0)
    assert again.output_text == SUM_ANSWER


def test_an_answer_that_is_cut_off(client: Any) -> None:
    answer = client.responses.create(model=MODEL, input="Tell me a story.", max_output_tokens=16)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_errors_have_the_clients_classes(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.responses.create(model=MODEL, input="Hello!", previous_response_id="resp_1")
    assert wrong.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-5", input="Hello!")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
