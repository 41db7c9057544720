"""Workers without a model, for benchmarks of a router. Engines and worker loops are real. A step
takes the time that its rows would take on some device, and always samples the same token.

Each worker runs in a thread of this process, with the demo model's configuration.
router/choosing.py and router/goodput.py use it.
"""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from benchmarks.support.places import DEMO
from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.configs.transfer import TransferConfig
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine
from pdserve.engine.sampling.sampled_tokens import Sampled
from pdserve.engine.step_result import HomeSize
from pdserve.engine.stepping.executor import Padding
from pdserve.engine.stepping.work import ForwardWork, SampleWork
from pdserve.protocol.codec import encode
from pdserve.protocol.commands import Command, RouterLost, Stop, Subscribe
from pdserve.protocol.events import EventBatch, TokenLogprob
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.fleet.link import WorkerLost
from pdserve.worker.loop import WorkerLoop
from pdserve.worker.metrics import WorkerMetrics

# ids of plain tokens of the demo model
FIRST_TOKEN = 100
VOCAB = 1500
STEP_S = 0.02
TOKENS_PER_S = 10_000.0  # prompt tokens per second
NUM_TOKENS = 8  # tokens generated per request


class _Step:
    """A step that takes a given time and always samples the same token."""

    def __init__(self, seconds: float, num_samples: int) -> None:
        self._seconds = seconds
        self._ends = time.monotonic() + seconds
        self._num_samples = num_samples

    def ready(self) -> bool:
        return time.monotonic() >= self._ends

    def wait(self) -> None:
        time.sleep(max(0.0, self._ends - time.monotonic()))

    def seconds(self) -> float:
        return self._seconds

    def samples(self) -> list[Sampled]:
        return [Sampled((FIRST_TOKEN,), None)] * self._num_samples

    def scores(self) -> list[list[TokenLogprob]]:
        return []

    def hidden(self) -> np.ndarray:
        return np.empty((0, 0), dtype=np.float32)


class PacedExecutor:
    """An executor that takes time and computes nothing."""

    def __init__(self, engine: Engine) -> None:
        self.kv_cache = engine.kv_cache

    def padding(self, homes: Sequence[HomeSize]) -> list[Padding]:
        return [Padding(0, home.num_rows, home.num_sequences) for home in homes]

    def forward(self, work: ForwardWork) -> _Step:
        num_rows = sum(work.home_rows)
        return _Step(STEP_S + num_rows / TOKENS_PER_S, work.num_samples)

    def sample(self, work: SampleWork) -> None: ...

    def warm_prefill(self, num_rows: int) -> None: ...

    def expert_load(self) -> dict[int, np.ndarray]:
        return {}

    def clear_expert_load(self) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


class PacedWorker(threading.Thread):
    """A worker loop in a thread of its own, and a router's link to it."""

    def __init__(self, worker_id: str, num_kv_blocks: int) -> None:
        super().__init__(daemon=True)
        self.worker_id = worker_id
        self.engine = build_engine(
            ModelConfig(path=str(DEMO), load_format="dummy"),
            EngineConfig(device="cpu", num_kv_blocks=num_kv_blocks),
        )
        self.engine.steps.executor = PacedExecutor(self.engine)
        self._worker = WorkerLoop(
            self.engine,
            WorkerMetrics(self.engine),
            TransferConfig(),
            "both",
            worker_id,
            time.time_ns(),
            None,
            None,
            self._told,
        )
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._stream: asyncio.Queue[bytes | None] = asyncio.Queue()

    def run(self) -> None:
        while not self._worker.stopped:
            timeout = self._worker.turn()
            try:
                self._worker.handle(
                    self._commands.get(timeout=timeout) if timeout else self._commands.get_nowait()
                )
                while True:
                    self._worker.handle(self._commands.get_nowait())
            except queue.Empty:
                pass
        self._loop.call_soon_threadsafe(self._stream.put_nowait, None)

    def stop(self) -> None:
        self._commands.put(Stop())

    def _told(self, target: str, batch: EventBatch) -> None:
        self._loop.call_soon_threadsafe(self._stream.put_nowait, encode(batch))

    async def send(self, command: Command) -> None:
        self._commands.put(command)

    async def events(self, router_id: str, session: int) -> AsyncIterator[bytes]:
        self._commands.put(Subscribe(router_id=router_id, session=session))
        try:
            while (batch := await self._stream.get()) is not None:
                yield batch
        finally:
            self._commands.put(RouterLost(router_id=router_id, session=session))
        raise WorkerLost("it stopped")


@asynccontextmanager
async def running(
    num_workers: int, num_kv_blocks: int
) -> AsyncIterator[tuple[Fleet, list[PacedWorker]]]:
    """Starts workers, and a fleet that knows all of them. Both end with the context. Raises
    RuntimeError if a worker ends before it has sent Hello."""
    workers = [PacedWorker(f"w{i}", num_kv_blocks) for i in range(num_workers)]
    fleet = Fleet()
    try:
        for worker in workers:
            worker.start()
            fleet.join(worker)
        while len(fleet.workers) < num_workers:
            if not all(worker.is_alive() for worker in workers):
                raise RuntimeError("a worker's thread has ended: its error was printed above")
            await asyncio.sleep(0.01)
        yield fleet, workers
    finally:
        await fleet.close()
        for worker in workers:
            worker.stop()
            await asyncio.to_thread(worker.join)


@dataclass(frozen=True)
class Arrival:
    """One request of a load."""

    at: float  # seconds since the start
    prompt: tuple[int, ...]
    session: str = ""
