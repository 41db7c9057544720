"""A talk with an LMCache server under one request id: find, read, reserve, commit, and the debts
afterwards.

A lookup locks what it finds, and each request id has a session. `Talk` owes both from the moment it
asks. `Debt` pays them, even if an answer comes late. Knows no connection. `lmcache_backend.py`
makes the talks, `lmcache_connection.py` keeps the debts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.futures import MessagingFuture

from pdserve.kvtransfer.pool.backend import PoolError
from pdserve.kvtransfer.pool.chunks import Prefix
from pdserve.kvtransfer.pool.lmcache_registration import Registration

TIDY_LIMIT_S = 300.0
"""Seconds after which the server has ended by itself what it held for a late answer."""
PREFETCH_MARGIN = 0.8
"""Share of our deadline that the server may spend on loading chunks from its disk."""
LATE_PREFETCH_S = 5.0

Step = Callable[[], MessagingFuture[Any]]


@dataclass(eq=False)
class Debt:
    """A request id for which the server still holds something. `steps`: requests to send, in order,
    after `answer` has come."""

    session: Registration
    answer: MessagingFuture[Any] | None
    steps: list[Step]
    since: float = field(default_factory=time.monotonic)

    def pay(self, until: float = 0.0) -> bool:
        """Continue as far as answers come by `until`. Returns True when nothing is left to do."""
        try:
            while time.monotonic() - self.since < TIDY_LIMIT_S:
                if self.answer is not None and not self.answer.wait(
                    max(0.0, until - time.monotonic())
                ):
                    return self.session.dead
                if not self.steps:
                    return True
                self.answer = self.steps.pop(0)()
        except PoolError:
            pass  # the server is gone, with everything that it held
        return True


class Talk:
    """One request id with the server, and what it owes."""

    def __init__(
        self, session: Registration, prefix: Prefix, request_id: str, until: float
    ) -> None:
        self._session = session
        self._prefix = prefix
        self._id = request_id
        self._until = until
        self._call = session.call
        self._chunks = session.chunks
        self._unanswered: MessagingFuture[Any] | None = None
        self._owed: list[Step] = []

    def key(self, first: int, last: int) -> IPCCacheServerKey:
        """Names the chunks [first, last) of the prefix."""
        size = self._chunks.chunk_tokens
        return IPCCacheServerKey(
            model_name=self._chunks.model_name,
            world_size=self._chunks.shard.world_size,
            worker_id=self._chunks.shard.worker_id,
            token_ids=self._prefix.tokens[: last * size],
            start=first * size,
            end=last * size,
            request_id=self._id,
            cache_salt=self._prefix.salt,
            num_kv_readers=1,
        )

    def _ask(self, answer: MessagingFuture[Any]) -> Any:
        self._unanswered = answer
        result = self._session.wait(answer, self._until)
        self._unanswered = None
        return result

    def _free(self, first: int, last: int) -> list[Step]:
        return (
            [lambda: self._call("free_lookup_locks", self.key(first, last), 1)]
            if last > first
            else []
        )

    def _end(self) -> MessagingFuture[Any]:
        return self._call("end_session", self._id)

    def find(self) -> int:
        """Find and lock chunks. Returns how many were found in a row."""
        count = self._prefix.num_chunks
        late: list[Step] = [lambda: self._call("wait_prefetch_status", self._id, LATE_PREFETCH_S)]
        self._owed = [*late, *self._free(0, count), self._end]
        self._ask(self._call("lookup", self.key(0, count), 1))
        patience = PREFETCH_MARGIN * max(0.0, self._until - time.monotonic())
        found = self._ask(self._call("wait_prefetch_status", self._id, patience))
        if found is None:
            raise PoolError("loading", "the pool server still loads the chunks")
        self._owed = [*self._free(0, found), self._end]
        return int(found)

    def read(self, first: int, last: int) -> list[torch.Tensor]:
        """Returns buffers of the chunks [first, last), which `find` has found."""
        commit: list[Step] = [
            lambda: self._call("commit_retrieve", self.key(first, last), self._session.instance_id)
        ]
        # commit first, because the next read may have the same key
        self._owed = [*commit, *self._free(0, first), self._end]
        answer = self._ask(
            self._call("prepare_retrieve", self.key(first, last), self._session.instance_id)
        )
        if not answer.success:
            self._owed = [*self._free(0, first), self._end]
            return []
        return [self._buffer(descriptor) for descriptor in answer.context["slots"]]

    def reserve(self, first: int, last: int) -> dict[int, torch.Tensor]:
        self._owed = [self._end]
        answer = self._ask(
            self._call("prepare_store", self.key(first, last), self._session.instance_id)
        )
        buffers = answer.context["slots"]
        indices = answer.context["chunk_indices"]
        return {
            first + index: self._buffer(buffer)
            for index, buffer in zip(indices, buffers, strict=True)
        }

    def commit(self, first: int, last: int, until: float) -> None:
        self._until = until
        if not self._ask(
            self._call("commit_store", self.key(first, last), self._session.instance_id, b"")
        ):
            raise PoolError("error", "the pool server did not take the chunks")

    def _buffer(self, descriptor: dict[str, Any]) -> torch.Tensor:
        return self._session.memory.buffer(descriptor, self._chunks.num_bytes)

    def debt(self) -> Debt:
        return Debt(self._session, self._unanswered, self._owed)
