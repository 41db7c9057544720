"""One worker's engine host as a program of its own, in a network namespace if wanted, and the code
that starts and reaches it.

    PREFIX python -m benchmarks.support.worker_process WORKER_ID ADDRESS < configuration

The program reads one line of JSON (a WorkerConfig) and prints "ready" when its engine serves. It
ends when its standard input ends, or when a router tells it to stop. support/prefix_cluster.py uses
this module.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from benchmarks.support.places import REPOSITORY
from pdserve.configs.schema import WorkerConfig
from pdserve.protocol.commands import Command
from pdserve.router.fleet.link import WorkerLost
from pdserve.worker.engine_client import EngineClient, EngineGone

STOP_S = 20.0


class WorkerProcess:
    """A worker that starts at once. `prefix` is words before its command, and `folder` is the place
    of its socket and its log."""

    def __init__(
        self, config: WorkerConfig, worker_id: str, prefix: Sequence[str], folder: Path
    ) -> None:
        self.worker_id = worker_id
        self.address = f"ipc://{folder}/{worker_id}"
        self._log = folder / f"{worker_id}.log"
        own = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "NIXL_LOG_LEVEL": "WARN"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", __name__, worker_id, self.address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | own,
                text=True,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(config.model_dump_json() + "\n")
        self._process.stdin.flush()

    def wait_ready(self) -> None:
        """Waits until the worker serves. Raises ValueError, with the end of its log, if it ends
        before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == "ready":
                return
        raise ValueError(f"worker {self.worker_id} did not start:\n{self._log.read_text()[-2000:]}")

    def close(self) -> None:
        """Waits until the worker has ended as it was told, or kills it."""
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class SharedLink:
    """A `WorkerLink` to a worker for several routers of one process, over the engine's own wire. It
    must be made inside the event loop that uses it."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker_id = worker.worker_id
        self._client = EngineClient(worker.address)

    async def send(self, command: Command) -> None:
        """Sends a command. Raises WorkerLost."""
        try:
            self._client.send(command)
        except EngineGone as error:
            raise WorkerLost(str(error)) from error

    async def events(self, router_id: str, session: int) -> AsyncGenerator[bytes, None]:
        """Yields encoded EventBatches for this router. Raises WorkerLost."""
        try:
            async for batch in self._client.subscribe(router_id, session):
                yield batch
        except EngineGone as error:
            raise WorkerLost(str(error)) from error

    def close(self) -> None:
        """Tells the engine to stop."""
        self._client.close()


def main() -> None:
    """Serves until a Stop command, or until the standard input ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("worker_id", help="unique id among all workers, also over restarts")
    parser.add_argument("address", help="address of its engine, such as ipc:///tmp/engine")
    options = parser.parse_args()
    config = WorkerConfig.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    from pdserve.worker.hosts.engine_host import EngineHost

    host = EngineHost(config, options.worker_id, time.time_ns(), options.address)
    host.start()
    print("ready", flush=True)
    host.run()


def _end_with_input() -> None:
    """Ends this process when its standard input ends. The pipe closes however the parent ends."""
    with contextlib.suppress(OSError):
        sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
