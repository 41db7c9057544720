"""The steps of an engine that are planned and not yet collected, and when they will end.

The device does them one after another. Knows no model: the pace, its owner, predicts the times.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.engine.pacing.step_model import StepLoad

SURE = 0.9  # share of its predicted time that a step takes at least


@dataclass(frozen=True)
class Flight:
    """A step that is not collected yet."""

    load: StepLoad  # of its busiest home
    seconds: float  # predicted
    is_mixed: bool = False  # prompts waited, or were computed, in a step with decodes
    teaches: bool = False  # its time says how long such a load takes

    def work(self, pair_tokens: float) -> float:
        """The work of its prompts (protocol.prompt_work)."""
        return self.load.num_prompt_rows + pair_tokens * self.load.attended


class InFlight:
    """The steps in flight, the oldest first. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._flights: deque[Flight] = deque()
        self._began = clock()  # start of the oldest step in flight, or of the engine's rest
        self._is_at_rest = True

    def planned(self, flight: Flight) -> None:
        """Add a step that is forwarded now, or when the step before has ended."""
        if not self._flights and self._is_at_rest:
            self._began = self._clock()
        self._is_at_rest = False
        self._flights.append(flight)

    def ended(self) -> tuple[Flight, float]:
        """Remove the oldest step, which ends now, and return it with the seconds it took."""
        now = self._clock()
        seconds = now - self._began
        self._began = now
        return self._flights.popleft(), seconds

    def rested(self) -> None:
        """Record that nothing is in flight and nothing can run. The time until the next step does
        not count for it."""
        self._is_at_rest = True

    def free_at(self) -> float:
        """When the device will be done with everything in flight."""
        now = self._clock()
        if not self._flights:
            return now
        first, *others = self._flights
        return max(now, self._began + first.seconds) + sum(each.seconds for each in others)

    def seconds_left(self) -> float:
        """Seconds that the oldest step will take at least, if it is predicted well."""
        if not self._flights:
            return 0.0
        return max(0.0, self._began + SURE * self._flights[0].seconds - self._clock())

    def prompt_work(self, pair_tokens: float) -> float:
        """The work of prompts that the device still has to do in these steps."""
        if not self._flights:
            return 0.0
        first, *others = self._flights
        left = self._began + first.seconds - self._clock()
        share = min(1.0, max(0.0, left / first.seconds)) if first.seconds > 0 else 0.0
        return share * first.work(pair_tokens) + sum(each.work(pair_tokens) for each in others)
