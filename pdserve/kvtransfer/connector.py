"""The KV connector interface: a sender (P's side), a receiver (D's side) and the KV pool, apart,
with few methods each.

All three are driven from the engine loop's thread and never block it: work happens on the
connector's own threads, results come back through `poll()`, and `wake()` (given at construction) is
called from any thread when `poll()` has something. A connector moves bytes and checks what they
are; it does not know requests' tokens, the prefix cache, or who runs next. `p2p/` implements sender
and receiver over a transport, `pool/` the KV pool over a server; nothing here names one.

    pull:      BEGUN -follows parts, reads and verifies them- COMPLETED
                                                   -> PullDone | PullFailed(settled=True)
               deadline, cancel or loss while bytes may still land:
                   PullFailed(settled=False) ... -> PullSettled

    retrieve:  waiting -> copying -> PoolDone | PoolFailed(settled=True)
               deadline or cancel while rows are being copied:
                   PoolFailed(settled=False) ... -> PoolSettled
    store:     waiting -> copying -> PoolStored | PoolFailed, as above

A prefix that a peer has cached, for which nobody keeps a ticket, is asked for first:

    ask:       asked -> Lent, whose ticket pins nothing -> pull, as above, in pieces
               no answer: the caller's deadline

After PullFailed(settled=False) the destination blocks that are not verified stay quarantined until
PullSettled.

Any error of the KV pool is a miss for the request. Only our own threads copy, between KV blocks and
memory shared with the server. So blocks are touched exactly while such a copy runs (a chunk at a
time), however long the server takes, frozen or dead: an operation that ends while it waits for the
server has settled at once. Destinations of a retrieve stay quarantined, and sources of a store stay
owned, until an event with settled=True or PoolSettled.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from pdserve.engine.memory.kv_cache import KVCache
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import KVCacheMeta, Source, Ticket
from pdserve.protocol.request_key import RequestKey

Wake = Callable[[], None]
Outcome = Literal["done", "rejected", "expired"]


@dataclass(frozen=True)
class KVCacheMemory:
    """The memory a connector registers. kv_cache: allocated once and never moved. generations:
    int64 `[homes, num_blocks]` in host memory, bumped by the block managers before a block is
    reused; None on other ranks than 0, where nobody reads it. model_fingerprint, rows_digest: see
    BlockHasher. home: the home whose blocks kv_cache holds; rank 0's is 0. unrounded: of a KV cache
    in e4m3, the rows_digest of the same model's rows in its own dtype, which can be rounded to ours
    on their way, and that dtype; else empty."""

    kv_cache: KVCache
    generations: np.ndarray | None
    model_fingerprint: str
    rows_digest: str
    home: int = 0
    unrounded: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Unpinned:
    """The sender no longer needs a ticket's blocks pinned. "done": D has them; "rejected": D will
    not come; "expired"."""

    key: RequestKey
    outcome: Outcome


@dataclass(frozen=True)
class PullDone:
    """Every byte arrived and every generation still matched after the last byte. num_early_bytes:
    what was verified before the prompt was complete; seconds: from there on. read_s: how long reads
    were under way. ended_at: when the last piece was verified, which may be before that, in seconds
    since the epoch.
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
    """reason: "stale-generation", "stale-incarnation", "peer-lost", "not-connected", "deadline",
    "cancelled", "error". settled False: bytes may still land in the destination blocks until the
    one PullSettled comes for the same pull_id; not in the first num_verified of them, which hold
    what was published and may be used. was_complete: `complete` had come before.
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


@dataclass(frozen=True)
class Lent:
    """The answer to `KVReceiver.ask`. ticket: for the longest prefix that the peer holds, maybe of
    no blocks; unpinned."""

    pull_id: int
    ticket: Ticket


ReceiverEvent = PullDone | PullFailed | PullSettled | Lent | PeerStatus

FindWritten = Callable[[Sequence[bytes]], tuple[int, Sequence[tuple[int, int]]]]
"""Given digests of blocks, in order: the home with the longest written prefix of them, and (block,
generation) of each of its blocks, as of the time when it was written. Called from any thread."""


class KVSender(Protocol):
    """Publishes blocks that peers may read."""

    def meta(self) -> KVCacheMeta:
        """What a receiver needs to connect."""
        ...

    def publish(
        self,
        key: RequestKey,
        block_ids: Sequence[int],
        num_tokens: int,
        content: bytes,
        written_at: float | None = None,
        home: int = 0,
    ) -> Ticket:
        """A ticket for a whole prompt's blocks, whose rows are completely written (the caller has
        waited for the device) and which the caller owns, so their generations stand still. It keeps
        them pinned until `poll` returns Unpinned for the key, or it calls `revoke`. content:
        `protocol.block_digests.BlockHasher.content` of what the rows hold. written_at (None: now),
        home: see Ticket."""
        ...

    def publish_part(
        self,
        key: RequestKey,
        block_ids: Sequence[int],
        content: bytes,
        written_at: float | None = None,
        home: int = 0,
    ) -> None:
        """Tell those who follow the prompt that its first blocks, of which these are all, are
        completely written. They need not stay the prompt's: the generations of this moment are part
        of what is told.
        """
        ...

    def revoke(self, key: RequestKey) -> None:
        """Forget the ticket, or the parts; no Unpinned follows. Safe at once: the peer only reads,
        and its generation check catches reuse."""
        ...

    def lend(self, find: FindWritten) -> None:
        """From now on peers may ask for what `find` finds. They get tickets that pin nothing."""
        ...

    def poll(self) -> list[Unpinned]: ...

    def close(self) -> None: ...


class KVReceiver(Protocol):
    """Pulls published blocks into local ones."""

    def connect(self, meta: KVCacheMeta) -> None:
        """Connect (again) and run the timed self-test in the background; `poll` returns a
        PeerStatus. Idempotent. An older incarnation of the same engine_id is dropped; an older one
        than the connected is ignored."""
        ...

    def disconnect(self, engine_id: str, incarnation: int) -> None: ...

    def follow(
        self,
        pull_id: int,
        source: Source,
        content: bytes,
        local_blocks: Sequence[int],
        skip: int,
        deadline_s: float,
        home: int = 0,
    ) -> None:
        """Begin a pull of a prompt that is being computed: read what P has published of it, as it
        comes, into `local_blocks` of our home `home`, which are for the prompt's blocks (of our
        size) from `skip` on. Other content is not read. pull_id: the caller's own counter, never
        used twice; all events of this pull carry it. deadline_s: of each read, however long P
        computes. PullFailed may come at any time, PullDone only after `complete`.
        """
        ...

    def complete(self, pull_id: int, ticket: Ticket, deadline_s: float) -> None:
        """The whole prompt is published: read what is missing. No effect when the pull has failed
        meanwhile."""
        ...

    def pull(
        self,
        pull_id: int,
        ticket: Ticket,
        local_blocks: Sequence[int],
        skip: int,
        deadline_s: float,
        home: int = 0,
    ) -> None:
        """Read the ticket's rows into `local_blocks` of our home `home`, which are for all of the
        prompt's blocks (of our size) from `skip` on (may be none: then only the sender is told).
        Exactly one PullDone or PullFailed comes."""
        ...

    def ask(self, pull_id: int, engine_id: str, incarnation: int, digests: Sequence[bytes]) -> None:
        """Ask a connected peer which of these blocks, of its size and from the first on, it has in
        its prefix cache. Lent comes, or nothing; `pull` may then use the same pull_id. Of the pull
        of such a ticket, on any failure, what all ranks have verified is kept."""
        ...

    def renew(self, tickets: Sequence[Ticket]) -> None:
        """Tell the senders that these are still wanted (best effort)."""
        ...

    def reject(self, ticket: Ticket) -> None:
        """Tell the sender that nobody will pull this ticket (best effort)."""
        ...

    def cancel(self, pull_id: int) -> None:
        """End a pull early; the usual PullFailed("cancelled", ...) follows unless it was already
        reported."""
        ...

    def poll(self) -> list[ReceiverEvent]: ...

    def close(self) -> None: ...


StillValid = Callable[[], bool]


@dataclass(frozen=True)
class PoolDone:
    """The rows of tokens [skip_tokens, num_tokens) are in the local blocks; num_tokens may be less
    than was asked."""

    op_id: int
    num_tokens: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class PoolStored:
    """The first num_tokens tokens were offered; num_bytes were copied (0 when the pool has them, or
    has no room)."""

    op_id: int
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True)
class PoolFailed:
    """reason: "miss", "loading" (found, but not in memory in time: ask again later), "deadline",
    "not-connected", "breaker-open", "refused", "wrong-content", "reused" (a source block got
    another owner), "cancelled", "closed", "timeout", "error". settled False: our blocks are still
    being copied until the one PoolSettled of the same op_id."""

    op_id: int
    reason: str
    detail: str
    settled: bool


@dataclass(frozen=True)
class PoolSettled:
    op_id: int


PoolEvent = PoolDone | PoolStored | PoolFailed | PoolSettled


class KVPool(Protocol):
    """op_id: the caller's own counter, never used twice; all events of an operation carry it. home:
    the home whose blocks an operation is about; every home finds what another one has stored."""

    chunk_tokens: int

    @property
    def available(self) -> bool:
        """False while asking is known to be useless: not connected, or the breaker is open."""
        ...

    def retrieve(
        self,
        op_id: int,
        token_ids: Sequence[int],
        salt: str,
        skip_tokens: int,
        local_blocks: Sequence[int],
        deadline_s: float,
        home: int = 0,
    ) -> None:
        """Copy what the pool has of the rows behind the first `skip_tokens` (whole blocks) into
        `local_blocks`, which belong to the tokens from skip_tokens on. One PoolDone or PoolFailed
        follows within deadline_s. ValueError when the arguments do not fit together (PoolFailed
        where rank 0 has no part in the home)."""
        ...

    def store(
        self,
        op_id: int,
        token_ids: Sequence[int],
        salt: str,
        block_ids: Sequence[int],
        still_valid: StillValid,
        home: int = 0,
    ) -> bool:
        """Keep the whole chunks of `token_ids`, whose rows are completely written in `block_ids`
        (the block of token 0 first). False: refused (cap, breaker, no server, nothing whole), no
        event follows. Else one PoolStored or PoolFailed ("refused" by another rank than 0).
        still_valid: asked from a thread of the pool, after rows were copied and before they can be
        found; see `unchanged`."""
        ...

    def cancel(self, op_id: int) -> None:
        """End an operation early: PoolFailed("cancelled"), unless it has ended."""
        ...

    def poll(self) -> list[PoolEvent]: ...

    def close(self) -> None: ...


def unchanged(generations: np.ndarray, block_ids: Sequence[int]) -> StillValid:
    """A `still_valid` for the generation table of a home, int64 `[num_blocks]`: whether no block
    has got a new owner since now."""
    ids = np.asarray(block_ids, np.int64)
    before = generations[ids]
    return lambda: bool(np.array_equal(generations[ids], before))
