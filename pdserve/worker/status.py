"""Collects what a worker reports of itself to routers: who it is (Hello), and its state (Snapshot).

Keeps its role, the measurements that routers choose by, and when a Snapshot is due. Sends nothing:
`loop.WorkerLoop` does, its only user.
"""

import math
import time

from pdserve.engine.engine import Engine
from pdserve.engine.scheduling.turns import pace_state
from pdserve.engine.step_result import StepResult
from pdserve.kvtransfer.connector import KVSender
from pdserve.prefill.prefill_phase import PrefillPhase
from pdserve.protocol.codec import PROTOCOL_VERSION
from pdserve.protocol.events import Hello, HomeState, Load, PaceState, PeerStatus, Snapshot
from pdserve.worker.fetching.fetch_phase import FetchPhase
from pdserve.worker.load_meter import LoadMeter
from pdserve.worker.load_report import LoadReport
from pdserve.worker.metrics import WorkerMetrics
from pdserve.worker.phases.grammar_phase import GrammarPhase
from pdserve.worker.pool_phase import PoolPhase
from pdserve.worker.prefill_speed import PrefillSpeed, is_mostly_prompt

SNAPSHOT_PERIOD_S = 1.0
FRESH_SNAPSHOT_S = 0.1  # time from the last Snapshot to that of a worker that has come to rest
# Bytes per second. With 8,192 tokens of Llama-8B on an H200, a short last chunk costs 6.4 ms of
# prefill and saves 0.8 GB.
FAST_LINK = 100e9
# Tokens. D may be told of such a prompt early; it then joins it about 10 ms sooner under load.
ANNOUNCE_FROM = 512


class WorkerStatus:
    """The state that routers hear of.

    `overlap` is as in TransferConfig, and `pool_name` names the KV pool of `pool`. `fetch` is None
    if prefixes are neither fetched nor lent. `grammars` is None if no request waits for a grammar.
    `hands_over` is as in WorkerConfig.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: WorkerMetrics,
        role: str,
        overlap: bool | str,
        sender: KVSender | None,
        prefill: PrefillPhase | None,
        pool: PoolPhase | None,
        pool_name: str,
        fetch: FetchPhase | None = None,
        grammars: GrammarPhase | None = None,
        hands_over: bool = True,
    ) -> None:
        self.role = role
        self._role_by = ""
        self._role_since = time.monotonic()
        self._engine = engine
        self._metrics = metrics
        self._overlap = overlap
        self._sender = sender
        self.hands_over = hands_over and sender is not None
        self._prefill = prefill
        self._pool = pool
        self._pool_name = pool_name
        self._fetch = fetch
        self._grammars = grammars or GrammarPhase(None)
        self._speed = PrefillSpeed()
        self._told_vague = False  # as the last Snapshot said
        self._load = LoadMeter(time.monotonic())
        self._report = LoadReport()
        self._last_snapshot = 0.0
        self._snapshot_is_stale = False

    @property
    def due(self) -> float:
        """Monotonic time at which the next Snapshot is due.

        That is once per second, and soon after the work is done, so that clients then see the true
        state.
        """
        rests = self._snapshot_is_stale and not self._engine.has_work
        return self._last_snapshot + (FRESH_SNAPSHOT_S if rests else SNAPSHOT_PERIOD_S)

    def set_role(self, role: str, by: str) -> None:
        """Sets the role; `by` is as in SetRole."""
        self.role = role
        self._role_by = by
        self._role_since = time.monotonic()

    @property
    def prefill_tokens_per_s(self) -> float:
        """Work of prompts done per second. Until steps that were mostly prompt show it, it is what
        the pace has learned, unless they were faster. 0 if nothing is known."""
        own = self._speed.tokens_per_s
        return own if own and not self._speed.is_least else max(own, self._paced_tokens_per_s)

    @property
    def _paced_tokens_per_s(self) -> float:
        return self._engine.pace.full_speed if self._engine.pace is not None else 0.0

    def _is_speed_vague(self, now: float) -> bool:
        """True if the speed is old, or comes from small steps alone."""
        is_least = self._speed.is_least and not self._paced_tokens_per_s
        return is_least or self._speed.is_old(now)

    def hurry(self) -> None:
        """Makes a Snapshot due now."""
        self._last_snapshot = -math.inf

    def told(self, now: float) -> None:
        """Notes that a Snapshot was due and is sent now."""
        self._last_snapshot = now
        self._snapshot_is_stale = False

    def stepped(self, result: StepResult, seconds: float) -> None:
        """Notes a step that took this many seconds."""
        self._metrics.step_seconds.observe(seconds)
        pace = self._engine.pace
        now = time.monotonic()
        weight = pace.weight if pace else 1.0
        self._speed.observe(*_prompt_part(result), seconds, now, weight)
        if self._told_vague and not self._is_speed_vague(now):
            self.hurry()  # routers have tried it, and shall not try more before they know
        self._snapshot_is_stale = True

    def turned(self, began: float, result: StepResult | None) -> None:
        """Notes the end of a turn that began at `began`, in monotonic seconds.

        `result` is that of its step, or None if none was computed.
        """
        prompts = result is not None and is_mostly_prompt(*_prompt_part(result))
        share = self._share(result) if result is not None else 1.0
        self._load.turned(began, time.monotonic(), result is not None, prompts, share)

    def _share(self, result: StepResult) -> float:
        """Returns the share of the running sequences that a step was for; 1 if there are no
        stages."""
        scheduler = self._engine.scheduler
        if scheduler.num_stages == 1:
            return 1.0
        return result.num_sequences / max(result.num_sequences, len(scheduler.running), 1)

    def hello(self, peers: tuple[PeerStatus, ...]) -> Hello:
        engine = self._engine
        return Hello(
            protocol=PROTOCOL_VERSION,
            role=self.role,
            model_fingerprint=engine.model_fingerprint,
            rows_digest=engine.rows_digest,
            vocab_size=engine.spec.vocab_size,
            max_model_len=engine.max_model_len,
            max_request_tokens=engine.max_request_tokens,
            block_size=engine.config.block_size,
            kv_cache=self._sender.meta() if self._sender else None,
            peers=peers,
            parts_from=min(ANNOUNCE_FROM, engine.scheduler.parts_from)
            if self._sender and self._overlap
            else 0,
            cut_below=FAST_LINK if self._overlap == "auto" else float("inf"),
            caches_prefixes=engine.config.enable_prefix_caching,
            kv_pool=self._pool_name if self._pool else "",
            pool_chunk=self._pool.chunk_tokens if self._pool else 0,
            fetches_prefixes=self._fetch is not None,
            grammar_engine=self._grammars.name,
            hands_over=self.hands_over,
        )

    def snapshot(self, cache_number: int, read_at: float) -> Snapshot:
        """Makes a Snapshot. See `CacheReport` for `cache_number`. `read_at` is when commands were
        read last, in monotonic seconds."""
        engine = self._engine
        scheduler = self._engine.scheduler
        now = time.monotonic()
        self._report.told(self._queue_tokens, len(scheduler.running))
        self._told_vague = self._is_speed_vague(now)
        return Snapshot(
            role=self.role,
            num_waiting=self._num_waiting,
            num_running=len(scheduler.running),
            queue_tokens=self._queue_tokens,
            free_blocks=engine.homes.num_free_blocks,
            total_blocks=engine.homes.num_usable_blocks,
            pinned_blocks=self._prefill.num_pinned_blocks if self._prefill else 0,
            quarantined_blocks=engine.homes.count_blocks().quarantined,
            metrics=self._metrics.families(),
            cache_number=cache_number,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            busy=self._load.busy(now),
            token_interval_s=self._load.token_interval_s if scheduler.running else 0.0,
            homes=tuple(HomeState(home.num_running, home.blocks.num_free) for home in engine.homes),
            pace=self._pace(),
            role_by=self._role_by,
            role_age_s=now - self._role_since,
            unread_s=now - read_at,
            is_prefill_speed_vague=self._told_vague,
        )

    @property
    def _queue_tokens(self) -> int:
        """Work of the prompts that wait, also for a prefix, the pool or a grammar, and of those in
        flight, in tokens."""
        pace = self._engine.pace
        pair_tokens = pace.model.pair_tokens if pace else 0.0
        queued = self._engine.scheduler.queued_work(pair_tokens)
        queued += pace.in_flight.prompt_work(pair_tokens) if pace else 0.0
        queued += self._fetch.queued_work(pair_tokens) if self._fetch else 0.0
        queued += self._pool.queued_work(pair_tokens) if self._pool else 0.0
        queued += self._grammars.queued_work(pair_tokens)
        return round(queued)

    @property
    def _num_waiting(self) -> int:
        waiting = len(self._engine.scheduler.waiting) + self._grammars.num_waiting
        waiting += self._fetch.num_waiting if self._fetch else 0
        return waiting + (self._pool.num_waiting if self._pool else 0)

    def _pace(self) -> PaceState | None:
        engine = self._engine
        if engine.pace is None:
            return None
        return pace_state(engine.pace, engine.scheduler.running, len(engine.homes))

    def load_change(self, now: float, read_at: float) -> Load | None:
        """Returns what routers should hear before the next Snapshot, or None. `read_at`: see
        `snapshot`.

        That is a load that differs much from what they know, of an engine with a pace.
        """
        if self._engine.pace is None or not self._report.is_due(now):
            return None
        scheduler = self._engine.scheduler
        load = Load(
            queue_tokens=self._queue_tokens,
            num_running=len(scheduler.running),
            num_waiting=self._num_waiting,
            pace=self._pace(),
            unread_s=now - read_at,
        )
        if not self._report.has_changed(load):
            return None
        self._report.told(load.queue_tokens, load.num_running)
        return load


def _prompt_part(result: StepResult) -> tuple[int, int]:
    """Returns rows and sequences of the home that computed the most prompt tokens.

    One home's speed is measured, because a prompt is computed in one home.
    """
    return result.busiest.num_rows, result.busiest.num_sequences
