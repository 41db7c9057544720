"""Speed of prompts in steps with the present decodes: predicted, or measured while some waited.
Only paces without a promise use the measured one.

Speeds are work per second (protocol.prompt_work). Knows no sequences. Kept by `pace.Pace`, which
reports it to routers.
"""

import math

from pdserve.engine.pacing.step_model import StepLoad, StepModel
from pdserve.protocol.prompt_work import prompt_work

FADE_S = 2.0
LEAST_S = 0.5  # seconds of (faded) observation below which there is no measured speed


class PromptSpeed:
    """Work and seconds of the steps with decodes in which a prompt waited or was computed."""

    def __init__(self) -> None:
        self._work = self._seconds = 0.0
        self._at = -math.inf

    def observe(self, work: float, seconds: float, now: float) -> None:
        """Record the end of such a step. work: of its prompts; may be 0."""
        kept = self._kept(now)
        self._work = self._work * kept + work
        self._seconds = self._seconds * kept + seconds
        self._at = now

    def measured(self, now: float) -> float | None:
        """Work per second; None if too little was seen lately."""
        if self._seconds * self._kept(now) < LEAST_S:
            return None
        return self._work / self._seconds

    def _kept(self, now: float) -> float:
        return math.exp((self._at - now) / FADE_S)


def full_speed(model: StepModel, num_rows: int) -> float:
    """Predicted work per second of prompts alone, in steps of num_rows; 0 if nothing is known."""
    seconds = model.seconds(StepLoad(num_rows))
    return num_rows / seconds if seconds > 0 else 0.0


def speed_beside(model: StepModel, decodes: StepLoad, share: float) -> float:
    """Predicted work per second of prompts that have this share of the time, while others
    decode."""
    rows = model.efficient_rows(decodes)
    extra = model.seconds(decodes.with_prompt(rows, 0)) - model.decode_seconds(decodes)
    work = prompt_work(rows, 0, model.pair_tokens)
    return share * work / extra if extra > 0 else 0.0
