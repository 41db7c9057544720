"""Watches the start of one engine: each stage has a deadline, and is posted for `pdserve up`.

A thread of the engine's process answers which stage it is in. A process that does not even answer
(a library may hold Python's lock) counts as being in its last known stage, until that stage's
deadline. When a start fails, the error names the worker, the stage, the cure and the logs, and the
process is ended. Knows no Serve. Used by `cluster.deployments.worker_replica`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from pdserve.cluster.deployments.start_board import StartRecord
from pdserve.configs.schema import WorkerConfig
from pdserve.protocol.start_progress import WORK, Progress, Stage

logger = logging.getLogger("ray.serve")

LOOK_S = 0.25  # time between two questions to the engine
LAST_LOOK_S = 2.0  # time for its answer after it failed
CURES: dict[Stage, str] = {
    "process": "see the raylet's log on that node (raylet.out) for why Ray does not start it",
    "download": "download the model beforehand and write its folder as model.path",
    "config": "check the disk or network that model.path is on",
    "device": "check the GPU with nvidia-smi on that node",
    "weights": "check the disk or network that model.path is on",
    "compile": "check the load of the processors and Triton's cache folder on that node",
    "kv_memory": "check that node's memory, and engine.kv_memory_bytes or engine.num_kv_blocks",
    "graphs": "check the GPU, or set engine.cuda_graphs: false",
    "warm_up": "check the GPU with nvidia-smi on that node",
    "registration": "check the network devices that UCX uses there (transfer.ucx_tls); with mode: "
    "aggregated, transfer.fetch_prefixes: false does without them",
    "pool": "set transfer.pool.mode: off to serve without the KV pool",
    "grammars": "read the engine's log, and check the disk or network that the tokenizer is on",
    "connection": "read the engine's log",
}


class StartError(RuntimeError):
    """A worker did not start. The message names the worker, the stage, the reason and the cure."""


class EngineStart:
    """The start of one engine, as a context manager.

    Leaving it removes the record from the board; leaving it by an error also ends the engine's
    processes.

    `engine`: handle of an EngineActor.
    `where`: address of its node.
    `num_gpus`: number of GPUs that Ray gives it.
    `log`: log file of this process, if it has one.
    `post`, `remove`: calls of the board; they may block.
    `others`: the engine's other ranks, which start with it.
    `runs`: what the other ranks do from then on.
    """

    def __init__(
        self,
        engine: Any,
        config: WorkerConfig,
        worker_id: str,
        where: str,
        num_gpus: float,
        log: str | None,
        post: Callable[[StartRecord], None],
        remove: Callable[[str], None],
        others: Sequence[Any] = (),
    ) -> None:
        self._engine = engine
        self._others = others
        self.runs: list[asyncio.Future[None]] = []
        self._config = config
        self._worker_id = worker_id
        self._where = where
        self._num_gpus = num_gpus
        self._files = tuple(filter(None, [log]))
        self._post = post
        self._remove = remove
        self._now = Progress("process")
        self._since = time.time()
        self._changed = time.monotonic()

    async def __aenter__(self) -> "EngineStart":
        await self._on_board(self._post, self._record())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            logger.error("%s", error)
            for rank in (self._engine, *self._others):
                ray.kill(rank)
        await self._on_board(self._remove, self._worker_id)

    async def serving(self) -> dict[str, Any]:
        """Waits until the engine can serve, and returns its description. Raises StartError."""
        started = asyncio.ensure_future(self._engine.start.remote())
        others = [asyncio.ensure_future(rank.start.remote()) for rank in self._others]
        # The other ranks already follow rank 0 while it warms up.
        self.runs = [asyncio.ensure_future(rank.run.remote()) for rank in self._others]
        asked = asyncio.ensure_future(self._engine.progress.remote())
        try:
            while True:
                await asyncio.wait(
                    (started, asked), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
                for rank in others:
                    if rank.done():
                        rank.result()
                if asked.done():
                    await self._saw(*asked.result())
                if started.done():
                    info: dict[str, Any] = started.result()
                    await self._saw(Progress("connection"), *self._files[1:])
                    return info
                if asked.done():
                    await asyncio.wait((started,), timeout=LOOK_S)
                    asked = asyncio.ensure_future(self._engine.progress.remote())
                self._check_deadline()
        except RayError as error:
            await self._look_back()
            raise StartError(
                self._told(f"failed while {WORK[self._now.stage]}: {_reason(error)}")
            ) from error
        finally:
            for task in (started, asked, *others):
                task.cancel()

    async def connected(self, connection: Awaitable[object]) -> None:
        """Waits for the connection. Raises StartError."""
        try:
            async with asyncio.timeout(self._config.start_deadline_s("connection")):
                await connection
        except TimeoutError:
            raise StartError(self._stuck()) from None

    async def _look_back(self) -> None:
        """Learns in which stage the engine failed, if its process can still answer."""
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(LAST_LOOK_S):
                await self._saw(*await self._engine.progress.remote())

    async def _saw(self, now: Progress, *files: str) -> None:
        self._files = (*self._files[:1], *files)
        if now == self._now:
            return
        self._changed = time.monotonic()
        if now.stage != self._now.stage:
            self._since = time.time()
        moved = (now.stage, now.percent) != (self._now.stage, self._now.percent)
        self._now = now
        if moved:
            await self._on_board(self._post, self._record())

    def _record(self) -> StartRecord:
        return StartRecord(self._worker_id, self._where, self._now, self._since, self._files)

    async def _on_board(self, call: Callable[[Any], None], argument: object) -> None:
        """Calls the board; an error is only logged, so that the worker starts all the same."""
        try:
            await asyncio.to_thread(call, argument)
        except (RayError, OSError, RuntimeError) as error:
            logger.warning("worker %s cannot report its progress: %s", self._worker_id, error)

    def _check_deadline(self) -> None:
        if time.monotonic() - self._changed > self._config.start_deadline_s(self._now.stage):
            raise StartError(self._stuck())

    def _stuck(self) -> str:
        stage = self._now.stage
        deadline_s = self._config.start_deadline_s(stage)
        return self._told(
            f"made no progress for {deadline_s:g} s while {self._now} (stage {stage}). It is on "
            f"node {self._where}, with {self._num_gpus:g} GPU: {CURES[stage]}, or raise "
            f"start.{stage}_s"
        )

    def _told(self, what: str) -> str:
        files = f". Its logs on {self._where}: {', '.join(self._files)}" if self._files else ""
        return f"worker {self._worker_id} {what}{files}"


def _reason(error: RayError) -> str:
    """Says what the engine raised, or how its process ended."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return f"{type(cause).__name__}: {cause}"
