"""Questions that the tests ask the demo model, and the right answers.

The demo model answers these at temperature 0 as its training data does (demo/README.md), so a test
can say more than that an answer has the right form. Knows no client.
"""

import json
from typing import Any

from pydantic import BaseModel

MODEL = "pdserve-demo"
KEY = "no-key-is-needed"

SUM_WORDS = "What is 23 + 54?"
SUM_ANSWER = "23 + 54 = 77"
THINK_WORDS = "What is 23 + 54? Think first."
THOUGHT = "I need the sum of 23 and 54.\nIt is 77."

PLACE_WORDS = (
    "Write this as JSON with the keys city and price: The city is Oakdale. The price is 12."
)
PLACE = {"city": "Oakdale", "price": 12}
PLACE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "price": {"type": "integer"}},
    "required": ["city", "price"],
    "additionalProperties": False,
}


class Place(BaseModel):
    """A city and what it costs there."""

    city: str
    price: int


WEATHER_WORDS = "What's the weather in Paris?"
WEATHER_NAME = "get_weather"
WEATHER_ABOUT = "Get the weather."
CITY = "Paris"
WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER_RESULT = '{"temperature": 21, "state": "sunny"}'
WEATHER_ANSWER = "The temperature is 21 and the state is sunny."

CHAT_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": WEATHER_NAME,
        "description": WEATHER_ABOUT,
        "parameters": WEATHER_SCHEMA,
    },
}


def user(words: str) -> list[Any]:
    """A conversation of this message alone."""
    return [{"role": "user", "content": words}]


def is_weather_call(name: str, arguments: str | dict[str, Any]) -> bool:
    """Whether a call is the one that WEATHER_WORDS ask for. arguments: an object, or its JSON."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    return name == WEATHER_NAME and found == {"city": CITY}
