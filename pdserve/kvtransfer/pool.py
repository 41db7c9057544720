"""The pool connector: KV rows kept outside the engines, found again by their tokens. The interface.

Driven from the engine loop's thread and never blocks it, in the style of `connector.py`: all work happens on the pool's
own threads, results come through `poll()`, `wake()` is called from any thread when there is one. Any error is a miss
for the request. `pool_operations.Pool` implements it over a `PoolBackend` (`lmcache_pool.py`, `local_pool.py`); nothing
here names a server.

    lookup:    PoolFound(0 tokens on any error)
    retrieve:  waiting -> copying -> PoolDone | PoolFailed(settled=True)
               deadline or cancel while rows are being copied: PoolFailed(settled=False) ... -> PoolSettled
    store:     waiting -> copying -> PoolStored | PoolFailed, as above

Only our own threads copy, between KV blocks and memory shared with the server. So blocks are touched exactly while
such a copy runs (a chunk at a time), however long the server takes, frozen or dead: an operation that ends while it
waits for the server has settled at once. Destinations of a retrieve stay quarantined, and sources of a store stay
owned, until an event with settled=True or PoolSettled.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from pdserve.kvtransfer.chunks import Chunks, Prefix

StillValid = Callable[[], bool]


@dataclass(frozen=True)
class PoolFound:
    """The pool holds the rows of the first `num_tokens` tokens; nothing is reserved."""

    op_id: int
    num_tokens: int


@dataclass(frozen=True)
class PoolDone:
    """The rows of tokens [skip_tokens, num_tokens) are in the local blocks; num_tokens may be less than was asked."""

    op_id: int
    num_tokens: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class PoolStored:
    """The first num_tokens tokens were offered; num_bytes were copied (0 when the pool has them, or has no room)."""

    op_id: int
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True)
class PoolFailed:
    """reason: "miss", "loading" (found, but not in memory in time: ask again later), "deadline", "not-connected",
    "breaker-open", "wrong-content", "reused" (a source block got another owner), "cancelled", "closed", "timeout",
    "error". settled False: our blocks are still being copied until the one PoolSettled of the same op_id."""

    op_id: int
    reason: str
    detail: str
    settled: bool


@dataclass(frozen=True)
class PoolSettled:
    op_id: int


PoolEvent = PoolFound | PoolDone | PoolStored | PoolFailed | PoolSettled


class KVPool(Protocol):
    """op_id: the caller's own counter, never used twice; all events of an operation carry it."""

    chunk_tokens: int

    @property
    def available(self) -> bool:
        """False while asking is known to be useless: not connected, or the breaker is open."""
        ...

    def lookup(self, op_id: int, token_ids: Sequence[int], salt: str) -> None:
        """One PoolFound follows within the request deadline: how many tokens, in whole chunks, the pool holds."""
        ...

    def retrieve(
        self,
        op_id: int,
        token_ids: Sequence[int],
        salt: str,
        skip_tokens: int,
        local_blocks: Sequence[int],
        deadline_s: float,
    ) -> None:
        """Copy what the pool has of the rows behind the first `skip_tokens` (whole blocks) into `local_blocks`, which
        belong to the tokens from skip_tokens on. Needs no lookup before. One PoolDone or PoolFailed follows within
        deadline_s. ValueError when the arguments do not fit together."""
        ...

    def store(
        self, op_id: int, token_ids: Sequence[int], salt: str, block_ids: Sequence[int], still_valid: StillValid
    ) -> bool:
        """Keep the whole chunks of `token_ids`, whose rows are completely written in `block_ids` (the block of token 0
        first). False: refused (cap, breaker, no server, nothing whole), no event follows. Else one PoolStored or
        PoolFailed. still_valid: asked from a thread of the pool, after rows were copied and before they can be found;
        see `unchanged`."""
        ...

    def cancel(self, op_id: int) -> None:
        """End an operation early: PoolFailed("cancelled"), or PoolFound(0), unless it has ended."""
        ...

    def poll(self) -> list[PoolEvent]: ...

    def close(self) -> None: ...


class PoolError(Exception):
    """The backend could not answer. reason: as in PoolFailed."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Writing(Protocol):
    """Reserved memory for chunks that the pool lacks. slots: chunk index -> uint8 `[chunks.num_bytes]` on the host."""

    slots: dict[int, torch.Tensor]

    def commit(self) -> None:
        """From now on the chunks can be found. Without it they never are."""
        ...


class PoolBackend(Protocol):
    """Blocking calls; none waits for the server past `until` (time.monotonic()), all raise PoolError. Leaving a context
    gives back whatever the server holds for it; that may wait again, but not for long."""

    chunks: Chunks

    @property
    def connected(self) -> bool: ...

    def finding(self, prefix: Prefix, until: float) -> AbstractContextManager[int]:
        """The number of chunks the pool has in a row."""
        ...

    def reading(self, prefix: Prefix, first: int, until: float) -> AbstractContextManager[list[torch.Tensor]]:
        """Slots of the chunks from `first` on that the pool has in a row; they stay as they are inside the context."""
        ...

    def writing(self, prefix: Prefix, first: int, last: int, until: float) -> AbstractContextManager[Writing]:
        """Slots for those of the chunks [first, last) that the pool lacks."""
        ...

    def probe(self, until: float) -> None:
        """Ask the server whether it answers."""
        ...

    def close(self) -> None: ...


def unchanged(generations: np.ndarray, block_ids: Sequence[int]) -> StillValid:
    """A `still_valid` for an engine's generation table: whether no block has got a new owner since now."""
    ids = np.asarray(block_ids, np.int64)
    before = generations[ids]
    return lambda: bool(np.array_equal(generations[ids], before))
