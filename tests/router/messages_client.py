"""A client of Anthropic's Messages API: makes requests and puts answers together.

It is written by hand from the API's types, so that tests need no client of Anthropic's.
"""

import json
from typing import Any

from router.harness import MODEL, Harness

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a place.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CLOCK: dict[str, Any] = {"name": "clock", "input_schema": {"type": "object"}}
TOOLS = [WEATHER, CLOCK]
ASK: list[Any] = [{"role": "user", "content": "What is it like?"}]
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "messages": ASK}

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"


async def whole(harness: Harness, **fields: Any) -> dict[str, Any]:
    """The message that answers; fields that are None are left out."""
    answer = await harness.http().post(PATH, json=body_of(fields))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def streamed(harness: Harness, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream."""
    answer = await harness.http().post(PATH, json=body_of(fields) | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_in(answer.text)


def body_of(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (BODY | fields).items() if value is not None}


def events_in(text: str) -> list[dict[str, Any]]:
    """The data of server-sent events, each of which is named by its type."""
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, _, data = event.partition("\ndata: ")
        found.append(json.loads(data))
        assert name == f"event: {found[-1]['type']}"
    return found


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream that ended well. Checks the order that clients rely on."""
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("ping") == min(1, kinds.count("content_block_start"))
    message: dict[str, Any] = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    content = message["content"]
    inputs: dict[int, str] = {}
    is_open = False
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(content)
                content.append(event["content_block"])
                is_open = True
            case "content_block_delta":
                assert is_open and event["index"] == len(content) - 1
                _grow(content[-1], event["delta"], inputs, event["index"])
            case "content_block_stop":
                assert is_open and event["index"] == len(content) - 1
                is_open = False
            case other:
                assert other == "ping"
    assert not is_open
    for index, text in inputs.items():
        content[index]["input"] = json.loads(text)
    last = events[-2]
    message |= last["delta"]
    message["usage"] |= last["usage"]
    return message


def _grow(block: dict[str, Any], delta: dict[str, Any], inputs: dict[int, str], at: int) -> None:
    match delta["type"]:
        case "text_delta":
            assert block["type"] == "text" and delta["text"]
            block["text"] += delta["text"]
        case "thinking_delta":
            assert block["type"] == "thinking" and delta["thinking"]
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            assert block["type"] == "thinking"
            block["signature"] = delta["signature"]
        case "input_json_delta":
            assert block["type"] == "tool_use" and delta["partial_json"]
            inputs[at] = inputs.get(at, "") + delta["partial_json"]
        case other:
            raise AssertionError(other)


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Comparable: ids of messages and calls are random, and each call has its own."""
    ids = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids) and message["id"].startswith("msg_")
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {name: value for name, value in message.items() if name != "id"} | {"content": blocks}
