"""`pdserve up` as a user runs it, with the demo model: what it says, what answers, how soon Ctrl-C ends it."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.cluster import cli

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@contextmanager
def up(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process once it is ready, and what it has said."""
    command = [sys.executable, "-m", "pdserve.cluster.cli", "up", *arguments, "--timeout", "120"]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        said = ""
        assert process.stdout is not None
        try:
            while "Ctrl-C stops it" not in said:
                line = process.stdout.readline()
                assert line, said
                said += line
            yield process, said
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.stdout.read()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def seconds_to_stop(process: subprocess.Popen[str]) -> float:
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    process.stdout.read()
    assert process.wait(timeout=60) == 0
    return time.monotonic() - began


@pytest.mark.skipif(not cli.has_haproxy(), reason="no haproxy")
def test_behind_haproxy_it_stops_soon() -> None:
    port = free_port()
    with up("cluster.yaml", "--haproxy", "--port", port) as (process, said):
        assert f"http://127.0.0.1:{port}/v1" in said
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
            assert answer.status == 200
        assert seconds_to_stop(process) < 15


def test_options_of_serves_server_are_named_and_work(tmp_path: Path) -> None:
    document: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    document["http_options"] |= {"request_timeout_s": 30, "port": int(free_port())}
    document["applications"][0]["route_prefix"] = "/llm"
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(document))
    with up(str(path)) as (process, said):
        assert "does not know http_options.request_timeout_s, route_prefix /llm." in said
        url = f"http://127.0.0.1:{document['http_options']['port']}/llm"
        assert f"curl -N {url}/v1/completions" in said
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            assert answer.status == 200
        assert seconds_to_stop(process) < 15
