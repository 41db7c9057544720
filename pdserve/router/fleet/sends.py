"""Commands on their way to workers, each in a task of its own: nobody waits for a worker.

    posted --the link took it--> delivered
      |----WorkerLost----------> the worker is lost
      '----any other error-----> this command failed; the worker is not to blame

Knows no legs. Owned by `router.fleet.fleet`, which is told of both kinds of failure.
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
    """tasks: what is not done yet."""

    def __init__(
        self,
        lost: Callable[[WorkerState, str], None],
        failed: Callable[[WorkerState, Failed], None],
    ) -> None:
        """lost: the worker cannot be reached, and why. failed: its Submit could not be sent."""
        self.tasks: set[asyncio.Task[None]] = set()
        self._lost = lost
        self._failed = failed

    def post(self, worker: WorkerState, command: Command) -> None:
        """Send in the background: callers that are being cancelled can still say goodbye."""
        self.spawn(self._deliver(worker, command))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do other work in the background; it counts as a send that is not done yet."""
        task = once("fleet send", work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _deliver(self, worker: WorkerState, command: Command) -> None:
        try:
            await worker.link.send(command)
        except WorkerLost as error:
            self._lost(worker, f"cannot be reached: {error}")
        # of this command, not of the worker: one that is too large must not cost workers
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
