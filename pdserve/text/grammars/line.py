"""The line of grammars that wait to be built: at most MAX_WAITING, and if it is full, the largest
leaves.

Three processes take from it, each by its own rule:

- OLDEST takes the one that came first, so nothing waits for ever.
- SMALLEST takes the smallest, so small ones overtake large ones.
- QUICK takes the smallest that was not tried yet, while both others are busy. So a small one soon
  has its turn, also while they are busy for seconds.

QUICK gives a grammar only a moment and then puts it back. The size of a text predicts how long its
build takes, but not surely. So the moment keeps this process free, not the size. Knows no grammars
and no processes. Thread-safe. `checker` calls this module.
"""

import dataclasses
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

from pdserve.text.grammars.probe import Finding

MAX_WAITING = 256
_FULL = (
    "{}: {} grammars wait to be checked, and this is the largest: try again in a moment, or send a "
    "smaller one"
)
_CLOSED = "{}: grammars are not checked any more: this process ends"


class GrammarsBusy(RuntimeError):
    """A grammar could not be checked in time, because others were. It may not be at fault."""


class Rule(Enum):
    """Which grammar a process takes next."""

    OLDEST = "oldest"
    SMALLEST = "smallest"
    QUICK = "quick"


@dataclass(eq=False)
class Job:
    """One grammar to build, and those who wait for it."""

    key: bytes  # equal questions have the same
    data: bytes  # the question, as its process reads it
    field: str
    number: int  # in order of arrival
    waiters: "list[Future[Finding]]" = dataclasses.field(default_factory=list)
    is_tried: bool = False  # True: it was not built in a moment

    @property
    def is_wanted(self) -> bool:
        return any(not waiter.cancelled() for waiter in self.waiters)


class Line:
    """Jobs that wait, and those that are being built."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._jobs: dict[bytes, Job] = {}  # also those that are being built
        self._num_idle = 0  # processes that take by OLDEST or SMALLEST, and wait for a job
        self._num_asked = 0
        self._is_closed = False

    def ask(self, key: bytes, data: bytes, field: str) -> "Future[Finding]":
        """Returns the future answer to a question, which can be cancelled.

        Equal questions are built once. GrammarsBusy is the answer to the largest question if the
        line is full, and to all that wait when the line is closed.
        """
        waiter: Future[Finding] = Future()
        with self._changed:
            if self._is_closed:
                waiter.set_exception(GrammarsBusy(_CLOSED.format(field)))
                return waiter
            job = self._jobs.get(key)
            if job is None:
                self._num_asked += 1
                job = self._jobs[key] = Job(key, data, field, self._num_asked)
                self._waiting.append(job)
            job.waiters.append(waiter)
            if (largest := self._too_much()) is not None:
                self._waiting.remove(largest)
                self._refuse(largest, GrammarsBusy(_FULL.format(largest.field, self._max_waiting)))
            self._changed.notify_all()
        return waiter

    def take(self, rule: Rule) -> Job | None:
        """Waits for the next job by this rule, and returns it. None: the line is closed."""
        with self._changed:
            is_patient = rule is not Rule.QUICK
            self._num_idle += is_patient
            try:
                while not self._is_closed:
                    if (job := self._next(rule)) is not None:
                        self._waiting.remove(job)
                        self._changed.notify_all()  # QUICK may take the next
                        return job
                    self._changed.wait()
                return None
            finally:
                self._num_idle -= is_patient

    def put_back(self, job: Job) -> None:
        """Lets a process build the job that has the time, in its old place."""
        with self._changed:
            job.is_tried = True
            if self._is_closed:
                self._refuse(job, GrammarsBusy(_CLOSED.format(job.field)))
            else:
                self._waiting.append(job)
                self._changed.notify_all()

    def answer(self, job: Job, finding: Finding) -> None:
        """Ends the job with an answer."""
        with self._changed:
            del self._jobs[job.key]
        for waiter in job.waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(finding)

    def fail(self, job: Job, error: BaseException) -> None:
        """Ends the job with an error."""
        with self._changed:
            self._refuse(job, error)

    def close(self) -> None:
        """Lets nobody take any more."""
        with self._changed:
            self._is_closed = True
            for job in self._waiting:
                self._refuse(job, GrammarsBusy(_CLOSED.format(job.field)))
            self._waiting = []
            self._changed.notify_all()

    def _next(self, rule: Rule) -> Job | None:
        self._forget_unwanted()
        if rule is Rule.OLDEST:
            return min(self._waiting, key=lambda job: job.number, default=None)
        found = self._waiting
        if rule is Rule.QUICK:
            found = [] if self._num_idle else [job for job in self._waiting if not job.is_tried]
        return min(found, key=lambda job: (len(job.data), job.number), default=None)

    def _refuse(self, job: Job, error: BaseException) -> None:
        del self._jobs[job.key]
        for waiter in job.waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_exception(error)

    def _forget_unwanted(self) -> None:
        for job in [job for job in self._waiting if not job.is_wanted]:
            self._waiting.remove(job)
            del self._jobs[job.key]

    def _too_much(self) -> Job | None:
        """Returns the job that has to leave. None: the line is not full."""
        if len(self._waiting) > self._max_waiting:
            self._forget_unwanted()
        if len(self._waiting) <= self._max_waiting:
            return None
        return max(self._waiting, key=lambda job: (len(job.data), job.number))
