"""The interface that the KV pool needs of a server: blocking calls with a deadline, in chunks.

Implemented by `lmcache_backend.py`, and by `tests/support/local_pool_backend.py` for tests. Nothing
here names a server. Called by `threaded_pool.py` from the pool's threads.
"""

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from pdserve.kvtransfer.pool.chunks import Chunks, Prefix


class PoolError(Exception):
    """The backend could not answer. reason: one of those in PoolFailed."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Writing(Protocol):
    """Reserved memory for chunks that the pool lacks. buffers: by chunk index, uint8
    `[chunks.num_bytes]` on the host."""

    buffers: dict[int, torch.Tensor]

    def commit(self) -> None:
        """Make the chunks findable. Without this call they are never found."""
        ...


class PoolBackend(Protocol):
    """Blocking calls to a server. None waits for the server past `until` (time.monotonic()), and
    all raise PoolError. Leaving a context gives back whatever the server holds for it. That may
    wait again, but not for long."""

    chunks: Chunks

    @property
    def connected(self) -> bool: ...

    def reading(
        self, prefix: Prefix, first: int, until: float
    ) -> AbstractContextManager[list[torch.Tensor]]:
        """Buffers of consecutive chunks that the pool has, from `first` on. They do not change
        inside the context."""
        ...

    def writing(
        self, prefix: Prefix, first: int, last: int, until: float
    ) -> AbstractContextManager[Writing]:
        """Buffers for those of the chunks from first to before last that the pool lacks."""
        ...

    def probe(self, until: float) -> None:
        """Check that the server answers."""
        ...

    def close(self) -> None: ...
