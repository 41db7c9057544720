"""Several paper workers and routers. The real Chooser places requests by the workers' last reports.

A router sees a worker's last report (Snapshot or Load), and what it has sent there since. A
hand-off takes HANDOFF_MS and the transfer. No messages are encoded. Times are in milliseconds.
`split_rule.py` and the tests of the rule over paper engines use this module.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from benchmarks.router.paper_worker import PaperWorker, PrefixCache, Prompt, Request
from pdserve.configs.router import SloConfig
from pdserve.protocol.events import Hello, Load, PeerStatus, Snapshot
from pdserve.protocol.handoff import KVCacheMeta, RankMemory
from pdserve.protocol.request_key import Phase, RequestKey
from pdserve.router.choosing.choose import Chooser, Demand, note_sent
from pdserve.router.choosing.split_rule import HANDOFF_MS, Mode
from pdserve.router.fleet.prefix_index import CachedBlocks, PromptBlocks
from pdserve.router.fleet.worker_state import Leg, WorkerState

BYTES_PER_TOKEN = 131_072
LINK_BYTES_PER_S = 233e9
BLOCK_SIZE = 64
ANNOUNCED_FROM = 512  # prompts from this many tokens on are announced to D when P begins
LOAD_PERIOD_MS = 100.0
SNAPSHOT_PERIOD_MS = 1000.0
PREFILL_TOKENS_PER_S = 42_000.0  # the slope of a paper worker's prompt steps


class PaperPrompt:
    """A stand-in for PromptBlocks."""

    def __init__(self, request: Request) -> None:
        self.num_tokens = request.num_prompt_tokens
        self._blocks = request.blocks

    def num_cached_tokens(self, cached: PrefixCache, *_: object) -> int:
        return min(cached.num_tokens(self._blocks), self.num_tokens - 1)


class _Link:
    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id


@dataclass
class Router:
    """A router with the real chooser."""

    chooser: Chooser
    views: dict[str, WorkerState]  # by worker


@dataclass
class Layout:
    """The workers and routers of a cluster."""

    roles: tuple[str, ...] = ("prefill", "decode")  # one per worker
    split: Mode = "auto"
    paced: bool = True  # True: engines pace their steps and report it
    num_routers: int = 1
    load_period_ms: float = LOAD_PERIOD_MS  # largest age of a router's view while load changes


@dataclass
class PaperCluster:
    """A simulated cluster."""

    layout: Layout
    ttft_ms: float
    tpot_ms: float
    seed: int
    # (request that ended, time) -> the next request of a closed loop, or None
    after: Callable[[Request, float], Request | None] = lambda request, now: None
    workers: dict[str, PaperWorker] = field(default_factory=dict)
    done: list[Request] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    now: float = 0.0
    on_tick: Callable[["PaperCluster"], None] = lambda cluster: None

    def __post_init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._placed: dict[int, tuple[Router, WorkerState | None, WorkerState]] = {}
        self._stepping: set[str] = set()
        self._told: dict[str, tuple[float, int, int]] = {}
        self.roles = {f"w{i}": role for i, role in enumerate(self.layout.roles)}
        for name in self.roles:
            tpot = self.tpot_ms if self.layout.paced else None
            self.workers[name] = PaperWorker(name, tpot, self.ttft_ms)
        self.routers = [self._router(number) for number in range(self.layout.num_routers)]
        self._turn = itertools.cycle(self.routers)

    def run(self, requests: Iterable[Request], until_ms: float = float("inf")) -> None:
        """Runs until all requests are done, or until `until_ms`."""
        self._left = 0
        for request in requests:
            self._later(request.arrived, partial(self._arrive, request))
        self._report(SNAPSHOT_PERIOD_MS, None)
        while self._events and self._left >= 0:
            at, _, call = heapq.heappop(self._events)
            if at > until_ms:
                return
            self.now = at
            call()
            if not self._left and not any(self._events_left()):
                return

    def _events_left(self) -> Iterable[bool]:
        return (call is not self._tick for _, _, call in self._events)

    def _later(self, at: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), call))

    # --- routers ---

    def _router(self, number: int) -> Router:
        views = {}
        for name, role in self.roles.items():
            worker = WorkerState(cast(Any, _Link(name)), 1, _hello(name, role), 1, 0.0)
            worker.cached = cast(CachedBlocks, self.workers[name].cache)
            views[name] = worker
        for worker in views.values():
            for peer in views.values():
                meta = peer.kv_cache
                assert meta is not None
                worker.met(
                    PeerStatus(
                        engine_id=meta.engine_id,
                        incarnation=1,
                        connected=True,
                        bytes_per_s=LINK_BYTES_PER_S,
                    )
                )
        slo = SloConfig(ttft_ms=self.ttft_ms, tpot_ms=self.tpot_ms)
        chooser = Chooser(1, split=self.layout.split, slo=slo, seed=100 * self.seed + number)
        router = Router(chooser, views)
        for name in views:
            views[name].snapshot = self._snapshot(name)
            views[name].told(self._snapshot(name), 0.0)
        return router

    def _snapshot(self, name: str) -> Snapshot:
        worker = self.workers[name]
        return Snapshot(
            role=self.roles[name],
            num_waiting=len(worker.waiting),
            num_running=len(worker.streams),
            queue_tokens=worker.queue_tokens,
            free_blocks=1 << 20,
            total_blocks=1 << 20,
            pinned_blocks=0,
            quarantined_blocks=0,
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
            pace=worker.pace(),
        )

    def _report(self, period_ms: float, only: str | None) -> None:
        self._tick = lambda: self._snapshots(period_ms)
        self._later(self.now + period_ms, self._tick)

    def _snapshots(self, period_ms: float) -> None:
        for name in self.workers:
            snapshot = self._snapshot(name)
            for router in self.routers:
                router.views[name].snapshot = snapshot
            self._tell(name, snapshot)
        self.on_tick(self)
        self._later(self.now + period_ms, self._tick)

    def _tell(self, name: str, load: Snapshot | Load) -> None:
        self._told[name] = self.now, load.queue_tokens, load.num_running
        for router in self.routers:
            router.views[name].told(load, self.now / 1000)

    def _tell_changes(self, name: str) -> None:
        """Sends a Load if much changed since the last report."""
        worker = self.workers[name]
        at, queue_tokens, num_streams = self._told.get(name, (0.0, 0, 0))
        if self.now - at < self.layout.load_period_ms:
            return
        changed = abs(len(worker.streams) - num_streams)
        queue = worker.queue_tokens
        if abs(queue - queue_tokens) > 1024 or changed >= max(2, 0.1 * num_streams):
            load = Load(
                queue_tokens=queue,
                num_running=len(worker.streams),
                num_waiting=len(worker.waiting),
                pace=worker.pace(),
            )
            self._tell(name, load)

    # --- requests ---

    def _arrive(self, request: Request) -> None:
        self._left += 1
        router = next(self._turn)
        prompt = cast(PromptBlocks, PaperPrompt(request))
        demand = Demand(
            request.num_prompt_tokens,
            request.num_prompt_tokens + request.num_tokens,
            prompt=prompt,
            max_tokens=request.num_tokens,
        )
        views = list(router.views.values())
        chosen = router.chooser.choose(views, demand, self.now / 1000)
        self.reasons[chosen.reason] = self.reasons.get(chosen.reason, 0) + 1
        first = chosen.prefill or chosen.decode
        phase: Phase = "full" if chosen.prefill is None else "prefill"
        leg = str(request.number), 0
        note_sent(views, first, prompt, phase, leg, self.now / 1000)
        first.queue.read(leg)
        _open_leg(first, request, 0)
        if chosen.prefill is not None and request.num_prompt_tokens >= ANNOUNCED_FROM:
            _open_leg(chosen.decode, request, 1, is_prepared=True)
        self._placed[request.number] = router, chosen.prefill, chosen.decode
        self.workers[first.worker_id].add(request, chosen.prefill is not None)
        self._wake(first.worker_id)

    def _wake(self, name: str) -> None:
        worker = self.workers[name]
        if name in self._stepping or not (worker.waiting or worker.streams):
            return
        self._stepping.add(name)
        ms, chunks = worker.plan(self.now)
        self._later(self.now + ms, lambda: self._stepped(name, chunks))

    def _stepped(self, name: str, chunks: list[tuple[Prompt, int]]) -> None:
        self._stepping.discard(name)
        ended, computed = self.workers[name].finish(self.now, chunks)
        for prompt in computed:
            if prompt.splits and prompt.request.num_tokens > 1:
                self._hand_over(prompt.request)
        for request in ended:
            self._end(request)
        self._tell_changes(name)
        self._wake(name)

    def _hand_over(self, request: Request) -> None:
        _, prefill, decode = self._placed[request.number]
        assert prefill is not None
        _open_leg(decode, request, 1)
        target = self.workers[decode.worker_id]
        missing = request.num_prompt_tokens - target.cache.num_tokens(request.blocks)
        moved = 1000 * max(0, missing) * BYTES_PER_TOKEN / LINK_BYTES_PER_S

        def join() -> None:
            prefill.legs.pop((str(request.number), 0), None)
            target.join(request, self.now)
            self._wake(decode.worker_id)

        self._later(self.now + HANDOFF_MS + moved, join)

    def _end(self, request: Request) -> None:
        self._left -= 1
        _, prefill, decode = self._placed.pop(request.number)
        for worker in (prefill, decode):
            if worker is not None:
                worker.legs.pop((str(request.number), 0), None)
                worker.legs.pop((str(request.number), 1), None)
        self.done.append(request)
        following = self.after(request, self.now)
        if following is not None:
            self._later(following.arrived, lambda: self._arrive(following))


def _open_leg(
    worker: WorkerState, request: Request, attempt: int, is_prepared: bool = False
) -> None:
    key = RequestKey("r", worker.session, str(request.number), attempt)
    leg = Leg(key, worker, cast(Any, None), 0, {0}, 0.0, prepared=is_prepared)
    worker.legs[key.request_id, attempt] = leg


def _hello(name: str, role: str) -> Hello:
    ranks = (RankMemory("", b"", 0, "VRAM", 0, BYTES_PER_TOKEN * BLOCK_SIZE, ()),)
    meta = KVCacheMeta(
        engine_id=name,
        incarnation=1,
        connector="paper",
        model="m",
        rows="r",
        block_size=BLOCK_SIZE,
        num_blocks=1 << 20,
        generation_address=0,
        mailbox="",
        ranks=ranks,
    )
    return Hello(
        protocol=0,
        role=role,
        model_fingerprint="m",
        rows_digest="r",
        vocab_size=1,
        max_model_len=1 << 20,
        max_request_tokens=1 << 20,
        block_size=BLOCK_SIZE,
        kv_cache=meta,
        caches_prefixes=False,
    )
