"""State of one worker as the router knows it, and of one leg: a Submit that the worker has, with
the inbox of its events.

Small parts keep some of the state (`prefix_index`, `prompt_queue`, `stall_budget`).
`router.fleet.intake` fills in what the worker reports, and `router.choosing.choose` what is sent to
it. `predict`, `choose` and `peers` read it.
"""

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field

import msgspec

from pdserve.protocol.events import ExpertCounts, Hello, Load, PaceState, PeerStatus, Snapshot
from pdserve.protocol.handoff import KVCacheMeta
from pdserve.protocol.request_key import LegName, RequestKey
from pdserve.router.fleet.inbox import Inbox
from pdserve.router.fleet.link import WorkerLink
from pdserve.router.fleet.prefix_index import CachedBlocks, PooledChunks
from pdserve.router.fleet.prompt_queue import PromptQueue
from pdserve.router.fleet.stall_budget import StallBudget

LEARNING = 0.05
LEAST_FACTOR = 0.75


@dataclass(slots=True, eq=False)
class Leg:
    """One Submit at one worker."""

    key: RequestKey
    worker: "WorkerState"
    inbox: "Inbox[Leg]"
    # Its weight in the worker's load.
    tokens: int
    # Choices that the worker still works on.
    pending: set[int]
    # Monotonic seconds of its Submit, its last event, or the worker's last report that it waits.
    last_sign: float
    handed_off: bool = False
    # True if only a Prepare was sent yet.
    prepared: bool = False


class Earliness:
    """A factor by which `router.admission` shortens the forecasts of first tokens at one worker
    while it decodes, at most 1.

    It follows the median of the time that they really take, relative to the forecast. A worker that
    decodes tells what its decodes leave of each step in the long run. Its streams may save time
    meanwhile, and short ones end, so a long prompt comes sooner. First tokens that come late are
    left to the caution.
    """

    def __init__(self) -> None:
        self.factor = 1.0

    def learn(self, forecast_ms: float, took_ms: float) -> None:
        """Takes in a first token. The factor may have changed since its forecast was made, so the
        present one decides."""
        is_late = took_ms > self.factor * forecast_ms
        self.factor *= 1 + LEARNING * (0.5 if is_late else -0.5)
        self.factor = min(max(self.factor, LEAST_FACTOR), 1.0)


@dataclass(slots=True, eq=False)
class WorkerState:
    """A worker that has said Hello on its current stream. Times are monotonic seconds."""

    link: WorkerLink
    session: int
    hello: Hello
    incarnation: int
    # Time of its last message.
    last_seen: float
    snapshot: Snapshot | None = None
    # Time of its last Snapshot.
    reported_at: float = -math.inf
    # By engine id and incarnation.
    peers: dict[tuple[str, int], PeerStatus] = field(default_factory=dict)
    legs: dict[LegName, Leg] = field(default_factory=dict)
    # Weight of this router's legs there.
    outstanding_tokens: int = 0
    # Requests of this router that a P computes and will hand to this worker.
    num_expected: int = 0
    # Time when it left the running set; None while it is in it.
    left_at: float | None = None
    # Contents of its prefix cache.
    cached: CachedBlocks = field(default_factory=CachedBlocks)
    # Contents of the KV pool that it uses.
    pooled: PooledChunks | None = None
    # Work of the prompts that wait there.
    queue: PromptQueue = field(default_factory=PromptQueue)
    # By how much its first tokens come sooner than forecast.
    earliness: Earliness = field(default_factory=Earliness)
    # Sequences of other routers there, as of its last report.
    num_others: int = 0
    # Time that whole prompts took from its decodes.
    stalls: StallBudget = field(default_factory=StallBudget)
    # Bytes of prefixes that this router has other workers fetch from it.
    lending: PromptQueue = field(default_factory=PromptQueue)
    # Its last reported pace; None: it has none, and `stalls` counts instead.
    pace: PaceState | None = None
    # Running sequences in its last report.
    num_running_told: int = 0
    # The part of a decode step that no stream adds, as last reported while it decoded.
    fixed_step_ms: float = 0.0
    # For each AskExpertLoad of this router that it has not answered, in order.
    load_questions: deque[asyncio.Future[ExpertCounts]] = field(default_factory=deque)

    def told(self, load: Snapshot | Load, now: float) -> None:
        """Takes in the worker's report of its load."""
        self.queue.reported(load.queue_tokens, now, load.unread_s)
        self.num_others = max(0, load.num_running + load.num_waiting - self._num_own)
        self.num_running_told = load.num_running
        self.pace = load.pace
        if self.pace_decodes and load.pace is not None:
            own = load.pace.row_ms * load.num_running
            self.fixed_step_ms = max(0.0, load.pace.base_step_ms - own)

    def met(self, status: PeerStatus) -> None:
        """Takes in the worker's report of a link. The rate of one that is closed is kept."""
        key = status.engine_id, status.incarnation
        known = self.peers.get(key)
        if known is not None and not status.bytes_per_s:
            status = msgspec.structs.replace(status, bytes_per_s=known.bytes_per_s)
        self.peers[key] = status

    @property
    def worker_id(self) -> str:
        return self.link.worker_id

    @property
    def draining(self) -> bool:
        """True if the worker gets no new work."""
        return self.left_at is not None

    @property
    def role(self) -> str:
        """The role in the newest report, as workers may change their role."""
        return self.snapshot.role if self.snapshot is not None else self.hello.role

    @property
    def kv_cache(self) -> KVCacheMeta | None:
        return self.hello.kv_cache

    @property
    def hands_over(self) -> bool:
        """True if the phases of a request may be here and at another worker."""
        return self.kv_cache is not None and self.hello.hands_over

    @property
    def can_prefill(self) -> bool:
        return self.role in ("prefill", "both") and self.hands_over

    @property
    def can_decode(self) -> bool:
        return self.role in ("decode", "both")

    @property
    def enforces_grammars(self) -> bool:
        return bool(self.hello.grammar_engine)

    @property
    def num_homes(self) -> int:
        """Number of its KV caches; a request lives in one of them."""
        return max(1, len(self.snapshot.homes)) if self.snapshot is not None else 1

    @property
    def free_blocks(self) -> int:
        """Number of free blocks in the home that has most, because a prompt must fit in one home.

        It is 0 before the first Snapshot.
        """
        if self.snapshot is None:
            return 0
        homes = self.snapshot.homes
        return max(home.free_blocks for home in homes) if homes else self.snapshot.free_blocks

    @property
    def num_decodes(self) -> int:
        """Number of sequences that it decodes or soon will: about one per leg."""
        return len(self.legs) + self.num_others

    @property
    def num_present(self) -> int:
        """Number of sequences that it decodes or whose prompts it computes. Those that a prefill
        worker still computes are not there yet."""
        return self.num_others + self._num_own

    @property
    def _num_own(self) -> int:
        """Number of this router's legs there, without those that were only prepared: the worker
        counts them neither as running nor as waiting."""
        return sum(not leg.prepared for leg in self.legs.values())

    @property
    def num_coming_decodes(self) -> int:
        """How many more sequences it will soon decode than at its last report; may be negative.

        These are prompts that wait there, announced ones, and what was sent since. A prefill
        worker's legs are nearly all prompts, so none are expected there.
        """
        return 0 if self.role == "prefill" else self.num_decodes - self.num_running_told

    @property
    def pace_decodes(self) -> bool:
        """True if it was decoding when it last reported its pace."""
        return self.pace is not None and self.pace.base_step_ms > 0

    @property
    def token_limit(self) -> int:
        """Prompt and generated tokens of the largest request that can fit here."""
        return min(self.hello.max_model_len, self.hello.max_request_tokens)

    def peer_status(self, prefill: "WorkerState") -> PeerStatus | None:
        """Returns the status of its connection to `prefill`; None if it is not connected."""
        status = self._last_status(prefill)
        return status if status is not None and status.connected else None

    def is_connected_to(self, prefill: "WorkerState") -> bool:
        return self.peer_status(prefill) is not None

    def link_rate(self, other: "WorkerState") -> float:
        """Returns the bytes per second of its link to `other`, open or not, as last measured; 0 if
        it never was."""
        status = self._last_status(other)
        return status.bytes_per_s if status is not None else 0.0

    def _last_status(self, other: "WorkerState") -> PeerStatus | None:
        meta = other.kv_cache
        return self.peers.get((meta.engine_id, meta.incarnation)) if meta is not None else None
