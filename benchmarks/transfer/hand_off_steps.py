"""Step times of two engines with and without transfers between them.

These are the parts "decode" and "prefill" of benchmarks/transfer/hand_off.py, whose header explains
them. This module knows no tables and no command line.
"""

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks.transfer.engine_pair import ANSWER_S, Leg, Pair, Worker
from benchmarks.transfer.hand_off_plan import SETTLE, Plan, batch_tokens, greedy, summary
from pdserve.bench.record import Json
from pdserve.protocol.events import Arrived, Delta, Event, Handoff
from pdserve.protocol.handoff import Ticket

CHUNKS = 4  # prompts of P per interval


class Pulls:
    """Lets D pull one prompt of P many times, `in_flight` at once, while the context is open.
    `arrivals` has the times and the Arrived events."""

    def __init__(
        self,
        pair: Pair,
        plan: Plan,
        prompt: tuple[int, ...],
        first: tuple[int, ...],
        ticket: Ticket,
    ) -> None:
        self._pair = pair
        self._plan = plan
        self._prompt = prompt
        self._first = first
        self._ticket = ticket
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []
        self.arrivals: list[tuple[float, Arrived]] = []

    async def __aenter__(self) -> "Pulls":
        await asyncio.gather(*(self._pull() for _ in range(self._plan.in_flight)))
        self._tasks = [asyncio.create_task(self._go_on()) for _ in range(self._plan.in_flight)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    def check(self) -> None:
        """Raises what ended a pull, if one has failed."""
        for task in self._tasks:
            if task.done():
                task.result()

    def between(self, began: float, ended: float) -> list[Arrived]:
        return [arrived for now, arrived in self.arrivals if began < now <= ended]

    async def _go_on(self) -> None:
        while not self._is_over:
            await self._pull()

    async def _pull(self) -> None:
        sampling = greedy(self._plan.output_len)
        leg = self._pair.submit(
            self._pair.d, "decode", self._prompt, sampling, self._first, self._ticket
        )
        self.arrivals.append(await self._pair.arrival(leg))
        self._pair.d.end(leg, cancel=True)


async def published(plan: Plan, pair: Pair) -> tuple[Leg, Callable[[Pair], Pulls]]:
    """Publishes a prompt of the longest --tokens on P. Also returns a function that makes a pair's
    pulls.

    D reports to P that it is done by the ticket's key. Here the key is another one, so P keeps the
    blocks and they can be read again.
    """
    prompt = plan.prompt(max(plan.tokens), pair.p.hello.vocab_size, "pulled")
    leg = pair.submit(pair.p, "prefill", prompt, greedy(plan.output_len))
    _, handoff = await leg.until(Handoff)
    _, first = await leg.until(Delta)
    ticket = handoff.ticket
    kept = msgspec.structs.replace(
        ticket, key=msgspec.structs.replace(ticket.key, request_id="kept")
    )
    return leg, lambda puller: Pulls(puller, plan, prompt, first.token_ids, kept)


class BatchSteps:
    """Records when each step of a batch that decodes on `worker` ended. Every batch of events with
    its tokens is a step. No other request may have tokens there in the meantime."""

    def __init__(self, worker: Worker, legs: Sequence[Leg]) -> None:
        self._worker = worker
        self._ids = {leg.key.request_id for leg in legs}
        self._times: list[float] = []
        self._trouble = ""
        self._woken = asyncio.Event()
        worker.watch = self._see

    def _see(self, now: float, events: Sequence[Event]) -> None:
        tokens = [event for event in events if isinstance(event, Delta)]
        if not tokens:
            return
        self._times.append(now)
        if any(token.request_id not in self._ids for token in tokens):
            self._trouble = "a pulled request ran beside the batch"
        elif any(token.finish_reason is not None for token in tokens):
            self._trouble = "the batch ended before its steps were measured: ask for fewer --steps"
        self._woken.set()

    async def take(self, count: int) -> list[float]:
        """Returns the ends of the next step and of the `count` steps after it. Those steps begin
        after the call."""
        start = len(self._times)
        try:
            async with asyncio.timeout(ANSWER_S):
                while len(self._times) <= start + count:
                    if self._trouble:
                        raise ValueError(self._trouble)
                    self._woken.clear()
                    await self._woken.wait()
        except TimeoutError:
            raise ValueError(
                f"engine {self._worker.name}: no {count} steps in {ANSWER_S:g} s"
            ) from None
        return self._times[start : start + count + 1]


@dataclass
class Interval:
    """A number of consecutive steps."""

    times: list[float]  # ends of steps, beginning with the previous step's
    arrived: list[Arrived]  # transfers that ended in this time

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[0]

    @property
    def step_s(self) -> float:
        return self.seconds / (len(self.times) - 1)

    @property
    def steps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


Take = Callable[[], Awaitable[list[float]]]


async def off_and_on(
    take: Take, pulls: Callable[[], Pulls], on_first: bool
) -> tuple[Interval, Interval]:
    """Measures two intervals, without transfers and with them."""
    off = None if on_first else Interval(await take(), [])
    async with pulls() as running:
        times = await take()
        on = Interval(times, running.between(times[0], times[-1]))
    return off or Interval(await take(), []), on


async def decode_pair(
    plan: Plan, pair: Pair, pulls: Callable[[], Pulls], index: int
) -> tuple[Interval, Interval]:
    """Measures a pair of intervals on a new batch, so that contexts are equal in every pair."""
    sampling = greedy(batch_tokens(plan) - plan.context)
    vocab_size = pair.d.hello.vocab_size
    prompts = [
        plan.prompt(plan.context, vocab_size, f"batch {index}/{i}") for i in range(plan.batch)
    ]
    legs = [pair.submit(pair.d, "full", prompt, sampling) for prompt in prompts]
    for leg in legs:
        await leg.until(Delta)
    steps = BatchSteps(pair.d, legs)

    async def take() -> list[float]:
        await steps.take(SETTLE)
        return await steps.take(plan.steps)

    try:
        return await off_and_on(take, pulls, on_first=index % 2 == 1)
    finally:
        pair.d.watch = None
        for leg in legs:
            pair.d.end(leg, cancel=True)


async def prefill_pair(
    plan: Plan, pair: Pair, pulls: Callable[[], Pulls], index: int
) -> tuple[Interval, Interval]:
    prompt = plan.prompt(plan.chunk, pair.p.hello.vocab_size, f"chunk {index}")

    async def take() -> list[float]:
        times = []
        for _ in range(CHUNKS + 1):
            leg = pair.submit(pair.p, "full", prompt, greedy(1))
            now, _ = await leg.until(Delta)
            pair.p.end(leg)
            times.append(now)
        return times

    return await off_and_on(take, pulls, on_first=index % 2 == 1)


MEASURES = {"decode": decode_pair, "prefill": prefill_pair}


async def measure_steps(plan: Plan, pair: Pair, part: str, tick: Callable[[], Any]) -> Json:
    held, pulls_of = await published(plan, pair)

    def pulls() -> Pulls:
        return pulls_of(pair)

    results = []
    for index in range(-1, plan.pairs):  # the first warms up
        result = await MEASURES[part](plan, pair, pulls, index)
        if index >= 0:
            results.append(result)
            tick()
    pair.p.end(held, cancel=True)
    if part == "decode":
        sizes = {"batch": plan.batch, "context": plan.context, "steps": plan.steps}
    else:
        sizes = {"chunk": plan.chunk, "steps": CHUNKS}
    return {
        "part": part,
        **sizes,
        "tokens": max(plan.tokens),
        "in_flight": plan.in_flight,
        **step_figures(results),
    }


def step_figures(results: Sequence[tuple[Interval, Interval]]) -> Json:
    """Summarises pairs (off, on). "ratio" is that of the pairs' mean step times."""
    ratios = [on.step_s / off.step_s for off, on in results]
    quarters = (
        statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    )
    arrived = [event for _, on in results for event in on.arrived]
    seconds = sum(on.seconds for _, on in results)
    return {
        "pairs": len(results),
        "ratio": {
            "median": round(statistics.median(ratios), 4),
            "quarters": [round(quarters[0], 4), round(quarters[2], 4)],
            "range": [round(min(ratios), 4), round(max(ratios), 4)],
        },
        "off_ms": summary([step for off, _ in results for step in off.steps]),
        "on_ms": summary([step for _, on in results for step in on.steps]),
        "num_transfers": len(arrived),
        "gb_per_s": round(sum(event.num_bytes for event in arrived) / seconds / 1e9, 2),
        "pull_ms": summary([event.seconds for event in arrived]) if arrived else None,
        "transport": "/".join(sorted({event.transport for event in arrived})),
    }
