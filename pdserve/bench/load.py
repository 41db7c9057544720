"""Puts HTTP load on an OpenAI-compatible server, in a closed or an open loop.

In a closed loop each client sends its next request when the last one has ended. In an open loop
requests arrive by a Poisson process, whether or not the server keeps up. Reports these figures:

- TTFT: time to first token.
- gap: time from the first token to the second.
- TPOT: time per output token after the first.
- ITL: gaps between arrivals.
- Rates, failures, and how busy this client itself was.

Torch-free. Called by bench.cli, bench.replay.send and benchmarks/targets/measure.py.
"""

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvloop
from tqdm import tqdm

from pdserve.bench.record import Json, percentiles
from pdserve.bench.sse_client import CompletionClient, Outcome, ServerError
from pdserve.bench.workload import Shape, Work, draw_work, poisson_arrivals

BUSY_CLIENT = 0.7  # share of a core above which the client itself may limit the result
LATE_MS = 50.0  # p99 of lateness above which the loop was not open


@dataclass(frozen=True)
class LoadConfig:
    """One load. Either clients (closed loop) or rate (open loop) is given."""

    url: str
    shape: Shape  # The number of requests and their lengths.
    clients: int | None = None
    rate: float | None = None  # Requests per second.
    model: str | None = None  # None asks the server.
    vocab_size: int = 1000  # Prompts hold token ids below this.
    num_warmups: int = 2  # Requests before the clock starts; all of them must succeed.
    seed: int = 0
    timeout_s: float = 600.0
    ignore_eos: bool = True
    extra_body: Json = field(default_factory=dict)  # Adds fields to requests; null removes one.

    def __post_init__(self) -> None:
        if (self.clients is None) == (self.rate is None):
            raise ValueError("give either --clients (closed loop) or --rate (open loop)")
        if self.clients is not None and self.clients < 1:
            raise ValueError(f"--clients must be at least 1, not {self.clients}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ValueError(
                f"--rate must be a number of requests per second above 0, not {self.rate}"
            )

    @property
    def label(self) -> str:
        return f"{self.clients} clients" if self.clients is not None else f"{self.rate:g} req/s"


@dataclass
class LoadResult:
    """The result of a load. `cpu_share` is the client's share of one core.

    `lateness` is how many seconds after its time each request was sent, in an open loop.
    """

    outcomes: list[Outcome]
    seconds: float
    cpu_share: float
    lateness: list[float]
    model: str

    @property
    def finished(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error is None]

    @property
    def errors(self) -> Counter[str]:
        return Counter(outcome.error for outcome in self.outcomes if outcome.error is not None)

    def figures(self) -> Json:
        """Returns figures for JSON, with times in ms.

        Latencies and rates count only finished requests.
        """
        finished = self.finished
        num_tokens = sum(outcome.num_tokens for outcome in finished)
        return {
            "ttft_ms": percentiles([outcome.ttft for outcome in finished]),
            "gap_ms": percentiles([outcome.itls[0] for outcome in finished if outcome.itls]),
            "tpot_ms": percentiles(
                [outcome.tpot for outcome in finished if outcome.tpot is not None]
            ),
            "itl_ms": percentiles([gap for outcome in finished for gap in outcome.itls]),
            "output_tokens_per_s": round(num_tokens / self.seconds, 1),
            "requests_per_s": round(len(finished) / self.seconds, 3),
            "seconds": round(self.seconds, 3),
            "num_finished": len(finished),
            "num_output_tokens": num_tokens,
            "num_failed": len(self.outcomes) - len(finished),
            "errors": dict(self.errors.most_common(10)),
            "client_cpu_share": round(self.cpu_share, 3),
            "client_late_ms": percentiles(self.lateness),
        }


class ClientClock:
    """Measures this client's own share of a core (cpu_share) while the load is timed.

    This context manager also keeps garbage collections from searching objects that existed before.
    """

    cpu_share = 0.0

    def __enter__(self) -> "ClientClock":
        gc.collect()
        gc.freeze()  # collections skip existing objects while the clock runs
        self._cpu = time.process_time()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        cpu_seconds = time.process_time() - self._cpu
        self.cpu_share = cpu_seconds / (time.perf_counter() - self._began)
        gc.unfreeze()


def run_load(config: LoadConfig, progress: bool = True) -> LoadResult:
    """Puts the load on the server and waits for its end.

    Raises ServerError (a ValueError) if not even a warm-up succeeds.
    """
    return uvloop.run(_run(config, progress))


async def _run(config: LoadConfig, progress: bool) -> LoadResult:
    async with CompletionClient(config.url, config.timeout_s) as client:
        model = config.model or await client.only_model()
        warmup = Shape(max(config.num_warmups, 1), config.shape.input_len, config.shape.output_len)
        for work in draw_work(warmup, config.vocab_size, f"{config.seed}/warm-up")[
            : config.num_warmups
        ]:
            outcome = await client.complete(_body(config, model, work))
            if outcome.error is not None:
                raise ServerError(f"a warm-up request failed: {outcome.error}")
        bodies = [
            _body(config, model, work)
            for work in draw_work(config.shape, config.vocab_size, config.seed)
        ]
        with (
            tqdm(total=len(bodies), desc=config.label, unit="request", disable=not progress) as bar,
            ClientClock() as clock,
        ):
            outcomes, lateness = await _send_all(config, client, bodies, bar.update)
    seconds = max(outcome.ended_at for outcome in outcomes) - min(
        outcome.sent_at for outcome in outcomes
    )
    return LoadResult(outcomes, seconds, clock.cpu_share, lateness, model)


def _body(config: LoadConfig, model: str, work: Work) -> bytes:
    fields: Json = {
        "model": model,
        "prompt": work.prompt_token_ids,
        "max_tokens": work.output_len,
        "temperature": 0,
        "ignore_eos": config.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **config.extra_body,
    }
    return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})


async def _send_all(
    config: LoadConfig, client: CompletionClient, bodies: Sequence[bytes], done: Callable[[], Any]
) -> tuple[list[Outcome], list[float]]:
    async def send(body: bytes) -> Outcome:
        outcome = await client.complete(body)
        done()
        return outcome

    if config.clients is not None:
        return await _closed_loop(send, bodies, config.clients), []
    assert config.rate is not None
    return await open_loop(send, bodies, poisson_arrivals(config.rate, len(bodies), config.seed))


Send = Callable[[bytes], Coroutine[Any, Any, Outcome]]


async def _closed_loop(send: Send, bodies: Sequence[bytes], num_clients: int) -> list[Outcome]:
    waiting = iter(bodies)

    async def one_client() -> list[Outcome]:
        return [await send(body) for body in waiting]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one_client()) for _ in range(min(num_clients, len(bodies)))]
    return [outcome for task in tasks for outcome in task.result()]


async def open_loop(
    send: Send, bodies: Sequence[bytes], arrivals: Sequence[float]
) -> tuple[list[Outcome], list[float]]:
    """Sends each body at its arrival time, whether or not others have ended.

    Arrivals are in seconds from now, ascending. Returns outcomes in this order, and how many
    seconds after its time each was sent.
    """
    began = time.perf_counter()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for body, arrival in zip(bodies, arrivals, strict=True):
            await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
            tasks.append(group.create_task(send(body)))
    outcomes = [task.result() for task in tasks]
    return outcomes, [
        outcome.sent_at - began - arrival
        for outcome, arrival in zip(outcomes, arrivals, strict=True)
    ]
