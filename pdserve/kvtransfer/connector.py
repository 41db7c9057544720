"""The KV connector interface: a sender (P's side), a receiver (D's side) and the KV pool. They are
separate, with few methods each.

All three are called from the engine loop's thread and never block it. Work happens on the
connector's own threads, and results come back through `poll()`. `wake()`, given at construction, is
called from any thread when `poll()` has something. A connector moves bytes and checks them. It does
not know requests' tokens, the prefix cache, or who runs next. `p2p/` implements sender and receiver
over a transport, `pool/` the KV pool over a server. Nothing here names one.

    pull:      BEGUN -follows parts, reads and verifies them- COMPLETED
                                                   -> PullDone | PullFailed(settled=True)
               deadline, cancel or loss while bytes may still land:
                   PullFailed(settled=False) ... -> PullSettled

    retrieve:  waiting -> copying -> PoolDone | PoolFailed(settled=True)
               deadline or cancel while rows are being copied:
                   PoolFailed(settled=False) ... -> PoolSettled
    store:     waiting -> copying -> PoolStored | PoolFailed, as above

A prefix may be cached at a peer without a ticket that keeps it. The receiver asks for it first:

    ask:       asked -> Lent, whose ticket pins nothing -> pull, as above, in pieces
               no answer: the caller's deadline

After PullFailed(settled=False) the destination blocks that are not verified stay quarantined until
PullSettled.

Any error of the KV pool is a miss for the request. Only our own threads copy between KV blocks and
memory shared with the server. So blocks are touched exactly while such a copy runs (a chunk at a
time), even if the server is slow, frozen or dead. An operation that ends while it waits for the
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
    """The memory that a connector registers."""

    kv_cache: KVCache  # allocated once and never moved
    # int64 [homes, num_blocks] in host memory. Block managers increase an entry before its block is
    # reused. None on ranks other than 0, because nobody reads it there.
    generations: np.ndarray | None
    model_fingerprint: str  # see BlockHasher
    rows_digest: str  # see BlockHasher
    home: int = 0  # the home whose blocks kv_cache holds; rank 0's is 0
    # For a KV cache in e4m3: the rows_digest of the same model's rows in its own dtype, and that
    # dtype. Such rows can be rounded to ours on their way. Otherwise empty.
    unrounded: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Unpinned:
    """The sender no longer needs a ticket's blocks pinned. outcome: "done": D has them; "rejected":
    D will not come; "expired": the lease ended."""

    key: RequestKey
    outcome: Outcome


@dataclass(frozen=True)
class PullDone:
    """Every byte has arrived, and every generation still matched after the last byte."""

    pull_id: int
    num_bytes: int
    num_descriptors: int
    transport: str
    seconds: float  # from the moment when the prompt was complete
    num_early_bytes: int  # bytes that were verified before the prompt was complete
    read_s: float  # seconds in which reads were under way
    # When the last piece was verified, in seconds since the epoch; it may be before the prompt was
    # complete.
    ended_at: float


@dataclass(frozen=True)
class PullFailed:
    """A pull has failed."""

    pull_id: int
    # "stale-generation", "stale-incarnation", "peer-lost", "not-connected", "deadline",
    # "cancelled" or "error"
    reason: str
    detail: str
    # False: bytes may still land in the destination blocks, until the one PullSettled with the same
    # pull_id. The first num_verified blocks are safe.
    settled: bool
    num_verified: int = 0  # first destination blocks that hold what was published and may be used
    was_complete: bool = True  # `complete` had been called before


@dataclass(frozen=True)
class PullSettled:
    pull_id: int


@dataclass(frozen=True)
class Lent:
    """The answer to `KVReceiver.ask`. ticket: unpinned, for the longest prefix that the peer holds,
    which may have no blocks."""

    pull_id: int
    ticket: Ticket


ReceiverEvent = PullDone | PullFailed | PullSettled | Lent | PeerStatus

FindWritten = Callable[[Sequence[bytes]], tuple[int, Sequence[tuple[int, int]]]]
"""Finds written blocks by digests, given in order. Returns the home with the longest written prefix
of them, and (block, generation) for each of its blocks. The generation is that of the time of
writing. Called from any thread."""


class KVSender(Protocol):
    """Publishes blocks that peers may read."""

    def meta(self) -> KVCacheMeta:
        """The description that a receiver needs to connect."""
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
        """Make a ticket for a whole prompt's blocks. All rows must be written (the caller has
        waited for the device), and the caller must own the blocks, so that their generations stand
        still. It keeps them pinned until `poll` returns Unpinned for the key, or it calls `revoke`.
        content: digest of the rows' content, `protocol.block_digests.BlockHasher.content`.
        written_at (None: now), home: see Ticket."""
        ...

    def publish_part(
        self,
        key: RequestKey,
        block_ids: Sequence[int],
        content: bytes,
        written_at: float | None = None,
        home: int = 0,
    ) -> None:
        """Report to followers of the prompt that its first blocks are completely written.
        block_ids: all of these blocks. They need not stay the prompt's, because the report includes
        their present generations.
        """
        ...

    def revoke(self, key: RequestKey) -> None:
        """Forget the ticket, or the parts; no Unpinned follows. This is safe at any time: the peer
        only reads, and its generation check catches reuse."""
        ...

    def lend(self, find: FindWritten) -> None:
        """From now on, peers may ask for what `find` finds. They get tickets that pin nothing."""
        ...

    def poll(self) -> list[Unpinned]: ...

    def close(self) -> None: ...


class KVReceiver(Protocol):
    """Pulls published blocks into local blocks."""

    def connect(self, meta: KVCacheMeta) -> None:
        """Connect (or reconnect) and run the timed self-test in the background; `poll` returns a
        PeerStatus. Idempotent. An older incarnation of the same engine_id is dropped. If a newer
        one is connected already, the call is ignored."""
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
        """Begin a pull of a prompt that is still being computed. It reads what P has published of
        it, as it comes. PullFailed may come at any time, PullDone only after `complete`.

        - pull_id: the caller's counter, never used twice; all events of this pull carry it.
        - content: other content is not read.
        - local_blocks: blocks of our home `home`, for the prompt's blocks (of our size) from `skip`
          on.
        - deadline_s: for each read, however long P computes.
        """
        ...

    def complete(self, pull_id: int, ticket: Ticket, deadline_s: float) -> None:
        """The whole prompt is published: read what is missing. No effect if the pull has failed
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
        """Read the ticket's rows into `local_blocks` of our home `home`. They are for all of the
        prompt's blocks (of our size) from `skip` on. There may be none; then the pull only reports
        to the sender. Exactly one PullDone or PullFailed comes."""
        ...

    def ask(self, pull_id: int, engine_id: str, incarnation: int, digests: Sequence[bytes]) -> None:
        """Ask a connected peer which of these blocks it has in its prefix cache, in its block size
        and from the first on. Lent comes, or nothing. `pull` may then use the same pull_id. If the
        pull of such a ticket fails, what all ranks have verified is kept."""
        ...

    def renew(self, tickets: Sequence[Ticket]) -> None:
        """Tell the senders that these tickets are still wanted (best effort)."""
        ...

    def reject(self, ticket: Ticket) -> None:
        """Tell the sender that nobody will pull this ticket (best effort)."""
        ...

    def cancel(self, pull_id: int) -> None:
        """End a pull early. The usual PullFailed("cancelled", ...) follows, unless its end was
        already reported."""
        ...

    def poll(self) -> list[ReceiverEvent]: ...

    def close(self) -> None: ...


StillValid = Callable[[], bool]


@dataclass(frozen=True)
class PoolDone:
    """The rows of tokens [skip_tokens, num_tokens) are in the local blocks. num_tokens may be less
    than was asked for."""

    op_id: int
    num_tokens: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class PoolStored:
    """The first num_tokens tokens were offered, and num_bytes were copied. That is 0 if the pool
    already has them, or has no room."""

    op_id: int
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True)
class PoolFailed:
    """An operation of the pool has failed. `reason` is one of:

    - "miss", "deadline", "not-connected", "breaker-open", "refused", "wrong-content", "cancelled",
      "closed", "timeout", "error"
    - "loading": found, but not in memory in time; the caller may ask again later.
    - "reused": a source block got another owner.
    """

    op_id: int
    reason: str
    detail: str
    settled: bool  # False: our blocks are still being copied, until the one PoolSettled for op_id


@dataclass(frozen=True)
class PoolSettled:
    op_id: int


PoolEvent = PoolDone | PoolStored | PoolFailed | PoolSettled


class KVPool(Protocol):
    """Keeps rows in a server that engines share. op_id: the caller's counter, never used twice; all
    events of an operation carry it. home: the home whose blocks an operation uses. Every home finds
    what another one has stored."""

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
        """Copy rows that the pool has, from token `skip_tokens` on (whole blocks), into
        `local_blocks`, which are for the tokens from skip_tokens on. One PoolDone or PoolFailed
        follows within deadline_s. ValueError if the arguments do not fit together (PoolFailed in a
        home where rank 0 has no part)."""
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
        (the block of token 0 first).

        False means refused (cap, breaker, no server, nothing whole); then no event follows.
        Otherwise one PoolStored or PoolFailed follows ("refused" if a rank other than 0 refuses).

        still_valid: called from a thread of the pool, after rows were copied and before they can be
        found; see `unchanged`."""
        ...

    def cancel(self, op_id: int) -> None:
        """End an operation early with PoolFailed("cancelled"), unless it has ended."""
        ...

    def poll(self) -> list[PoolEvent]: ...

    def close(self) -> None: ...


def unchanged(generations: np.ndarray, block_ids: Sequence[int]) -> StillValid:
    """Make a `still_valid` for the generation table of a home, int64 `[num_blocks]`. It is True
    while no block has got a new owner since this call."""
    ids = np.asarray(block_ids, np.int64)
    before = generations[ids]
    return lambda: bool(np.array_equal(generations[ids], before))
