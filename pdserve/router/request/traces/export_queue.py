"""Calls that are finished wait here for a thread that exports them.

    put --room--> waiting --a batch--> exported | failed          (the receiver took it, or did not)
      '--no room--> dropped

`put` never waits: when the receiver is away, the queue fills and further calls are dropped and
counted. Knows no library: what sends a batch is given. Made by `traces.otlp`, one a router.
"""

import threading
from collections import deque
from collections.abc import Callable

from prometheus_client import Counter

from pdserve.background.threads import KeptThread
from pdserve.router.request.traces.call_trace import CallTrace

CLOSE_S = 5.0  # what is left is exported within this, or dropped
INTERRUPTED_S = 1.0  # beyond that, for an export that was interrupted

Take = Callable[[], CallTrace | None]
"""Gives the next call that waits; None: there is none."""


class ExportQueue:
    def __init__(
        self,
        send: Callable[[Take], bool],
        interrupt: Callable[[], None],
        counter: Counter,
        limit: int,
        delay_s: float,
        wake_at: int,
    ) -> None:
        """send: takes waiting calls, as many as make a batch, sends them, and says whether they
        arrived. Called from a thread of this queue. interrupt: makes `send` return soon. counter:
        of calls, by result. limit: calls that may wait. delay_s, wake_at: they wait no longer than
        that, and are sent sooner when they are so many."""
        self._send = send
        self._interrupt = interrupt
        self._counter = counter
        self._dropped = counter.labels("dropped")
        self._limit = limit
        self._delay_s = delay_s
        self._wake_at = wake_at
        self._waiting: deque[CallTrace] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._num_taken = 0  # of the batch that is being sent
        for result in ("exported", "failed"):
            counter.labels(result)
        self._thread = KeptThread("trace export", self._run)

    def put(self, call: CallTrace) -> None:
        if self._closing or len(self._waiting) >= self._limit:
            self._dropped.inc()
            return
        self._waiting.append(call)
        if len(self._waiting) == self._wake_at:
            self._wake.set()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Export what waits, then end the thread. Blocks so long at most, and a second more for an
        export that is interrupted; drops the rest. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        ended = self._thread.finish(timeout_s)
        self._interrupt()
        if not ended:
            self._thread.finish(INTERRUPTED_S)
        while self._waiting:
            self._waiting.popleft()
            self._dropped.inc()

    def _take(self) -> CallTrace | None:
        try:
            call = self._waiting.popleft()
        except IndexError:
            return None
        self._num_taken += 1
        return call

    def _run(self) -> None:
        while True:
            self._wake.wait(self._delay_s)
            self._wake.clear()
            while self._waiting:
                self._num_taken = 0
                arrived = False
                try:
                    arrived = self._send(self._take)
                finally:
                    result = "exported" if arrived else "failed"
                    self._counter.labels(result).inc(self._num_taken)
            if self._closing:
                return
