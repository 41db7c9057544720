"""The engine's steps in flight: plans them, sends them to the executor, and knows which of them had
better be sent later.

    planned --sent, and sampled----------------------------------> taken, to be collected
       |  '--sent--> late: sampled when the step before it has been collected
       '--held: sent when the step before it has been collected

A step without graphs takes the host milliseconds, in which it launches the kernels one by one and
sees nothing else. If the step before ends meanwhile, its tokens would wait. So such a step is held
(docs/design/engine-step.md). Called by `engine.Engine` alone.
"""

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from pdserve.engine.pacing.pace import Pace
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.stepping.executor import Executor
from pdserve.engine.stepping.planner import PlannedStep, StepPlanner, sizes_of

# What the device loses if the step before is collected before a step is sent: the time of its
# events, and of the first kernels.
HELD_S = 0.002
NUM_LAUNCHES = 9  # whose median is launch_s, so that one which compiled a kernel does not matter
# A step is waited for from so many seconds before its predicted end, to see its end at once.
NEARLY_DONE_S = 0.003


class StepQueue:
    """Steps in flight. At most one is late or held: the newest.

    - in_flight: planned steps that are not collected, oldest first.
    - executor: may be replaced while nothing is in flight (by engines on paper).
    - clock: predicts and times launches; the pace's clock.
    """

    def __init__(
        self,
        executor: Executor,
        planner: StepPlanner,
        scheduler: Scheduler,
        max_in_flight: int,
        pace: Pace | None,
        clock: Callable[[], float],
    ) -> None:
        self.in_flight: deque[PlannedStep] = deque()
        self.clock = clock
        self.executor = executor
        self._planner = planner
        self._scheduler = scheduler
        self._max_in_flight = max_in_flight
        self._pace = pace
        self._late: PlannedStep | None = None
        self._is_blocked = False  # True if the last plan lacked blocks that steps in flight have
        self._launches: deque[float] = deque(maxlen=NUM_LAUNCHES)

    @property
    def launch_s(self) -> float:
        """Seconds in which the host launches the kernels of a step without graphs; 0 if it has not
        done so yet."""
        return median(self._launches) if self._launches else 0.0

    @property
    def is_held(self) -> bool:
        """True if the newest step is planned and not sent."""
        return bool(self.in_flight) and self.in_flight[-1].handle is None

    def fill(self) -> None:
        """Plan and send steps until enough are in flight, or one is held or late."""
        self.send_held()
        while (
            self._late is None
            and len(self.in_flight) < self._max_in_flight
            and not (self._is_blocked and self.in_flight)
        ):
            step = self._plan()
            if step is None:
                break
            self.in_flight.append(step)
            if self.delays_tokens(step):
                break
            self._send(step)

    def send_held(self) -> None:
        """Send the step that is held, if there is one. The step before it must be collected."""
        if self.is_held:
            assert len(self.in_flight) == 1, "the step before one that is held is not collected"
            self._send(self.in_flight[0])

    def delays_tokens(self, step: PlannedStep) -> bool:
        """True if the oldest step in flight would end, and its tokens would have to wait, while the
        host still launches the kernels of this one."""
        oldest = self.in_flight[0]
        return (
            oldest is not step
            and self._pace is not None
            and oldest.forward.num_samples > 0
            and step.is_eager
            and self._pace.in_flight.seconds_left() + HELD_S < self.launch_s
        )

    def spare_s(self) -> float:
        """Seconds for which the step in flight surely goes on while another one could be queued
        behind it; at most 0 if none could."""
        has_room = 0 < len(self.in_flight) < self._max_in_flight and not self._is_blocked
        if self._pace is None or not has_room or self._late is not None:
            return 0.0
        return self._pace.in_flight.seconds_left() - NEARLY_DONE_S

    def take(self) -> PlannedStep | None:
        """Take the oldest step, to collect it; None if none is in flight."""
        return self.in_flight.popleft() if self.in_flight else None

    def sample_late(self) -> None:
        """Sample the late step, if there is one. The step before it must be collected."""
        if self._late is not None:
            self._sample(self._late)
            self._late = None

    def clear(self) -> None:
        self.in_flight.clear()
        self._late = None
        self._is_blocked = False

    def _plan(self) -> PlannedStep | None:
        began = time.perf_counter()
        plan = self._scheduler.schedule(may_preempt=not self.in_flight)
        self._is_blocked = plan.blocked
        if not plan:
            return None
        step = self._planner.plan(plan, self.executor.padding(sizes_of(plan)))
        step.host_seconds = time.perf_counter() - began
        return step

    def _send(self, step: PlannedStep) -> None:
        began, called_at = time.perf_counter(), self.clock()
        step.handle = self.executor.forward(step.forward)
        if step.is_eager:
            self._launches.append(self.clock() - called_at)
        self._planner.digest_prompts(step)
        step.host_seconds += time.perf_counter() - began
        if step.forward.is_late and len(self.in_flight) > 1:
            self._late = step
        else:
            self._sample(step)

    def _sample(self, step: PlannedStep) -> None:
        if step.forward.num_samples:
            began = time.perf_counter()
            self.executor.sample(self._planner.sample_work(step))
            step.host_seconds += time.perf_counter() - began
