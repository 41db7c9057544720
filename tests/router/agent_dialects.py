"""An agent's side of each dialect: what it sends, how it reads streams and whole answers, what it
keeps of them for the next turn.

An agent of any dialect has the same turns, so what it read is an `Answer` whatever the dialect.
Each checks the protocol as it reads. Knows no router; used by tests/test_agent_loop.py.
"""

import json
from dataclasses import dataclass
from typing import Any, Protocol

from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from router import messages_client, responses_support
from router.harness import MODEL
from router.turn_models import message_of

Json = dict[str, Any]

# name -> (what it does, schema of its arguments)
TOOLS: dict[str, tuple[str, Json]] = {
    "get_weather": ("The weather of a place.", {"type": "object", "properties": {}}),
    "clock": ("The time.", {"type": "object"}),
}


@dataclass(frozen=True)
class Call:
    """A call of a tool. `ident` is its id, which is random."""

    ident: str
    name: str
    arguments: Json


@dataclass(frozen=True)
class Answer:
    """An answer. `is_final` is True if the model asks for no tool and waits for the user."""

    thought: str
    content: str
    calls: tuple[Call, ...]
    is_final: bool

    def shown(self) -> tuple[Any, ...]:
        """Returns the answer without the calls' ids."""
        calls = [(call.name, call.arguments) for call in self.calls]
        return self.thought, self.content, calls, self.is_final


def _named(name: str, key: str, about: str, schema: Json) -> Json:
    return {"name": name, "description": about, key: schema}


class AgentDialect(Protocol):
    """Speaks one conversation with the endpoint at `path`."""

    path: str

    def ask(self, words: str) -> None:
        """The user says something."""

    def body(self) -> Json:
        """Makes the request for the next answer, without `stream`."""

    def read_stream(self, text: str) -> Answer:
        """Reads the answer that a stream showed, and keeps it for the next turn.

        Raises AssertionError for an event that is not allowed at its place.
        """

    def read_whole(self, body: Json) -> Answer:
        """Does the same for an answer that was not streamed."""

    def report(self, results: list[tuple[Call, str]]) -> None:
        """Takes the results of the tools."""


class ChatAgent:
    path = "/v1/chat/completions"

    def __init__(self) -> None:
        self._messages: list[Json] = []

    def ask(self, words: str) -> None:
        self._messages.append({"role": "user", "content": words})

    def body(self) -> Json:
        tools = [
            {"type": "function", "function": _named(name, "parameters", *of)}
            for name, of in TOOLS.items()
        ]
        return {"model": MODEL, "messages": self._messages, "tools": tools}

    def read_stream(self, text: str) -> Answer:
        *lines, done, rest = text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        message, reason = message_of([ChatCompletionChunk.model_validate(e) for e in events])
        return self._read({"role": "assistant", "content": None, **message}, reason)

    def read_whole(self, body: Json) -> Answer:
        ChatCompletion.model_validate(body)
        [choice] = body["choices"]
        return self._read(choice["message"], choice["finish_reason"])

    def _read(self, message: Json, reason: str | None) -> Answer:
        self._messages.append(message)
        calls = tuple(
            Call(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        )
        assert reason == ("tool_calls" if calls else "stop")
        thought = message.get("reasoning_content", "")
        return Answer(thought, message["content"] or "", calls, reason == "stop")

    def report(self, results: list[tuple[Call, str]]) -> None:
        self._messages += [
            {"role": "tool", "tool_call_id": call.ident, "content": text} for call, text in results
        ]


class ResponsesAgent:
    path = responses_support.PATH

    def __init__(self) -> None:
        self._items: list[Json] = []

    def ask(self, words: str) -> None:
        self._items.append({"role": "user", "content": words})

    def body(self) -> Json:
        tools = [
            {"type": "function", **_named(name, "parameters", *of)} for name, of in TOOLS.items()
        ]
        return {"model": MODEL, "input": self._items, "tools": tools}

    def read_stream(self, text: str) -> Answer:
        return self.read_whole(responses_support.checked(responses_support.parsed(text)))

    def read_whole(self, body: Json) -> Answer:
        Response.model_validate(body)
        assert body["status"] == "completed"
        self._items += body["output"]
        found = {"reasoning": "", "message": ""}
        calls = []
        for item in body["output"]:
            if item["type"] == "function_call":
                calls.append(Call(item["call_id"], item["name"], json.loads(item["arguments"])))
            else:
                found[item["type"]] += "".join(part["text"] for part in item["content"])
        return Answer(found["reasoning"], found["message"], tuple(calls), not calls)

    def report(self, results: list[tuple[Call, str]]) -> None:
        self._items += [
            {"type": "function_call_output", "call_id": call.ident, "output": text}
            for call, text in results
        ]


class MessagesAgent:
    path = messages_client.PATH

    def __init__(self) -> None:
        self._messages: list[Json] = []

    def ask(self, words: str) -> None:
        self._messages.append({"role": "user", "content": words})

    def body(self) -> Json:
        tools = [_named(name, "input_schema", *of) for name, of in TOOLS.items()]
        asked = {"model": MODEL, "max_tokens": 4000, "tools": tools}
        return asked | {"messages": self._messages}

    def read_stream(self, text: str) -> Answer:
        return self.read_whole(messages_client.message_of(messages_client.events_in(text)))

    def read_whole(self, body: Json) -> Answer:
        assert (body["type"], body["role"]) == ("message", "assistant")
        self._messages.append({"role": "assistant", "content": body["content"]})
        found = {"thinking": "", "text": ""}
        calls = []
        for block in body["content"]:
            if block["type"] == "tool_use":
                calls.append(Call(block["id"], block["name"], block["input"]))
            else:
                found[block["type"]] += block[block["type"]]
        assert body["stop_reason"] == ("tool_use" if calls else "end_turn")
        return Answer(found["thinking"], found["text"], tuple(calls), not calls)

    def report(self, results: list[tuple[Call, str]]) -> None:
        blocks = [
            {"type": "tool_result", "tool_use_id": call.ident, "content": text}
            for call, text in results
        ]
        self._messages.append({"role": "user", "content": blocks})


DIALECTS: dict[str, type[AgentDialect]] = {
    "chat": ChatAgent,
    "responses": ResponsesAgent,
    "messages": MessagesAgent,
}
