"""Waits until a deployed application answers, and reports what happens meanwhile.

Lines come from three places: the status of Serve's deployments, Serve's messages about them, and
the progress of starting workers. Serve's messages say why a replica failed, once for each reason.
The progress comes with the workers' logs (`cluster.deployments.start_board`). Used by `pdserve up`.
"""

import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator

from ray import serve
from ray.serve.schema import ApplicationStatusOverview

from pdserve.cluster.deployments import start_board
from pdserve.cluster.deployments.start_board import StartRecord
from pdserve.protocol.start_progress import Stage

POLL_S = 0.25
TENTH = 10  # percent of progress between two lines about one stage


def until_ready(name: str, url: str, timeout_s: float) -> Iterator[str]:
    """Yields a line for each change while the application starts; ends when it can answer requests.

    Raises ValueError, with Serve's reasons, if Serve gives up or after timeout_s.
    """
    deadline = time.monotonic() + timeout_s
    news = News()
    while True:
        status = serve.status().applications.get(name)
        starting = start_board.read(name)
        yield from news.of_starts(starting)
        if status is not None:
            yield from news.of_serve(status)
            if status.status == "DEPLOY_FAILED":
                reasons = {last_error(d.message) for d in status.deployments.values() if d.message}
                head = f"deploying {name!r} failed: {status.message}"
                raise ValueError("\n".join([head, *sorted(reasons)]))
            if status.status == "RUNNING" and _healthy(url):
                return
        if time.monotonic() > deadline:
            raise ValueError("\n".join(_late(timeout_s, status, starting)))
        time.sleep(POLL_S)


class News:
    """Reports everything once."""

    def __init__(self) -> None:
        self._status = ""
        self._messages: dict[str, str] = {}
        self._starts: dict[str, tuple[Stage, int]] = {}
        self._located: set[str] = set()

    def of_serve(self, status: ApplicationStatusOverview) -> Iterator[str]:
        deployments = sorted(status.deployments.items())
        line = ", ".join(
            f"{name}: {deployment.status.value.lower()}" for name, deployment in deployments
        )
        if line != self._status:
            self._status = line
            yield f"pdserve: {line}"
        for name, deployment in deployments:
            if deployment.message and deployment.message != self._messages.get(name):
                self._messages[name] = deployment.message
                yield f"pdserve: {name}: {told(deployment.message)}"

    def of_starts(self, records: Iterable[StartRecord]) -> Iterator[str]:
        for record in records:
            worker = record.worker_id
            now = record.progress
            step = now.stage, now.percent // TENTH
            if step != self._starts.get(worker):
                self._starts[worker] = step
                yield f"pdserve: {worker}: {now}"
            if len(record.files) > 1 and worker not in self._located:
                self._located.add(worker)
                yield f"pdserve: {worker}: {_logs(record)}"


def told(message: str) -> str:
    """Shortens a message of Serve that holds tracebacks to its first sentence and the last
    exception."""
    error = last_error(message)
    return message.strip() if error == message else f"{message.strip().splitlines()[0]}\n{error}"


def last_error(message: str) -> str:
    """Returns the end of a message that holds tracebacks: the last exception and its text."""
    lines = message.rstrip().splitlines()
    starts = [
        i for i, line in enumerate(lines) if re.match(r"[A-Za-z_.]*(Error|Exception)\b", line)
    ]
    return "\n".join(lines[starts[-1] :]) if starts else message


def _late(
    timeout_s: float, status: ApplicationStatusOverview | None, starting: Iterable[StartRecord]
) -> Iterator[str]:
    yield (
        f"not ready after {timeout_s:g} s (--timeout); Ray's dashboard and `serve status` say "
        "more. The state now:"
    )
    for record in starting:
        seconds = time.time() - record.since
        yield f"{record.worker_id}: {record.progress}, for {seconds:.0f} s; {_logs(record)}"
    for name, deployment in sorted(status.deployments.items()) if status is not None else ():
        yield f"{name}: {deployment.status.value.lower()}. {told(deployment.message)}".strip()


def _logs(record: StartRecord) -> str:
    return f"logs on {record.node}: {', '.join(record.files) or 'none yet'}"


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
