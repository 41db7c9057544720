"""Servers that answer strangely, and what of an answer a conversation keeps."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pdserve.chat.conversation import Conversation
from pdserve.chat.screen import visible
from pdserve.chat.server import Server, ServerError
from pdserve.text.answers.pieces import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Piece,
    Reasoning,
    joined,
)

MODELS = {"data": [{"id": "first"}, {"id": "second"}]}


class Odd(ThreadingHTTPServer):
    """Answers with what the test sets. bodies: of the requests."""

    models: Any = MODELS
    status = 200
    kind = "text/event-stream"
    headers: dict[str, str]
    said = b""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[Any] = []
        self.headers = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def says(self, *events: Any, done: bool = True) -> None:
        lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events]
        self.said = "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


class Handler(BaseHTTPRequestHandler):
    server: Odd

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, "application/json", json.dumps(self.server.models).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.bodies.append(json.loads(body))
        self._send(self.server.status, self.server.kind, self.server.said)

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        more = {"content-type": kind, "content-length": str(len(data))} | self.server.headers
        for name, value in more.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def odd() -> Iterator[Odd]:
    server = Odd()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(odd: Odd, streams: bool = True, **body: Any) -> list[Any]:
    with Server(odd.url, None, None, body, 20) as server:
        return list(server.answer([{"role": "user", "content": "x"}], streams))


def delta(reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


def test_pieces_of_a_stream_and_of_a_whole_answer_are_the_same(odd: Odd) -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    odd.says(
        delta(role="assistant", content=""),
        delta(reasoning="a", reasoning_content="a"),
        delta(reasoning_content="b"),
        delta(content="c\u2028d"),
        delta(tool_calls=[call]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"x":'}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": "1}"}}]),
        delta(tool_calls=[call | {"index": 1, "id": "c2"}]),
        delta("tool_calls"),
        {"choices": [], "usage": {"total_tokens": 3}},
    )
    streamed = ask(odd, temperature=0.5)
    assert joined(streamed[:-1]) == [
        Reasoning("ab"),
        Content("c\u2028d"),
        CallBegin(0, "f", "c1"),
        CallArguments(0, '{"x":1}'),
        CallEnd(0),
        CallBegin(1, "f", "c2"),
        CallEnd(1),
    ]
    assert streamed[-1] == "tool_calls"
    assert odd.bodies[-1] == {
        "temperature": 0.5,
        "model": "first",
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
    }
    function = {"name": "f", "arguments": '{"x":1}'}
    calls = [{"id": "c1", "function": function}, {"id": "c2", "function": {"name": "f"}}]
    message = {"role": "assistant", "content": "c\u2028d", "reasoning": "ab", "tool_calls": calls}
    odd.kind = "application/json"
    whole = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    odd.said = json.dumps(whole).encode()
    assert ask(odd, streams=False) == [*joined(streamed[:-1]), "tool_calls"]


def test_an_answer_that_is_none_is_a_sentence(odd: Odd) -> None:
    def says(text: str) -> None:
        with pytest.raises(ServerError, match=text):
            ask(odd)

    odd.says(delta(content="a"), {"error": {"message": "the worker died"}})
    says("ended the answer early: the worker died")
    odd.says(delta(content="a"), done=False)
    says("broke off early")
    odd.said = b"data: {\n\n"
    says("does not answer as an OpenAI-compatible server does")
    odd.says({"choice": []})
    says("does not answer as an OpenAI-compatible server does")
    odd.kind, odd.said = "text/html", b"<p>hello"
    says("does not answer as an OpenAI-compatible server does")
    odd.status, odd.said = 502, b"<p>bad\n gateway"
    says("failed with status 502: <p>bad gateway")
    odd.status, odd.headers = 429, {"retry-after": "7"}
    odd.said = json.dumps({"error": {"message": "too many."}}).encode()
    says("too much to do: too many. Try again in 7 s.")
    odd.models = {"data": []}
    says("serves no model")
    odd.models = ["x"]
    says("does not answer as an OpenAI-compatible server does")


def test_a_server_that_is_silent_is_given_up(odd: Odd) -> None:
    odd.headers = {"content-length": "5000"}  # which never come
    with (
        Server(odd.url, "m", None, {}, 0.2) as server,
        pytest.raises(ServerError, match=r"nothing for 0\.2 s|broke"),
    ):
        list(server.answer([]))


def test_a_url_that_cannot_be_is_an_option_that_is_wrong() -> None:
    for url, key in (("http://a:b", None), ("http://127.0.0.1:9", "ключ")):
        with pytest.raises(ValueError, match="--url or the API key cannot be used"):
            Server(url, "m", key, {}, 1)


CALLS: tuple[list[Piece], ...] = (
    [Content("a"), CallBegin(0, "f", "1"), CallArguments(0, "{}"), CallEnd(0)],
    [CallBegin(1, "g", "2"), CallEnd(1), CallBegin(2, "h", "3"), CallArguments(2, '{"')],
)


def test_results_of_calls_are_asked_for_in_order() -> None:
    talk = Conversation("s")
    talk.say("q")
    assert talk.hear([Reasoning("why"), *CALLS[0], *CALLS[1]])
    assert [call["id"] for call in talk.pending] == ["1", "2"], "the third was cut off"
    talk.say("one")
    talk.take_back()
    for result in ("one", "two"):
        talk.say(result)
    assert not talk.pending
    sent = talk.sent()
    assert [m["role"] for m in sent] == ["system", "user", "assistant", "tool", "tool"]
    assert "reasoning_content" not in sent[2] and sent[4]["tool_call_id"] == "2"
    assert talk.undo() == "q" and talk.sent() == [{"role": "system", "content": "s"}]
    assert talk.undo() is None


def test_what_is_saved(tmp_path: Path) -> None:
    talk = Conversation()
    talk.say("é")
    assert not talk.hear([Reasoning("a")]) and not talk.hear([CallBegin(0, "f", "1")])
    assert talk.hear([Reasoning("a"), Content("b")])
    talk.save(tmp_path / "x", "m")
    assert json.loads((tmp_path / "x").read_text()) == {
        "model": "m",
        "messages": [
            {"role": "user", "content": "é"},
            {"role": "assistant", "content": "b", "reasoning_content": "a"},
        ],
    }
    with pytest.raises(FileExistsError):
        talk.save(tmp_path / "x", "m")
    talk.reset()
    assert talk.sent() == []


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert visible("a\tb\nc\x1b[2J\x07\x9b\r\ud800é\u2028") == "a\tb\nc�[2J����é\u2028"
