"""Which share of the time prompts need to be in time.

Knows no steps and no streams; times are arguments. Made for each step in which prompts wait, by
`scheduling.turns`; read by `pace.Pace`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

EARLY = 0.15  # of the promised time: prompts that come within it come soon


@dataclass(frozen=True, slots=True)
class Prompt:
    """num_left: tokens that it has still to compute. called_at, due_at: when it came, and when its
    first token is due, in the clock's seconds."""

    num_left: int
    called_at: float
    due_at: float


@dataclass(frozen=True, slots=True)
class Need:
    """Shares of the time that prompts must have. soon: so that first tokens come within EARLY of
    what is promised; at_least: so that they come in time."""

    soon: float
    at_least: float


ALL = Need(1.0, 1.0)


def need_of(prompts: Iterable[Prompt], now: float, seconds_for: Callable[[int], float]) -> Need:
    """What these prompts need, one after another. One that is late in any case counts as work
    alone. seconds_for: computing time of so many tokens."""
    work = soon = at_least = 0.0
    for prompt in prompts:
        seconds = seconds_for(prompt.num_left)
        work += seconds
        left = prompt.due_at - now
        if left > seconds:
            at_least = max(at_least, work / left)
            early = left - (1 - EARLY) * (prompt.due_at - prompt.called_at)
            soon = max(soon, work / early) if early > seconds else 1.0
    return Need(soon, at_least)
