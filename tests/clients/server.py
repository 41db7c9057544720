"""The clusters that the clients talk to: `pdserve up cluster.yaml`, a process of its own in the
environment that serves.

Knows no client. Used by conftest.py.
"""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # pytest finds this file through "..", see pytest.ini
PYTHON = ROOT / ".venv" / "bin" / "python"
READY_S = 300.0
STOP_S = 60.0


@contextmanager
def serving(log: Path, *options: str) -> Iterator[str]:
    """The URL of a cluster over Ray, which ends with the block. log: file for what it prints.
    options: of `pdserve up`; by default it serves the shipped demo model. RuntimeError with the end
    of that file when it does not start."""
    if not PYTHON.exists():
        raise RuntimeError(f"{PYTHON} is missing: run `make venv`, which makes the server's .venv")
    port = _free_port()
    # isolated: the cluster ends with the tests, and serves on 127.0.0.1 alone
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    command = [str(PYTHON), "-m", "pdserve.cluster.cli", "up", *(options or ("cluster.yaml",))]
    command += ["--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _await_health(process, url, log)
        yield url
    finally:
        _stop(process)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _await_health(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    limit = time.monotonic() + READY_S
    while not _is_healthy(url):
        if process.poll() is not None or time.monotonic() > limit:
            said = log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"pdserve up did not serve at {url} within {READY_S:g} s:\n{said}")
        time.sleep(0.5)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does; Ray takes its time to end."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
