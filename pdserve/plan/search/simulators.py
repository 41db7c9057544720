"""Processes that simulate. A job goes to a free process, and its outcome comes back.

Each process runs `pdserve.plan.simulation.child`. Several threads may call this module.
"""

import os
import queue
import subprocess
import sys
from types import TracebackType

import msgspec

from pdserve.plan.simulation.jobs import Job, Outcome

CHILD = "pdserve.plan.simulation.child"


class SimulationFailed(RuntimeError):
    """A process that simulates has ended. Its own error was printed above."""


class Simulators:
    """A context manager of the processes, which end with it."""

    def __init__(self, count: int) -> None:
        env = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        self._all = [
            subprocess.Popen(
                [sys.executable, "-m", CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
                start_new_session=True,  # Ctrl-C of a terminal is for the parent
            )
            for _ in range(count)
        ]
        self._free: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for child in self._all:
            self._free.put(child)

    def __enter__(self) -> "Simulators":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        for child in self._all:
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()

    def stop(self) -> None:
        """Ends the processes. Who waits for an outcome gets SimulationFailed."""
        for child in self._all:
            child.kill()

    def run(self, job: Job) -> Outcome:
        """Runs a job. Waits for a free process, and then for the outcome."""
        child = self._free.get()
        try:
            assert child.stdin is not None and child.stdout is not None
            try:
                child.stdin.write(msgspec.json.encode(job) + b"\n")
                child.stdin.flush()
            except BrokenPipeError:
                raise SimulationFailed("a simulation ended before its job") from None
            answer = child.stdout.readline()
        finally:
            self._free.put(child)
        if not answer:
            raise SimulationFailed("a simulation ended without an outcome: see its error above")
        return msgspec.json.decode(answer, type=Outcome)
