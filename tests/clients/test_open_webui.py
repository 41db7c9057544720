"""Open WebUI's own calls, recorded by open_webui/record_calls.py, and what it reads of the answers.

It pins the versions of other clients, so it cannot be installed beside them. A call in calls.json
is as Open WebUI sent it. The answers are read as its `routers/openai.py` and `utils/middleware.py`
do: a stream by its content type, deltas one by one, a task by its one choice.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from clients.asks import MODEL, SUM_ANSWER, THOUGHT, WEATHER_ANSWER, is_weather_call

CALLS = json.loads((Path(__file__).parent / "open_webui" / "calls.json").read_text())["calls"]
TIMEOUT_S = 120
NEXT_ANSWER = "12 + 30 = 42"


def recorded(doing: str) -> list[dict[str, Any]]:
    """The calls that came while Open WebUI did this."""
    found = [call for call in CALLS if call["doing"] == doing]
    assert found, f"calls.json has none to {doing}"
    return found


def chats(doing: str) -> list[dict[str, Any]]:
    """Those of a conversation, which are streams; the others are Open WebUI's tasks."""
    return [call for call in recorded(doing) if call["body"]["stream"]]


def replay(url: str, call: dict[str, Any]) -> httpx.Response:
    body = json.dumps(call["body"]) if "body" in call else None
    return httpx.request(
        call["method"], url + call["path"], headers=call["headers"], content=body, timeout=TIMEOUT_S
    )


class Answer:
    """Puts a stream together as Open WebUI does."""

    def __init__(self, response: httpx.Response) -> None:
        assert response.status_code == 200, response.text
        assert "text/event-stream" in response.headers["content-type"]
        self.text = ""
        self.thought = ""
        self.calls: dict[int, dict[str, Any]] = {}
        self.reason: str | None = None
        self.usage: dict[str, Any] = {}
        lines = [line for line in response.text.split("\n") if line]
        assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
        for line in lines[:-1]:
            self._read(json.loads(line.removeprefix("data: ")))

    def _read(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk
        self.usage |= chunk.get("usage") or {}
        if not chunk["choices"]:
            return
        choice = chunk["choices"][0]
        self.reason = choice.get("finish_reason") or self.reason
        delta = choice.get("delta", {})
        self.text += delta.get("content") or ""
        self.thought += delta.get("reasoning_content") or delta.get("reasoning") or ""
        for part in delta.get("tool_calls") or []:
            whole = self.calls.setdefault(part["index"], {"id": part.get("id"), "arguments": ""})
            function = part.get("function", {})
            whole["name"] = function.get("name") or whole.get("name")
            whole["arguments"] += function.get("arguments") or ""


@pytest.mark.parametrize("call", recorded("list the models"))
def test_the_list_of_models(url: str, call: dict[str, Any]) -> None:
    response = replay(url, call)
    assert response.status_code == 200
    listed = response.json()
    assert "error" not in listed and MODEL in [model["id"] for model in listed["data"]]


@pytest.mark.parametrize(
    ("doing", "text", "thought"),
    [
        ("answer a first message", SUM_ANSWER, ""),
        ("answer a next message", NEXT_ANSWER, ""),
        ("think", SUM_ANSWER, THOUGHT),
        ("obey the chat's controls", SUM_ANSWER, ""),
    ],
)
def test_a_message(url: str, doing: str, text: str, thought: str) -> None:
    [call] = chats(doing)
    answer = Answer(replay(url, call))
    assert (answer.text, answer.thought, answer.reason) == (text, thought, "stop")
    usage = answer.usage
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 10


def test_a_tool_of_open_webui(url: str) -> None:
    """Its loop: the call, then the tool's result in the conversation."""
    asks, reports = chats("call a tool")
    answer = Answer(replay(url, asks))
    [call] = answer.calls.values()
    assert call["id"] and is_weather_call(call["name"], call["arguments"])
    assert answer.reason == "tool_calls" and answer.usage
    answer = Answer(replay(url, reports))
    assert (answer.text, answer.calls, answer.reason) == (WEATHER_ANSWER, {}, "stop")


TASKS = [call for call in CALLS if not call.get("body", {"stream": True})["stream"]]


@pytest.mark.parametrize("call", TASKS, ids=[call["doing"] for call in TASKS])
def test_a_task(url: str, call: dict[str, Any]) -> None:
    """Titles, tags, follow-ups, queries, completed words: Open WebUI reads the one choice."""
    response = replay(url, call)
    assert response.status_code == 200 and "json" in response.headers["content-type"]
    [choice] = response.json()["choices"]
    content = choice["message"]["content"]
    assert isinstance(content, str) and content
    if call["doing"] == "answer a client of Open WebUI's API":
        assert content == SUM_ANSWER


@pytest.mark.parametrize("call", recorded("refuse a control"))
def test_a_control_that_the_model_does_not_have(url: str, call: dict[str, Any]) -> None:
    """Open WebUI shows the message in the chat. The control is one of Ollama's, or the model's
    template does not read it."""
    response = replay(url, call)
    assert response.status_code == 400 and "json" in response.headers["content-type"]
    error = response.json()["error"]
    assert error["param"] in call["body"] and error["message"].startswith(error["param"])


def test_a_chat_that_is_too_long(url: str) -> None:
    """As with the 28 tools that Open WebUI sends by itself: refused before a stream begins."""
    [call] = chats("answer a first message")
    messages = [{"role": "user", "content": "What is 23 + 54? " * 600}]
    response = replay(url, call | {"body": call["body"] | {"messages": messages}})
    assert response.status_code == 400 and "json" in response.headers["content-type"]
    assert "maximum context length" in response.json()["error"]["message"]
