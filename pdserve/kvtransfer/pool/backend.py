"""What the KV pool's operations need from a server: blocking calls with a deadline, in chunks.

Implemented by `lmcache_backend.py`, and by `tests/support/local_pool_backend.py` for tests; nothing
here names a server. Called by `threaded_pool.py` from the pool's threads.
"""

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from pdserve.kvtransfer.pool.chunks import Chunks, Prefix


class PoolError(Exception):
    """The backend could not answer. reason: as in PoolFailed."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Writing(Protocol):
    """Reserved memory for chunks that the pool lacks. buffers: chunk index -> uint8
    `[chunks.num_bytes]` on the host."""

    buffers: dict[int, torch.Tensor]

    def commit(self) -> None:
        """From now on the chunks can be found. Without it they never are."""
        ...


class PoolBackend(Protocol):
    """Blocking calls; none waits for the server past `until` (time.monotonic()), all raise
    PoolError. Leaving a context gives back whatever the server holds for it; that may wait again,
    but not for long."""

    chunks: Chunks

    @property
    def connected(self) -> bool: ...

    def reading(
        self, prefix: Prefix, first: int, until: float
    ) -> AbstractContextManager[list[torch.Tensor]]:
        """Buffers of the chunks from `first` on that the pool has in a row; they stay as they are
        inside the context."""
        ...

    def writing(
        self, prefix: Prefix, first: int, last: int, until: float
    ) -> AbstractContextManager[Writing]:
        """Buffers for those of the chunks [first, last) that the pool lacks."""
        ...

    def probe(self, until: float) -> None:
        """Ask the server whether it answers."""
        ...

    def close(self) -> None: ...
