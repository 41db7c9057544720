"""instructor's modes for servers of OpenAI's and Anthropic's kind."""

from collections.abc import Iterable
from typing import Any

import anthropic
import instructor
import openai
import pytest
from clients.asks import CITY, KEY, MODEL, PLACE, PLACE_WORDS, WEATHER_WORDS, Place
from instructor import Mode
from pydantic import BaseModel

CHAT_MODES = (
    Mode.TOOLS,
    Mode.TOOLS_STRICT,
    Mode.JSON,
    Mode.JSON_SCHEMA,
    Mode.JSON_O1,
    Mode.MD_JSON,
)
ANTHROPIC_MODES = (Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_REASONING_TOOLS, Mode.ANTHROPIC_JSON)
PLACE_MESSAGES: list[Any] = [{"role": "user", "content": PLACE_WORDS}]


def chat(url: str, mode: Mode) -> instructor.Instructor:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    return instructor.from_openai(client, mode=mode)


@pytest.mark.parametrize("mode", CHAT_MODES, ids=lambda mode: mode.name)
def test_an_object(url: str, mode: Mode) -> None:
    """Without a second try: max_retries=0."""
    found = chat(url, mode).chat.completions.create(
        model=MODEL,
        messages=PLACE_MESSAGES,
        response_model=Place,
        temperature=0,
        max_tokens=400,
        max_retries=0,
    )
    assert isinstance(found, Place) and found.model_dump() == PLACE


@pytest.mark.parametrize("mode", (Mode.TOOLS, Mode.JSON, Mode.JSON_SCHEMA), ids=lambda m: m.name)
def test_an_object_in_a_stream(url: str, mode: Mode) -> None:
    stream = chat(url, mode).chat.completions.create_partial(
        model=MODEL,
        messages=PLACE_MESSAGES,
        response_model=Place,
        temperature=0,
        max_tokens=400,
        max_retries=0,
    )
    states = list(stream)
    assert len(states) > 2 and states[-1].model_dump() == PLACE
    assert any(state.city == "Oakdale" and state.price is None for state in states)


class get_weather(BaseModel):  # a tool is a class here; the name is the one that the model sees
    """Get the weather."""

    city: str


def test_parallel_tools(url: str) -> None:
    found = chat(url, Mode.PARALLEL_TOOLS).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": WEATHER_WORDS}],
        response_model=Iterable[get_weather],
        temperature=0,
        max_retries=0,
    )
    assert [call.city for call in found] == [CITY]


def test_the_responses_api(url: str) -> None:
    client = chat(url, Mode.RESPONSES_TOOLS)
    found = client.responses.create(
        model=MODEL, input=PLACE_WORDS, response_model=Place, temperature=0, max_retries=0
    )
    assert isinstance(found, Place) and found.model_dump() == PLACE


@pytest.mark.parametrize("mode", ANTHROPIC_MODES, ids=lambda mode: mode.name)
def test_an_object_of_the_messages_api(url: str, mode: Mode) -> None:
    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    found = instructor.from_anthropic(client, mode=mode).chat.completions.create(
        model=MODEL,
        messages=PLACE_MESSAGES,
        response_model=Place,
        max_tokens=400,
        extra_body={"temperature": 0},  # which the client's methods have no more
        max_retries=0,
    )
    assert isinstance(found, Place) and found.model_dump() == PLACE
