"""The operations of one KV pool connector: which exist, what was reported of them, and who may
touch which block.

    waiting -> touching (a copy runs) -> waiting ... -> over: its one result was reported
            -> settled: no copy of it runs

An operation is ended by its lane, by the clock or by `cancel`, whichever is first. While it is over
and still touching, its blocks are not quiet, and one PoolSettled follows. Knows no threads, server
or breaker. Used by `threaded_pool.py`, whose lock it shares.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pdserve.kvtransfer.connector import (
    PoolDone,
    PoolEvent,
    PoolFailed,
    PoolSettled,
    PoolStored,
    StillValid,
    Wake,
)
from pdserve.kvtransfer.pool.metrics import PoolMetrics

Kind = Literal["retrieve", "store"]


class GivenUp(Exception):
    """The operation has ended meanwhile, so its lane must not touch its blocks any more."""


@dataclass(eq=False)
class Operation:
    """One retrieve or store, until it has settled."""

    op_id: int
    kind: Kind
    tokens: tuple[int, ...]  # of whole chunks
    salt: str
    started: float
    deadline: float
    blocks: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    skip_blocks: int = 0
    still_valid: StillValid | None = None
    touching: bool = False  # a copy runs
    over: bool = False  # its one result was reported


class Operations:
    """The operations that have not settled, and the events that were not polled. Called from any
    thread.

    - lock: the caller also holds it around `add`, `close`, `late` and `next_deadline`.
    - num_stored_blocks: sources of stores. The caller adds those of a store that it accepts, and
      they are subtracted when it settles.
    """

    def __init__(self, lock: threading.Condition, wake: Wake, metrics: PoolMetrics) -> None:
        self._lock = lock
        self._wake = wake
        self._metrics = metrics
        self._operations: dict[int, Operation] = {}
        self._events: list[PoolEvent] = []
        self.num_stored_blocks = 0
        self.is_closed = False

    @property
    def unsettled(self) -> dict[int, Operation]:
        """The operations by op_id; for tests that look on."""
        return self._operations

    @property
    def next_deadline(self) -> float:
        """The next deadline, monotonic; infinite if there is none."""
        return min(
            (op.deadline for op in self._operations.values() if not op.over), default=float("inf")
        )

    def late(self, now: float) -> list[Operation]:
        return [op for op in self._operations.values() if op.deadline <= now and not op.over]

    def get(self, op_id: int) -> Operation | None:
        with self._lock:
            return self._operations.get(op_id)

    def add(self, operation: Operation) -> None:
        self._operations[operation.op_id] = operation

    def poll(self) -> list[PoolEvent]:
        with self._lock:
            events = self._events
            self._events = []
        return events

    def close(self) -> list[Operation]:
        """Wake nobody from now on. Returns the operations, which the caller must end."""
        self.is_closed = True
        return list(self._operations.values())

    def end(self, operation: Operation, event: PoolDone | PoolStored | PoolFailed) -> None:
        """Report the one result of an operation, unless it already has one."""
        with self._lock:
            if operation.over:
                return
            operation.over = True
            outcome = "done"
            if isinstance(event, PoolFailed):
                outcome = event.reason
                event = PoolFailed(
                    event.op_id, event.reason, event.detail, settled=not operation.touching
                )
            self._events.append(event)
            if not operation.touching:
                self._let_go(operation)
            elif isinstance(event, PoolFailed):
                self._metrics.unsettled.inc()
            wake = not self.is_closed
        self._metrics.requests.labels(operation.kind, outcome).inc()
        self._metrics.seconds.labels(operation.kind).observe(time.monotonic() - operation.started)
        if wake:
            self._wake()

    @contextmanager
    def touching(self, operation: Operation) -> Iterator[None]:
        """Surrounds every copy. Raises GivenUp instead of beginning a copy for an operation that
        has ended."""
        with self._lock:
            if operation.over:
                raise GivenUp
            operation.touching = True
        try:
            yield
        finally:
            with self._lock:
                operation.touching = False
                settled = operation.over
                if settled:
                    self._events.append(PoolSettled(operation.op_id))
                    self._let_go(operation)
                wake = settled and not self.is_closed
            if wake:
                self._wake()

    def _let_go(self, operation: Operation) -> None:
        """Forget an operation that is over and settled."""
        self._operations.pop(operation.op_id, None)
        if operation.kind == "store":
            self.num_stored_blocks -= len(operation.blocks)
