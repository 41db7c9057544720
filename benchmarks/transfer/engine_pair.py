"""A prefill engine and its decode engines, and a router by hand: no Ray and no HTTP.

It introduces the engines of engine_processes.py, and sends the same commands as
router.request.request_run. It records when each event arrived by this process's perf_counter, and
measures nothing else. benchmarks/transfer/hand_off.py uses it.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.transfer.engine_processes import EngineProcess
from pdserve.protocol.codec import decode_batch
from pdserve.protocol.commands import Cancel, Command, ConnectPeer, Prepare, Start, Submit
from pdserve.protocol.events import (
    Arrived,
    CacheChange,
    CacheState,
    Delta,
    Event,
    ExpertCounts,
    Failed,
    Handoff,
    Hello,
    LegsWaiting,
    Load,
    PeerStatus,
    PoolChange,
    Snapshot,
)
from pdserve.protocol.handoff import Source, Ticket
from pdserve.protocol.request_key import Phase, RequestKey
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.worker.engine_client import EngineClient, EngineGone

ROUTER = "benchmark"
SESSION = 1
ANSWER_S = 120.0

E = TypeVar("E", bound=Event)


@dataclass(eq=False)
class Leg:
    """One Submit (or its Prepare) at a worker: its events, and when they arrived."""

    key: RequestKey
    worker: "Worker"
    events: list[tuple[float, Event]] = field(default_factory=list)
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(
        self, kind: type[E], test: Callable[[E], bool] = lambda event: True
    ) -> tuple[float, E]:
        """Waits for the first such event, and returns its time and the event. Raises ValueError if
        the leg fails or nothing arrives."""
        seen = 0
        try:
            async with asyncio.timeout(ANSWER_S):
                while True:
                    self.woken.clear()
                    for now, event in self.events[seen:]:
                        if isinstance(event, kind) and test(event):
                            return now, event
                        if isinstance(event, Failed):
                            raise ValueError(
                                f"engine {self.worker.name} failed a request: {event.message}"
                            )
                    seen = len(self.events)
                    if self.worker.is_gone:
                        raise ValueError(f"engine {self.worker.name} ended")
                    await self.woken.wait()
        except TimeoutError:
            raise ValueError(
                f"engine {self.worker.name}: no {kind.__name__} in {ANSWER_S:g} s"
            ) from None


class Worker:
    """Reads an engine's event stream as it arrives. `watch` also gets each batch of events, with
    its time."""

    def __init__(self, process: EngineProcess) -> None:
        self.name = process.name
        self.is_gone = self._is_greeted = False
        self.watch: Callable[[float, Sequence[Event]], None] | None = None
        self._client = EngineClient(process.address)
        self._own = Leg(RequestKey(ROUTER, SESSION, ""), self)  # events that belong to no request
        self._legs: dict[tuple[str, int], Leg] = {}
        self._reader = asyncio.create_task(self._read())

    async def greet(self) -> None:
        """Waits until the engine has sent Hello and a snapshot."""
        _, self.hello = await self._own.until(Hello)
        _, self.snapshot = await self._own.until(Snapshot)
        self._is_greeted = True

    async def connect(self, peer: "Worker") -> PeerStatus:
        """Connects the engine to a peer. Raises ValueError if it cannot pull from the peer."""
        assert peer.hello.kv_cache is not None
        self.send(ConnectPeer(meta=peer.hello.kv_cache))
        _, status = await self._own.until(PeerStatus)
        if not status.connected:
            raise ValueError(
                f"engine {self.name} cannot pull from engine {peer.name}: {status.detail}"
            )
        return status

    def send(self, command: Command) -> None:
        try:
            self._client.send(command)
        except EngineGone as error:
            raise ValueError(f"engine {self.name}: {error}") from error

    def open_leg(self, request_id: str, attempt: int) -> Leg:
        leg = Leg(RequestKey(ROUTER, SESSION, request_id, attempt), self)
        self._legs[request_id, attempt] = leg
        return leg

    def end(self, leg: Leg, cancel: bool = False) -> None:
        """Forgets a leg. With `cancel`, the worker also drops it."""
        self._legs.pop((leg.key.request_id, leg.key.attempt), None)
        if cancel:
            self.send(Cancel(key=leg.key))

    async def close(self) -> None:
        """Tells the engine to stop."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._client.close()

    async def _read(self) -> None:
        try:
            async for batch in self._client.subscribe(ROUTER, SESSION):
                now = time.perf_counter()
                events = decode_batch(batch).events
                for event in events:
                    self._take(now, event)
                if self.watch is not None:
                    self.watch(now, events)
        finally:
            self.is_gone = True
            for leg in [self._own, *self._legs.values()]:
                leg.woken.set()

    def _take(self, now: float, event: Event) -> None:
        others = (CacheChange, CacheState, ExpertCounts, LegsWaiting, Load, PoolChange)
        if isinstance(event, others):
            return
        if isinstance(event, (Hello, PeerStatus, Snapshot)):
            leg: Leg | None = self._own
            if isinstance(event, Snapshot) and self._is_greeted:
                return  # snapshots arrive once per second
        else:
            leg = self._legs.get((event.request_id, event.attempt))
        if leg is not None:
            leg.events.append((now, event))
            leg.woken.set()


@dataclass(frozen=True)
class Answer:
    """The answer to one request. Times are perf_counter() seconds."""

    sent: float
    times: list[float]  # one per token
    token_ids: list[int]
    handed: float | None = None  # when P's Handoff arrived; split requests only
    arrived: tuple[float, Arrived] | None = None  # D's Arrived; split requests only


class Pair:
    """P and D, connected. Every call is a new request."""

    def __init__(self, p: Worker, d: Worker, status: PeerStatus, ids: Iterator[int]) -> None:
        """Pairs two engines. `ids` is the same for all pairs of an engine."""
        self.p = p
        self.d = d
        self.status = status
        self._ids = (f"r{i}" for i in ids)

    def submit(
        self,
        worker: Worker,
        phase: Phase,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        first: tuple[int, ...] = (),
        ticket: Ticket | None = None,
    ) -> Leg:
        """Sends a request's only leg. `first` is the generated tokens after which it continues."""
        leg = worker.open_leg(next(self._ids), 1)
        worker.send(_submit(leg, phase, prompt, sampling, first, ticket))
        return leg

    async def whole(
        self, worker: Worker, prompt: tuple[int, ...], sampling: SamplingParams
    ) -> Answer:
        """Serves prompt and answer on one engine."""
        sent = time.perf_counter()
        leg = self.submit(worker, "full", prompt, sampling)
        await leg.until(Delta, _is_last)
        worker.end(leg)
        return Answer(sent, *_tokens(leg))

    async def split(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        announce: bool,
        overlap: bool = False,
    ) -> Answer:
        """Serves the prompt on P and the answer on D. Raises ValueError if the rows did not come
        from P's memory.

        - announce: D is prepared, and pulls parts as P publishes them.
        - overlap: P also cuts the last chunk short for this.
        """
        request_id = next(self._ids)
        p_leg = self.p.open_leg(request_id, 1)
        d_leg = self.d.open_leg(request_id, 2)
        sent = time.perf_counter()
        self.p.send(_submit(p_leg, "prefill", prompt, sampling, overlap=overlap))
        if announce:
            assert self.p.hello.kv_cache is not None
            source = Source(
                self.p.hello.kv_cache.engine_id, self.p.hello.kv_cache.incarnation, p_leg.key
            )
            self.d.send(Prepare(submit=_submit(d_leg, "decode", prompt, sampling), source=source))
        handed, handoff = await p_leg.until(Handoff)
        first_times, first = _tokens(p_leg)
        self.d.send(_submit(d_leg, "decode", prompt, sampling, tuple(first), handoff.ticket))
        arrived = await self.arrival(d_leg)
        self.p.end(p_leg)
        await d_leg.until(Delta, _is_last)
        self.d.end(d_leg)
        times, token_ids = _tokens(d_leg)
        return Answer(sent, first_times + times, first + token_ids, handed, arrived)

    async def arrival(self, leg: Leg) -> tuple[float, Arrived]:
        """Returns when D had the rows. Raises ValueError if they did not come from P's memory."""
        now, arrived = await leg.until(Arrived)
        if arrived.source != "p2p":
            raise ValueError(
                f"D got the rows by {arrived.source!r} instead of a transfer: "
                f"{arrived.reason} {arrived.detail}"
            )
        return now, arrived


@asynccontextmanager
async def connected(processes: Sequence[EngineProcess]) -> AsyncIterator[list[Pair]]:
    """Connects a prefill engine, the first, with each decode engine. At the end they are told to
    stop."""
    workers = [Worker(process) for process in processes]
    try:
        for worker in workers:
            await worker.greet()
        p, *decodes = workers
        ids = itertools.count()
        yield [Pair(p, d, await d.connect(p), ids) for d in decodes]
    finally:
        for worker in workers:
            await worker.close()


def _submit(
    leg: Leg,
    phase: Phase,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    first: tuple[int, ...] = (),
    ticket: Ticket | None = None,
    overlap: bool = False,
) -> Submit:
    return Submit(
        key=leg.key,
        phase=phase,
        prompt_token_ids=prompt,
        sampling=sampling,
        starts=(Start(0, first),),
        ticket=ticket,
        overlap=overlap,
    )


def _is_last(delta: Delta) -> bool:
    return delta.finish_reason is not None


def _tokens(leg: Leg) -> tuple[list[float], list[int]]:
    """Returns the times and ids of the tokens that have arrived."""
    deltas = [(now, event) for now, event in leg.events if isinstance(event, Delta)]
    times = [now for now, delta in deltas for _ in delta.token_ids]
    return times, [token for _, delta in deltas for token in delta.token_ids]
