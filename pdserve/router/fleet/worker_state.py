"""What the router knows of one worker, and one leg: a Submit that the worker has, and the inbox of
its events.

State, and the small parts that keep some of it (`prefix_index`, `prompt_queue`, `stall_budget`):
`router.fleet.intake` fills it with what the worker says, `router.choosing.choose` with what is sent
there; `predict`, `choose` and `peers` read it.
"""

import math
from dataclasses import dataclass, field

from pdserve.protocol.events import Hello, Load, PaceState, PeerStatus, Snapshot
from pdserve.protocol.handoff import KVCacheMeta
from pdserve.protocol.request_key import RequestKey
from pdserve.router.fleet.inbox import Inbox
from pdserve.router.fleet.link import WorkerLink
from pdserve.router.fleet.prefix_index import CachedBlocks, PooledChunks
from pdserve.router.fleet.prompt_queue import PromptQueue
from pdserve.router.fleet.stall_budget import StallBudget


@dataclass(slots=True, eq=False)
class Leg:
    """One Submit at one worker. tokens: its weight in the worker's load. pending: choices the
    worker still works on. last_sign: monotonic seconds of its Submit, its last event, or the
    worker's last word that it waits. prepared: only announced yet.
    """

    key: RequestKey
    worker: "WorkerState"
    inbox: "Inbox[Leg]"
    tokens: int
    pending: set[int]
    last_sign: float
    handed_off: bool = False
    prepared: bool = False


@dataclass(slots=True, eq=False)
class WorkerState:
    """A worker that has said Hello on its current stream. peers: by (engine id, incarnation).
    outstanding_tokens: weight of this router's legs there. last_seen: monotonic seconds of its last
    message, reported_at: of its last Snapshot. cached: what its prefix cache holds. pooled: what
    the KV pool that it uses holds. queue: prompt tokens that wait there. num_others: sequences of
    other routers there, as of the last Snapshot. stalls: what whole prompts took from its decodes.
    num_expected: requests of this router that a P computes and hands to it. left_at: when it left
    the running set (monotonic seconds); None: it is in it. pace: as it last told; None: it has
    none, and `stalls` counts instead. num_running_told: sequences that ran when it told its load.
    fixed_step_ms: of its decode steps, the part that no stream adds, as last told while it
    decoded. lending: bytes of prefixes that this router has others fetch from it."""

    link: WorkerLink
    session: int
    hello: Hello
    incarnation: int
    last_seen: float
    snapshot: Snapshot | None = None
    reported_at: float = -math.inf
    peers: dict[tuple[str, int], PeerStatus] = field(default_factory=dict)
    legs: dict[tuple[str, int], Leg] = field(default_factory=dict)
    outstanding_tokens: int = 0
    num_expected: int = 0
    left_at: float | None = None
    cached: CachedBlocks = field(default_factory=CachedBlocks)
    pooled: PooledChunks | None = None
    queue: PromptQueue = field(default_factory=PromptQueue)
    num_others: int = 0
    stalls: StallBudget = field(default_factory=StallBudget)
    lending: PromptQueue = field(default_factory=PromptQueue)
    pace: PaceState | None = None
    num_running_told: int = 0
    fixed_step_ms: float = 0.0

    def told(self, load: Snapshot | Load, now: float) -> None:
        """What it has to do, as of now."""
        self.queue.reported(load.queue_tokens, now)
        self.num_others = max(0, load.num_running + load.num_waiting - len(self.legs))
        self.num_running_told = load.num_running
        self.pace = load.pace
        if self.pace_decodes and load.pace is not None:
            own = load.pace.row_ms * load.num_running
            self.fixed_step_ms = max(0.0, load.pace.base_step_ms - own)

    @property
    def worker_id(self) -> str:
        return self.link.worker_id

    @property
    def draining(self) -> bool:
        """It gets nothing new."""
        return self.left_at is not None

    @property
    def role(self) -> str:
        """Workers may change their role; the newest report counts."""
        return self.snapshot.role if self.snapshot is not None else self.hello.role

    @property
    def kv_cache(self) -> KVCacheMeta | None:
        return self.hello.kv_cache

    @property
    def can_prefill(self) -> bool:
        return self.role in ("prefill", "both") and self.kv_cache is not None

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
        """Of the home that has most: a prompt must fit in one. 0 before the first Snapshot."""
        if self.snapshot is None:
            return 0
        homes = self.snapshot.homes
        return max(home.free_blocks for home in homes) if homes else self.snapshot.free_blocks

    @property
    def num_decodes(self) -> int:
        """Sequences that it decodes, or soon will: about one a leg."""
        return len(self.legs) + self.num_others

    @property
    def num_coming_decodes(self) -> int:
        """How many more it will soon decode than when it told its load: prompts that wait there,
        announced ones, and what was sent since; fewer, if it is negative. A prefill worker's legs
        are prompts nearly all, so none come there."""
        return 0 if self.role == "prefill" else self.num_decodes - self.num_running_told

    @property
    def pace_decodes(self) -> bool:
        """Whether it decoded when it last told its pace."""
        return self.pace is not None and self.pace.base_step_ms > 0

    @property
    def token_limit(self) -> int:
        """Prompt and generated tokens of the largest request that can fit here."""
        return min(self.hello.max_model_len, self.hello.max_request_tokens)

    def peer_status(self, prefill: "WorkerState") -> PeerStatus | None:
        """What it last said of its connection, if there is one."""
        if prefill.kv_cache is None:
            return None
        status = self.peers.get((prefill.kv_cache.engine_id, prefill.kv_cache.incarnation))
        return status if status is not None and status.connected else None

    def is_connected_to(self, prefill: "WorkerState") -> bool:
        return self.peer_status(prefill) is not None
