"""The KV connector interface: a sender (P's side) and a receiver (D's side), apart, with few methods each.

Both are driven from the engine loop's thread and never block it: work happens on the connector's own threads, results
come back through `poll()`, and `wake()` (given at construction) is called from any thread when `poll()` has
something. A connector moves bytes and checks generations; it does not know requests' tokens, the prefix cache, or who
runs next.

    pull:  BEGUN -follows parts, reads and verifies them- COMPLETED -> PullDone | PullFailed(settled=True)
           deadline, cancel or loss while bytes may still land: PullFailed(settled=False) ... -> PullSettled
    After PullFailed(settled=False) the destination blocks that are not verified stay quarantined until PullSettled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from pdserve.configs.kv_layout import KVLayout
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import PoolMeta, Source, Ticket
from pdserve.protocol.request_key import RequestKey

Wake = Callable[[], None]
Outcome = Literal["done", "rejected", "expired"]


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
    outcome: Outcome


@dataclass(frozen=True)
class PullDone:
    """Every byte arrived and every generation still matched after the last byte. num_early_bytes: what was verified
    before the prompt was complete; seconds: from there on. read_s: how long
    reads were under way. ended_at: when the last piece was verified, which may be
    before that, in seconds since the epoch.
    """

    pull_id: int
    num_bytes: int
    num_descriptors: int
    transport: str
    seconds: float
    num_early_bytes: int
    read_s: float
    ended_at: float


@dataclass(frozen=True)
class PullFailed:
    """reason: "stale-generation", "stale-incarnation", "peer-lost", "not-connected", "deadline", "cancelled", "error".
    settled False: bytes may still land in the destination blocks until the one PullSettled comes for the same pull_id;
    not in the first num_verified of them, which hold what was published and may be used. was_complete: `complete` had
    come before.
    """

    pull_id: int
    reason: str
    detail: str
    settled: bool
    num_verified: int = 0
    was_complete: bool = True


@dataclass(frozen=True)
class PullSettled:
    pull_id: int


ReceiverEvent = PullDone | PullFailed | PullSettled | PeerStatus


class KVSender(Protocol):
    """Publishes blocks that peers may read."""

    def meta(self) -> PoolMeta:
        """What a receiver needs to connect."""
        ...

    def publish(
        self,
        key: RequestKey,
        block_ids: Sequence[int],
        num_tokens: int,
        content: bytes,
        written_at: float | None = None,
    ) -> Ticket:
        """A ticket for a whole prompt's blocks, whose rows are completely written (the caller has waited for the
        device) and which the caller owns, so their generations stand still. It keeps them pinned until `poll` returns
        Unpinned for the key, or it calls `revoke`. content: `protocol.block_digests.BlockHasher.content` of what the
        rows hold. written_at: see Ticket; None: now."""
        ...

    def publish_part(
        self, key: RequestKey, block_ids: Sequence[int], content: bytes, written_at: float | None = None
    ) -> None:
        """Tell those who follow the prompt that its first blocks, of which these are all, are completely written. They
        need not stay the prompt's: the generations of this moment are part of what is told.
        """
        ...

    def revoke(self, key: RequestKey) -> None:
        """Forget the ticket, or the parts; no Unpinned follows. Safe at once: the peer only reads, and its generation
        check catches reuse."""
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

    def follow(
        self, pull_id: int, source: Source, content: bytes, local_blocks: Sequence[int], skip: int, deadline_s: float
    ) -> None:
        """Begin a pull of a prompt that is being computed: read what P has published of it, as it comes, into
        `local_blocks`, which are for the prompt's blocks (of our size) from `skip` on. Other content is not read.
        pull_id: the caller's own counter, never used twice; all events of this pull carry it. deadline_s: of each read,
        however long P computes. PullFailed may come at any time, PullDone only after `complete`.
        """
        ...

    def complete(self, pull_id: int, ticket: Ticket, deadline_s: float) -> None:
        """The whole prompt is published: read what is missing. No effect when the pull has failed meanwhile."""
        ...

    def pull(self, pull_id: int, ticket: Ticket, local_blocks: Sequence[int], skip: int, deadline_s: float) -> None:
        """Read the ticket's rows into `local_blocks`, which are for all of the prompt's blocks (of our size) from
        `skip` on (may be none: then only the sender is told). Exactly one PullDone or PullFailed comes."""
        ...

    def renew(self, tickets: Sequence[Ticket]) -> None:
        """Tell the senders that these are still wanted (best effort)."""
        ...

    def reject(self, ticket: Ticket) -> None:
        """Tell the sender that nobody will pull this ticket (best effort)."""
        ...

    def cancel(self, pull_id: int) -> None:
        """End a pull early; the usual PullFailed("cancelled", ...) follows unless it was already reported."""
        ...

    def poll(self) -> list[ReceiverEvent]: ...

    def close(self) -> None: ...
