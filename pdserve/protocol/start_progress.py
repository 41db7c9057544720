"""How far the start of an engine is: its stage, and how much of the stage is done.

    process -> [download] -> config -> device -> weights -> [compile] -> kv_memory
            -> [graphs] -> [warm_up] -> [registration] -> [pool] -> [grammars] -> connection
            -> serving

Stages in brackets happen only if they have something to do. `process` and `connection` belong to
the replica that owns the engine's process. The thread that starts the engine reports here; another
thread may look at any time. Each stage is logged. Torch-free; knows no deadlines. These are in
`configs.schema.StartConfig`, and `cluster.deployments.engine_start` watches them.
"""

import logging
import time
from collections.abc import Callable
from typing import Literal

import msgspec

logger = logging.getLogger(__name__)

Stage = Literal[
    "process",
    "download",
    "config",
    "device",
    "weights",
    "compile",
    "kv_memory",
    "graphs",
    "warm_up",
    "registration",
    "pool",
    "grammars",
    "connection",
]
WORK: dict[Stage, str] = {
    "process": "starting the engine's process",
    "download": "downloading the model from the Hub",
    "config": "reading the model's configuration",
    "device": "initialising the device",
    "weights": "loading weights",
    "compile": "compiling kernels in a first full step",
    "kv_memory": "allocating KV memory",
    "graphs": "compiling kernels and capturing CUDA graphs",
    "warm_up": "warming up",
    "registration": "registering KV memory with the transport",
    "pool": "waiting for the KV pool's server",
    "grammars": "loading what builds grammars",
    "connection": "connecting to the engine",
}
LOG_PERIOD_S = 5.0  # least time between two log lines about one stage


class Progress(msgspec.Struct, frozen=True):
    """Progress of a stage: `done` of `total`, in bytes while weights are downloaded or loaded, else
    a count.

    `total` is 0 in stages that cannot report it.
    """

    stage: Stage
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        if not self.total:
            return WORK[self.stage]
        parts = f"{self.done} of {self.total}"
        if self.stage in ("download", "weights"):
            parts = f"{self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB"
        return f"{WORK[self.stage]}: {parts} ({self.percent} %)"

    @property
    def percent(self) -> int:
        return 100 * self.done // self.total if self.total else 0


Report = Callable[[int, int], None]
"""Called with the amount that is done and the total amount."""


class StartProgress:
    """The start of one engine. One thread enters stages and reports; any thread may read `now`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = Progress("process")
        self.seconds: dict[Stage, float] = {}
        self._clock = clock
        self._began = self._logged = clock()

    def enter(self, stage: Stage) -> None:
        """Ends the previous stage and begins this one."""
        self._close()
        self.now = Progress(stage)
        self._began = self._logged = self._clock()
        logger.info("start: %s", self.now)

    def report(self, done: int, total: int) -> None:
        """Reports the progress of the present stage."""
        self.now = Progress(self.now.stage, done, total)
        now = self._clock()
        if now > self._logged + LOG_PERIOD_S:
            self._logged = now
            logger.info("start: %s after %.0f s", self.now, now - self._began)

    def finish(self) -> None:
        """Ends the last stage: the engine can serve."""
        self._close()
        self.now = Progress("connection")
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self.seconds.items())
        logger.info("started; seconds: %s", stages)

    def _close(self) -> None:
        if self.now.stage != "process":
            self.seconds[self.now.stage] = round(self._clock() - self._began, 2)
