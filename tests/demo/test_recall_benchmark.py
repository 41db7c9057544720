"""Tests benchmarks/cluster/recall.py against a small HTTP server of this test: it asks greedily,
counts correctly, and fails loudly."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks.cluster.recall import main
from demo.recall import recall_prompts

ANSWERS = {p.prompt: p.answer for p in recall_prompts(12345, 40)}
Answer = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/completions"
            status, body = answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def completion(text: str) -> tuple[int, dict[str, Any]]:
    return 200, {"choices": [{"text": text}], "usage": {"prompt_tokens": 700}}


def run(monkeypatch: pytest.MonkeyPatch, url: str) -> int:
    monkeypatch.setattr("sys.argv", ["recall", "--url", url, "--num", "40", "--concurrency", "4"])
    return main()


def test_right_answers_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        bodies.append(body)
        return completion(ANSWERS[body["prompt"]])

    with serving(answer) as url:
        assert run(monkeypatch, url) == 0
    output = capsys.readouterr().out
    assert "recall: 40 of 40 = 1.0000" in output and "0500-0749 1.000 (40)" in output
    assert len(bodies) == 40
    assert all(
        b["temperature"] == 0 and b["model"] == "pdserve-demo" and b["max_tokens"] == 16
        for b in bodies
    )


def test_below_the_threshold_fails_and_names_misses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = list(ANSWERS)[:2]
    with serving(
        lambda body: completion("?" if body["prompt"] in wrong else ANSWERS[body["prompt"]])
    ) as url:
        assert run(monkeypatch, url) == 1
    output = capsys.readouterr().out
    assert "recall: 38 of 40 = 0.9500" in output and output.count("miss: ") == 2


def test_a_refusal_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(lambda body: (404, {"error": {"message": "no such model"}})) as url:
        assert run(monkeypatch, url) == 1
    assert "404" in (err := capsys.readouterr().err) and "no such model" in err


def test_no_server_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(lambda body: completion("")) as url:
        pass
    assert run(monkeypatch, url) == 1
    assert "is the server up?" in capsys.readouterr().err
