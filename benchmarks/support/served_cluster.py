"""Runs `pdserve up` in a process of its own, for as long as a benchmark needs it.

targets/measure.py and cluster/cluster_cpu.py use it. Others use its small parts.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.support.places import REPOSITORY
from pdserve.cluster.operate.ray_settings import settings

CLI = [sys.executable, "-m", "pdserve.cluster.cli"]
STOP_S = 60.0


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    pid: int  # of `pdserve up`; all processes that Ray starts here descend from it


def free_port() -> int:
    """Finds a port of 127.0.0.1 on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment(haproxy: bool = False, tree: Path | None = None) -> dict[str, str]:
    """Returns this process's environment with a tree importable (this repository by default), and
    with the settings that `pdserve up` makes for Ray.

    `up` makes these settings itself, but that is too late for a command that imports Ray first.
    """
    paths = [str((tree or REPOSITORY).resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    return settings(haproxy) | os.environ | own


def run_command(words: Sequence[str]) -> bool:
    """Prints a command and runs it in `environment`. Returns True if it exits with 0."""
    print(f"+ {shlex.join(words)}", flush=True)
    return subprocess.run(words, env=environment()).returncode == 0


def cluster_yaml(args: Mapping[str, Any], port: int) -> dict[str, Any]:
    """Makes a cluster.yaml with these `args`, served on this port of 127.0.0.1."""
    application = {"name": "pdserve", "import_path": "pdserve.cluster.app:build", "args": args}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [application],
    }


@contextmanager
def serving(
    document: Mapping[str, Any],
    port: int,
    cli: Sequence[str] = CLI,
    deadline_s: float = 300.0,
    options: Sequence[str] = (),
    log: Path | None = None,
    tree: Path | None = None,
) -> Iterator[Server]:
    """Serves the cluster.yaml `document` until the context ends.

    - port: The HTTP port of the document.
    - cli: Words of the `pdserve` command.
    - options: Options of its `up`.
    - log: A file that keeps what the server prints; None: a temporary one.
    - tree: A checkout whose code is served; None: this one.

    Raises ValueError, with the end of the server's log, if it is not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="pdserve-cluster-") as scratch:
        cluster = Path(scratch) / "cluster.yaml"
        log = log or Path(scratch) / "log"
        cluster.write_text(yaml.safe_dump(dict(document)))
        with log.open("w") as out:
            process = subprocess.Popen(
                [*cli, "up", str(cluster), "--timeout", str(deadline_s), *options],
                env=environment("--haproxy" in options, tree),
                cwd=tree,  # Python looks there first
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            try:
                await_ready(lambda: process.poll() is None, url, deadline_s)
            except TimeoutError:
                raise ValueError(
                    f"`pdserve up` did not become ready:\n{log.read_text()[-2000:]}"
                ) from None
            yield Server(url, process.pid)
        finally:
            stop(process)


def await_ready(is_alive: Callable[[], bool], url: str, deadline_s: float) -> None:
    """Waits until /health answers. Raises TimeoutError if it does not in time, or if the server has
    ended."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline and is_alive():
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    raise TimeoutError(f"{url} did not become ready within {deadline_s:g} s")


def await_workers(url: str, count: int, deadline_s: float) -> None:
    """Waits until the router knows `count` workers. Raises ValueError if that takes longer."""
    deadline = time.monotonic() + deadline_s
    while (found := sum(each.value for each in metrics(url, "pdserve_router_workers"))) < count:
        if time.monotonic() > deadline:
            raise ValueError(f"{found:g} of {count} workers came within {deadline_s:g} s")
        time.sleep(0.5)


def metrics(url: str, prefix: str) -> list[Sample]:
    """Returns the samples of a server's metrics whose names begin with `prefix`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as page:
        families = text_string_to_metric_families(page.read().decode())
    return [
        sample for family in families for sample in family.samples if sample.name.startswith(prefix)
    ]


def stop(process: subprocess.Popen[Any]) -> None:
    """Stops a process by SIGTERM (a shell's background jobs ignore SIGINT), then kills what is left
    of the session that it leads."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
