"""What the router's policies do for workers with small prefix caches: prompt tokens computed, and
waiting.

Four workers in threads, each a real engine (scheduler, blocks, prefix cache, sampler) and a real
worker loop, but for the model: a step takes the time that its rows would take on some device, and
gives logits that say nothing. A real router in this process. Workloads are open: requests come at
random moments, whatever the workers do. Policies take turns, each with fresh workers.

    python -m benchmarks.router.choosing --out benchmarks/results/choosing-cpu.jsonl
    python -m benchmarks.router.choosing --workloads shared --policies round-robin default \\
        --repeats 1
"""

import argparse
import asyncio
import itertools
import logging
import queue
import random
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.support.places import DEMO
from benchmarks.support.yardstick import bare_us_per_token, beside
from pdserve.bench.record import append, check_writable, circumstances
from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.configs.router import RouterConfig
from pdserve.configs.transfer import TransferConfig
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine
from pdserve.engine.execution.model_runner import StepOutput
from pdserve.engine.scheduling.sequence import Sequence as EngineSequence
from pdserve.engine.scheduling.step_plan import StepPlan
from pdserve.protocol.codec import encode
from pdserve.protocol.commands import Command, RouterLost, Stop, Subscribe
from pdserve.protocol.events import EventBatch
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.choosing.policies import POLICIES
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.fleet.link import WorkerLost
from pdserve.router.request.service import Service
from pdserve.text.tokenizer import Tokenizer
from pdserve.worker.loop import WorkerLoop
from pdserve.worker.metrics import WorkerMetrics

# of the demo model: plain ones
FIRST_TOKEN = 100
VOCAB = 1500
STEP_S = 0.02
TOKENS_PER_S = 10_000.0  # of prompts
NUM_TOKENS = 8  # generated for each request

Tokens = tuple[int, ...]


class _Fence:
    """A step ends so long after it began."""

    def __init__(self, ends: float) -> None:
        self._ends = ends

    def ready(self) -> bool:
        return time.monotonic() >= self._ends

    def wait(self) -> None:
        time.sleep(max(0.0, self._ends - time.monotonic()))

    def seconds_since(self, earlier: "_Fence") -> float:
        return self._ends - earlier._ends


class PacedRunner:
    """Stands for model_runner.ModelRunner: takes time, computes nothing."""

    def __init__(self, engine: Engine) -> None:
        self.ops = engine.runner.ops
        self.kv_cache = engine.kv_cache
        self._vocab_size = engine.spec.vocab_size
        self._seconds = 0.0

    def execute(self, plan: StepPlan, siblings: Sequence[Sequence[EngineSequence]]) -> StepOutput:
        counts = list(plan.num_tokens.values())
        self._seconds = STEP_S + sum(counts) / TOKENS_PER_S
        first_row = dict(zip(plan.num_tokens, itertools.accumulate([0, *counts]), strict=False))
        slots = [member.slot for members in siblings for member in members]
        hidden = torch.empty(sum(counts), 0)
        return StepOutput(
            hidden, first_row, self.logits(hidden, slots), torch.tensor(slots, dtype=torch.int32)
        )

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        return torch.zeros(len(rows), self._vocab_size)

    def feed_back(self, output: StepOutput, token_ids: Tensor) -> None: ...

    def fence(self) -> _Fence:
        seconds = self._seconds
        self._seconds = 0.0
        return _Fence(time.monotonic() + seconds)


class PacedWorker(threading.Thread):
    """A worker loop in a thread of its own, and a router's link to it."""

    def __init__(self, worker_id: str, num_kv_blocks: int) -> None:
        super().__init__(daemon=True)
        self.worker_id = worker_id
        self.engine = build_engine(
            ModelConfig(path=str(DEMO), load_format="dummy"),
            EngineConfig(device="cpu", num_kv_blocks=num_kv_blocks),
        )
        self.engine.runner = PacedRunner(self.engine)  # type: ignore[assignment]
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


@dataclass(frozen=True)
class Arrival:
    """at: seconds from the start."""

    at: float
    prompt: Tokens
    session: str = ""


def _tokens(draw: random.Random, count: int) -> Tokens:
    return tuple(draw.choices(range(FIRST_TOKEN, VOCAB), k=count))


def _moments(draw: random.Random, count: int, rate: float) -> list[float]:
    return list(itertools.accumulate(draw.expovariate(rate) for _ in range(count)))


def shared(draw: random.Random, count: int) -> list[Arrival]:
    """Eight system prompts of 512 tokens, each request with 32 of its own."""
    systems = [_tokens(draw, 512) for _ in range(8)]
    return [
        Arrival(at, draw.choice(systems) + _tokens(draw, 32)) for at in _moments(draw, count, 30.0)
    ]


def distinct(draw: random.Random, count: int) -> list[Arrival]:
    """Nothing in common, lengths from 32 to 1,500 with many short ones."""
    lengths = [min(1500, max(32, int(draw.lognormvariate(5.5, 1.0)))) for _ in range(count)]
    return [
        Arrival(at, _tokens(draw, length))
        for at, length in zip(_moments(draw, count, 30.0), lengths, strict=True)
    ]


def conversations(draw: random.Random, count: int) -> list[Arrival]:
    """Twelve at a time, each of up to eight turns that repeat all before and add 128 tokens, with a
    session's name."""
    arrivals = []
    histories = [_tokens(draw, 128) for _ in range(12)]
    names = itertools.count(12)
    sessions = [str(i) for i in range(12)]
    for at in _moments(draw, count, 20.0):
        which = draw.randrange(12)
        if len(histories[which]) >= 128 * 8:
            histories[which] = ()
            sessions[which] = str(next(names))
        histories[which] += _tokens(draw, 128)
        arrivals.append(Arrival(at, histories[which], sessions[which]))
    return arrivals


WORKLOADS: dict[str, Callable[[random.Random, int], list[Arrival]]] = {
    "shared": shared,
    "distinct": distinct,
    "conversations": conversations,
}


async def measure(
    policy: str, arrivals: Sequence[Arrival], num_workers: int, num_kv_blocks: int
) -> dict[str, float]:
    """Prompt tokens computed over all workers, their share of all prompt tokens, milliseconds to
    the first token."""
    workers = [PacedWorker(f"w{i}", num_kv_blocks) for i in range(num_workers)]
    fleet = Fleet()
    service = Service(fleet, Tokenizer.load(DEMO), RouterConfig(policy=policy), "demo")
    for worker in workers:
        worker.start()
        fleet.join(worker)
    while len(fleet.workers) < num_workers:
        await asyncio.sleep(0.01)
    try:
        waits = await asyncio.gather(*(_ask(service, arrival) for arrival in arrivals))
    finally:
        await fleet.close()
        for worker in workers:
            worker.stop()
            await asyncio.to_thread(worker.join)
    computed = sum(worker.engine.stats.prompt_tokens for worker in workers)
    waits.sort()
    return {
        "computed": computed,
        "share": computed / sum(len(arrival.prompt) for arrival in arrivals),
        "ttft_mean_ms": 1000 * statistics.fmean(waits),
        "ttft_p90_ms": 1000 * waits[len(waits) * 9 // 10],
    }


async def _ask(service: Service, arrival: Arrival) -> float:
    """Seconds to the first token."""
    await asyncio.sleep(arrival.at)
    began = time.perf_counter()
    first = 0.0
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    async for _ in service.generate([arrival.prompt], sampling, session_id=arrival.session):
        first = first or time.perf_counter() - began
    return first


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument(
        "--blocks", type=int, default=160, help="of 16 tokens, KV cache of each worker"
    )
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument(
        "--repeats", type=int, default=5, help="each another draw, of all policies in turn"
    )
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    options = parser.parse_args()
    check_writable(options.out)
    torch.set_num_threads(1)
    bare = bare_us_per_token()
    print(beside(bare))
    logging.getLogger("pdserve").setLevel(logging.ERROR)
    for workload in options.workloads:
        runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in options.policies}
        for repeat in range(options.repeats):
            arrivals = WORKLOADS[workload](random.Random(repeat), options.requests)
            for policy in options.policies:
                runs[policy].append(
                    asyncio.run(measure(policy, arrivals, options.workers, options.blocks))
                )
        for policy, results in runs.items():
            append(
                options.out, _row(options, workload, policy, results) | {"bare_us_per_token": bare}
            )
            print(
                f"{workload:14}{policy:14}"
                + "".join(f"{k} {_median(results, k):9.2f}  " for k in results[0])
            )


def _row(
    options: argparse.Namespace, workload: str, policy: str, results: list[dict[str, float]]
) -> dict[str, Any]:
    row: dict[str, Any] = {"benchmark": "choosing", "workload": workload, "policy": policy}
    row |= {"workers": options.workers, "blocks": options.blocks, "requests": options.requests}
    for name in results[0]:
        values = [result[name] for result in results]
        row[name] = {
            "median": round(_median(results, name), 4),
            "min": min(values),
            "max": max(values),
        }
    return row | circumstances()


def _median(results: list[dict[str, float]], name: str) -> float:
    return statistics.median(result[name] for result in results)


if __name__ == "__main__":
    main()
