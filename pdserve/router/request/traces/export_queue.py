"""Queues finished calls for a thread that exports them.

    put --room--> waiting --a batch--> exported | failed          (the receiver took it, or did not)
      '--no room--> dropped

`put` never waits: if the receiver is away, the queue fills, and further calls are dropped and
counted. Knows no library: the function that sends a batch is passed in. Made by `traces.otlp`, one
per router.
"""

import threading
from collections import deque
from collections.abc import Callable

from prometheus_client import Counter

from pdserve.background.threads import KeptThread
from pdserve.router.request.traces.call_trace import CallTrace

CLOSE_S = 5.0  # the rest is exported within this time, or dropped
INTERRUPTED_S = 1.0  # further time for an export that was interrupted

Take = Callable[[], CallTrace | None]
"""Returns the next call that waits; None if there is none."""


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
        """Starts the thread.

        - `send` runs in that thread. It takes waiting calls, as many as make a batch, sends them,
          and returns True if they arrived. `interrupt` makes it return soon.
        - `counter` counts calls by result.
        - `limit` is the number of calls that may wait.
        - Calls wait at most `delay_s`, and less once `wake_at` of them wait.
        """
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
        self._num_taken = 0  # calls in the batch that is being sent
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
        """Exports what waits, then ends the thread, and drops the rest. Idempotent.

        It blocks for at most `timeout_s`, and a second more for an export that it interrupts.
        """
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
