"""Sends planned steps to the executor, and knows which of them had better be sent later.

A step without a CUDA graph takes the host milliseconds, in which it launches the kernels one by one
and sees nothing else. If the step in flight ends meanwhile, its tokens would wait. The engine then
completes that step first (docs/design/engine-step.md). Called by `engine.Engine` alone.
"""

import time
from collections import deque
from collections.abc import Callable

from pdserve.engine.pacing.pace import Pace
from pdserve.engine.stepping.executor import Executor
from pdserve.engine.stepping.planner import PlannedStep, StepPlanner

# What the device loses if the step before is completed before a step is sent: the time of its
# events, and of the first kernels.
SEND_LATER_S = 0.002
LAUNCH_KEPT = 0.8  # share of the mean that a step leaves as it is
MOST_LAUNCH_S = 0.05  # a step that takes longer had to wait for something else


class StepSender:
    """in_flight: the engine's planned steps, oldest first, of which the newest may not be sent yet.

    - launch_s: mean seconds in which the host launches the kernels of a step without a graph.
    """

    def __init__(
        self,
        executor: Executor,
        planner: StepPlanner,
        in_flight: deque[PlannedStep],
        pace: Pace | None,
        clock: Callable[[], float],
    ) -> None:
        self.launch_s = 0.0
        self.clock = clock
        self.executor = executor
        self._planner = planner
        self._in_flight = in_flight
        self._pace = pace

    def delays_tokens(self, step: PlannedStep) -> bool:
        """True if the oldest step in flight would end, and its tokens would have to wait, while the
        host still launches the kernels of this one."""
        oldest = self._in_flight[0]
        return (
            oldest is not step
            and self._pace is not None
            and oldest.forward.num_samples > 0
            and not step.forward.graph
            and self._pace.seconds_left() + SEND_LATER_S < self.launch_s
        )

    def send_rest(self) -> PlannedStep | None:
        """Send the newest step if it was left for later. Returns what `send` returns."""
        if self._in_flight and self._in_flight[-1].handle is None:
            return self.send(self._in_flight[-1])
        return None

    def send(self, step: PlannedStep) -> PlannedStep | None:
        """Forward a planned step, the newest in flight. Returns it if it is to be sampled late."""
        began, called_at = time.perf_counter(), self.clock()
        step.handle = self.executor.forward(step.forward)
        if not step.forward.graph:
            took = min(self.clock() - called_at, MOST_LAUNCH_S)
            self.launch_s += (took - self.launch_s) * (1 - LAUNCH_KEPT)
        self._planner.digest_prompts(step)
        step.host_seconds += time.perf_counter() - began
        if step.forward.is_late and len(self._in_flight) > 1:
            return step
        self.sample(step)
        return None

    def sample(self, step: PlannedStep) -> None:
        if step.forward.num_samples:
            began = time.perf_counter()
            self.executor.sample(self._planner.sample_work(step))
            step.host_seconds += time.perf_counter() - began
