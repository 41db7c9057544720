"""Log lines where they end up under Ray Serve: files of the router and of an engine, all JSON, each
request found by its id."""

import io
import json
import logging
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from support.lines import json_lines
from support.waiting import until

from pdserve.cluster import app as cluster_app
from pdserve.cluster.deployments.http_server import Address
from pdserve.cluster.deployments.logs import log_to_stderr, serve_logging
from pdserve.configs.router import LogConfig
from pdserve.configs.schema import ClusterConfig

FAKE = "fake_engine_host:FakeEngineHost"
APP = "logs"
PROXY_PORT = 8123
OWN_PORT = 8127


@pytest.fixture(scope="module")
def running(local_ray: None) -> Iterator[None]:
    logs = {"format": "json", "level": "DEBUG"}
    args = {"mode": "aggregated", "model": {"name": "fake"}, "logging": logs}
    config = ClusterConfig.model_validate(args)
    serve.run(
        cluster_app.assemble(config, FAKE, Address("127.0.0.1", OWN_PORT)),
        name=APP,
        route_prefix="/logs",
    )
    yield
    serve.delete(APP)


def ask(url: str, name: str, prompt: list[int]) -> dict[str, str]:
    """The answer's headers, once there is one: Serve's proxy and the router hear of new replicas a
    moment late."""
    data = json.dumps({"model": "fake", "prompt": prompt, "max_tokens": 3}).encode()
    headers = {"content-type": "application/json", "x-request-id": name}
    request = urllib.request.Request(url, data, headers)
    answers: list[dict[str, str]] = []

    def is_answered() -> bool:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert answer.status == 200
                answers.append({name.lower(): value for name, value in answer.headers.items()})
                return True
        except urllib.error.HTTPError as error:
            assert error.code in (404, 503), error.read()
            return False

    until(is_answered, 180, pause_s=0.2)
    return answers[0]


def log_folder() -> Path:
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name(), "logs")


def lines(pattern: str) -> list[dict[str, Any]]:
    """All lines of these files; each must be JSON."""
    files = sorted(log_folder().glob(pattern))
    return [line for file in files for line in json_lines(file)]


def test_a_requests_line_is_in_the_routers_file(running: None) -> None:
    own = ask(f"http://127.0.0.1:{OWN_PORT}/v1/completions", "by-own", [123, 456])
    ask(f"http://127.0.0.1:{PROXY_PORT}/logs/v1/completions", "by-serve", [123, 456])
    assert own["x-request-id"] == "by-own"
    deadline = time.monotonic() + 120
    ended = dict[str, dict[str, Any]]()
    while len(ended) < 2:
        assert time.monotonic() < deadline, "the lines did not come"
        time.sleep(0.2)
        told = lines(f"serve/*{APP}*Router*.log") or lines("serve/*Router*.log")
        ended = {line["request_id"]: line for line in told if line.get("outcome") == "ok"}
    assert [name.rsplit("-", 1)[0] for name in sorted(ended)] == ["cmpl-by-own", "cmpl-by-serve"]
    for line in ended.values():
        assert (line["model"], line["generated_tokens"], line["prompt_tokens"]) == ("fake", 3, 2)
        assert (
            line["decode_worker"].startswith("Decode#")
            and line["levelname"] == "INFO"
            and line["replica"]
        )
    # Both ids, since a process or a port may have the number 456.
    assert not any(re.search(r"123\D{1,3}456", str(line)) for line in told), "no prompts"


def test_serve_is_told_format_and_level() -> None:
    assert serve_logging(LogConfig()) == {"log_level": "INFO", "enable_access_log": False}
    assert serve_logging(LogConfig(format="json", level="ERROR"))["encoding"] == "JSON"


@pytest.mark.parametrize("format", ["text", "json"])
def test_an_engines_lines_name_the_worker(format: str) -> None:
    stream = io.StringIO()
    ours = logging.getLogger("pdserve")
    before = ours.handlers[:], ours.level, ours.propagate
    try:
        log_to_stderr(LogConfig.model_validate({"format": format}), "Decode#x", stream)
        log = logging.getLogger("pdserve.worker.loop")
        log.debug("not this")
        log.warning("slow %s", "peer", extra={"request_id": "r"})
        try:
            raise ValueError("odd")
        except ValueError:
            log.exception("failed")
    finally:
        ours.handlers[:], ours.level, ours.propagate = before
    told = stream.getvalue()
    assert "not this" not in told and "ValueError: odd" in told
    if format == "text":
        assert "WARNING" in told and "Decode#x slow peer" in told
        return
    first, second = map(json.loads, told.splitlines())
    assert (first["message"], first["worker"], first["request_id"]) == (
        "slow peer",
        "Decode#x",
        "r",
    )
    assert second["levelname"] == "ERROR" and "ValueError: odd" in second["exc_text"]
