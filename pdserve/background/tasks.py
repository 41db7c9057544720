"""Runs background tasks that do not end silently: errors are logged with their traceback and
counted.

    keep:  running --returns--> ended           once:  running --returns--> ended
             |  ^                                         '----raises---> ended, logged and counted
           raises, logged and counted
             '--pause: twice as long each time, up to a bound; short again after STEADY_S without a
             failure

    both:  cancelled --> ended

Knows nothing of what the tasks do: whoever starts one decides whether it may run again. The caller
must keep the task that it gets, as with `asyncio.create_task`. Used by the router, and by the Serve
replicas of routers and workers.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any

from prometheus_client import Counter

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
STEADY_S = 60.0

# There is one counter per process, and the process's shell exposes it.
FAILURES = Counter(
    "pdserve_background_failures",
    "Errors that ended a run of a background task of this process.",
    ["task"],
    registry=None,
)


class Pauses:
    """Says how long to wait before something that failed runs again; at most longest_s."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._next_s = FIRST_PAUSE_S

    def after(self, ran_s: float) -> float:
        """Returns the seconds to wait after a run that lasted `ran_s` seconds and failed."""
        pause_s = FIRST_PAUSE_S if ran_s >= STEADY_S else self._next_s
        self._next_s = 2 * pause_s
        return min(pause_s, self._longest_s)


def keep(
    name: str, run: Callable[[], Coroutine[Any, Any, None]], longest_pause_s: float = 5.0
) -> asyncio.Task[None]:
    """Runs until it returns or the task is cancelled; after an error it runs again.

    `name` is a metric's label, so there must be few of them. `longest_pause_s` limits the pause
    before another run.
    """
    return once(name, _kept(name, run, longest_pause_s))


def every(
    name: str, period_s: float, look: Callable[[], None], longest_pause_s: float = 5.0
) -> asyncio.Task[None]:
    """Calls `look` every `period_s` seconds until the task is cancelled. Errors are treated as in
    `keep`."""

    async def run() -> None:
        while True:
            await asyncio.sleep(period_s)
            look()

    return keep(name, run, longest_pause_s)


def once(name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Runs the work to its end; an error ends it. `name` is as in `keep`."""
    _count_from_zero(name)
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_ended)
    return task


@cache
def _count_from_zero(name: str) -> None:
    """Creates the counter at 0, so that queries see the first failure as an increase."""
    FAILURES.labels(name)


def failed(name: str, error: BaseException) -> None:
    """Logs and counts an error that its task survives."""
    FAILURES.labels(name).inc()
    logger.error("background task %s failed", name, exc_info=error)


async def _kept(
    name: str, run: Callable[[], Coroutine[Any, Any, None]], longest_pause_s: float
) -> None:
    loop = asyncio.get_running_loop()
    pauses = Pauses(longest_pause_s)
    while True:
        began = loop.time()
        try:
            return await run()
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            failed(name, error)  # not the task was cancelled, but something that it awaited
        except Exception as error:
            failed(name, error)
        await asyncio.sleep(pauses.after(loop.time() - began))


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _ended(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        failed(task.get_name(), error)
