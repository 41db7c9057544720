"""Sends commands to workers, each in a task of its own, so that nobody waits for a worker.

    posted --the link took it--> delivered
      |----WorkerLost----------> the worker is lost
      '----any other error-----> this command failed; the worker is not to blame

Knows no legs. Owned by `router.fleet.fleet`, to which it reports both kinds of failure.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from pdserve.background.tasks import once
from pdserve.protocol.commands import Cancel, Command, Submit
from pdserve.protocol.events import Failed
from pdserve.router.fleet.link import WorkerLost
from pdserve.router.fleet.worker_state import WorkerState

logger = logging.getLogger(__name__)


class Sends:
    """Commands on their way. `tasks` holds those that are not delivered yet."""

    def __init__(
        self,
        lost: Callable[[WorkerState, str], None],
        failed: Callable[[WorkerState, Failed], None],
    ) -> None:
        """`lost` is called with the reason if a worker cannot be reached, and `failed` if a Submit
        could not be sent to it."""
        self.tasks: set[asyncio.Task[None]] = set()
        self._lost = lost
        self._failed = failed

    def post(self, worker: WorkerState, command: Command) -> None:
        """Sends in the background, so that a caller that is being cancelled can still send."""
        self.spawn(self._deliver(worker, command))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Does other work in the background; it counts as a send that is not done yet."""
        task = once("fleet send", work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _deliver(self, worker: WorkerState, command: Command) -> None:
        try:
            await worker.link.send(command)
        except WorkerLost as error:
            self._lost(worker, f"cannot be reached: {error}")
        # an error of this command, not of the worker: too large a command must not cost workers
        except Exception as error:
            named = f" of {command.key.request_id}" if isinstance(command, Submit | Cancel) else ""
            logger.exception(
                "sending %s%s to worker %s failed", type(command).__name__, named, worker.worker_id
            )
            if isinstance(command, Submit):
                kind: Literal["invalid", "internal"] = (
                    "invalid" if isinstance(error, ValueError) else "internal"
                )
                request_id = command.key.request_id
                attempt = command.key.attempt
                self._failed(
                    worker,
                    Failed(request_id=request_id, attempt=attempt, kind=kind, message=str(error)),
                )
