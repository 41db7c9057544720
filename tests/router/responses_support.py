"""Requests for tests of /v1/responses, and streams that are checked event by event."""

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from router.harness import MODEL, Harness

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CLOCK: dict[str, Any] = {"type": "function", "name": "clock"}
ASK: dict[str, Any] = {"model": MODEL, "input": "What is it like?", "tools": [WEATHER, CLOCK]}
PATH = "/v1/responses"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nIt may rain.\n</think>\n\n"
OPEN = {"chat_template_kwargs": {"enable_thinking": True}}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}

_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ENDS = ("response.completed", "response.incomplete", "response.failed")


async def whole(harness: Harness, **fields: Any) -> dict[str, Any]:
    """The response object, which OpenAI's type must take."""
    answer = await harness.http().post(PATH, json=ASK | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    Response.model_validate(found)
    return found


async def events_of(harness: Harness, **fields: Any) -> list[dict[str, Any]]:
    """All events of a stream, as they were sent."""
    answer = await harness.http().post(PATH, json=ASK | {"stream": True} | fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return parsed(answer.text)


def parsed(text: str) -> list[dict[str, Any]]:
    """Each event has its name in a line of its own, and OpenAI's types take it."""
    events = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        _EVENTS.validate_python(event)
        events.append(event)
    return events


async def streamed(harness: Harness, **fields: Any) -> dict[str, Any]:
    """The response object that a checked stream ends with."""
    return checked(await events_of(harness, **fields))


def checked(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Follow the stream as a client does, which puts the items together, and compare what it has
    with the object at the end, which is returned."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    begun, running, *changes, end = events
    assert (begun["type"], running["type"]) == ("response.created", "response.in_progress")
    assert begun["response"]["status"] == "in_progress" and begun["response"]["output"] == []
    assert begun["response"] == running["response"] and end["type"] in ENDS
    assert end["type"] == f"response.{end['response']['status']}"
    items: list[dict[str, Any]] = []
    for number, change in enumerate(changes):
        if change["type"] == "error":
            assert number == len(changes) - 1 and end["type"] == "response.failed"
            return end["response"]
        _follow(items, change)
    assert items == end["response"]["output"]
    same = ("id", "created_at", "model", "tools", "metadata", "instructions", "text", "store")
    assert all(begun["response"][name] == end["response"][name] for name in same)
    return end["response"]


def _follow(items: list[dict[str, Any]], event: dict[str, Any]) -> None:
    kind, index = event["type"].removeprefix("response."), event["output_index"]
    if kind == "output_item.added":
        assert index == len(items), "items come one after the other"
        assert all(item["status"] != "in_progress" for item in items)
        items.append(event["item"])
        return
    assert index == len(items) - 1, "an event of an item that is closed"
    item = items[index]
    assert item["status"] == "in_progress"
    if kind == "output_item.done":
        assert event["item"]["status"] in ("completed", "incomplete")
        assert event["item"] == item | {"status": event["item"]["status"]}
        items[index] = event["item"]
        return
    assert event["item_id"] == item["id"]
    if kind.startswith("function_call_arguments"):
        if kind.endswith("delta"):
            assert event["delta"]
            item["arguments"] += event["delta"]
        else:
            assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
        return
    assert event["content_index"] == 0
    if kind == "content_part.added":
        assert item["content"] == []
        item["content"].append(event["part"])
        return
    [part] = item["content"]
    if kind == "content_part.done":
        assert event["part"] == part
    elif kind.endswith(".delta"):
        assert kind == f"{part['type']}.delta"
        part["text"] += event["delta"]
        part.get("logprobs", []).extend(event.get("logprobs", []))
    else:
        assert kind == f"{part['type']}.done" and event["text"] == part["text"]
        assert event.get("logprobs", []) == part.get("logprobs", [])


def comparable(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two answers of one generation: ids and times."""
    items = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in response["output"]
    ]
    ids = [item["id"] for item in response["output"]]
    assert len(set(ids)) == len(ids)
    prefixes = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}
    assert all(item["id"].startswith(prefixes[item["type"]]) for item in response["output"])
    assert response["id"].startswith("resp_")
    own = ("id", "created_at", "completed_at", "timeline")
    return {n: v for n, v in response.items() if n not in own} | {"output": items}


def shown(response: dict[str, Any]) -> list[tuple[str, str]]:
    """(kind of item, its text or its arguments), in order."""
    return [
        (item["type"], item["arguments"] if "arguments" in item else item["content"][0]["text"])
        for item in response["output"]
    ]
