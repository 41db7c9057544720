"""The KV connector interface: a sender (P's side) and a receiver (D's side), apart, with few methods each.

Both are driven from the engine loop's thread and never block it: work happens on the connector's own threads, results
come back through `poll()`, and `wake()` (given at construction) is called from any thread when `poll()` has
something. A connector moves bytes and checks generations; it does not know requests' tokens, the prefix cache, or who
runs next.

    pull:  POSTED -> VERIFYING -> PullDone | PullFailed(settled=True)
           deadline or cancel while bytes may still land: PullFailed(settled=False) ... -> PullSettled
    After PullFailed(settled=False) the destination blocks stay quarantined until PullSettled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from pdserve.configs.kv_layout import KVLayout
from pdserve.engine.protocol import PeerStatus, PoolMeta, RequestKey, Ticket

Wake = Callable[[], None]


@dataclass(frozen=True)
class PoolMemory:
    """The memory a connector registers. pool: contiguous `[num_blocks, *layout.block_shape]`, allocated once and never
    moved. generations: int64 `[num_blocks]` in host memory, bumped by the block manager before a block is reused."""

    pool: torch.Tensor
    generations: np.ndarray
    layout: KVLayout
    model_fingerprint: str


@dataclass(frozen=True)
class Unpinned:
    """The sender no longer needs a ticket's blocks pinned. "done": D has them; "rejected": D will not come;
    "expired"."""

    key: RequestKey
    outcome: Literal["done", "rejected", "expired"]


@dataclass(frozen=True)
class PullDone:
    """Every byte arrived and every generation still matched after the last byte."""

    pull_id: int
    num_bytes: int
    num_descriptors: int
    transport: str
    seconds: float


@dataclass(frozen=True)
class PullFailed:
    """reason: "stale-generation", "stale-incarnation", "peer-lost", "not-connected", "deadline", "cancelled", "error".
    settled False: bytes may still land in the destination blocks until the one PullSettled comes for the same
    pull_id."""

    pull_id: int
    reason: str
    detail: str
    settled: bool


@dataclass(frozen=True)
class PullSettled:
    pull_id: int


ReceiverEvent = PullDone | PullFailed | PullSettled | PeerStatus


class KVSender(Protocol):
    """Publishes blocks that peers may read."""

    def meta(self) -> PoolMeta:
        """What a receiver needs to connect."""
        ...

    def publish(self, key: RequestKey, block_ids: Sequence[int], num_tokens: int, content: bytes) -> Ticket:
        """A ticket for blocks whose rows are completely written (the caller has waited for the device) and which the
        caller owns, so their generations stand still. It keeps them pinned until `poll` returns Unpinned for the key,
        or it calls `revoke`. content: `engine.block_manager.BlockHasher.content` of what the rows hold."""
        ...

    def revoke(self, key: RequestKey) -> None:
        """Forget the ticket; no Unpinned follows. Safe at once: the peer only reads, and its generation check catches
        reuse."""
        ...

    def poll(self) -> list[Unpinned]: ...

    def close(self) -> None: ...


class KVReceiver(Protocol):
    """Pulls published blocks into local ones."""

    def connect(self, meta: PoolMeta) -> None:
        """Connect (again) and run the timed self-test in the background; `poll` returns a PeerStatus. Idempotent. An
        older incarnation of the same engine_id is dropped; an older one than the connected is ignored."""
        ...

    def disconnect(self, engine_id: str, incarnation: int) -> None: ...

    def pull(self, pull_id: int, ticket: Ticket, local_blocks: Sequence[int], skip: int, deadline_s: float) -> None:
        """Read `ticket.block_ids[skip:]` into `local_blocks` (same length; may be empty: then only the sender is told).
        pull_id: the caller's own counter, never used twice; all events of this pull carry it. Exactly one PullDone or
        PullFailed comes."""
        ...

    def reject(self, ticket: Ticket) -> None:
        """Tell the sender that nobody will pull this ticket (best effort)."""
        ...

    def cancel(self, pull_id: int) -> None:
        """End a pull early; the usual PullFailed("cancelled", ...) follows unless it was already reported."""
        ...

    def poll(self) -> list[ReceiverEvent]: ...

    def close(self) -> None: ...
