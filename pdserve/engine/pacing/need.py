"""Share of the time that prompts need to keep their promised first token.

Knows no steps and no streams; times are arguments. `scheduling.turns` makes one for each step in
which prompts wait; `pace.Pace` reads it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

EARLY = 0.15  # share of the promised time; prompts that come within it come soon


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that waits or is being computed."""

    num_left: int  # tokens still to compute
    called_at: float  # when it arrived, in the clock's seconds
    due_at: float  # when its first token is due, in the clock's seconds


@dataclass(frozen=True, slots=True)
class Need:
    """Shares of the time that prompts must have."""

    soon: float  # with this share, first tokens come within EARLY of the promised time
    at_least: float  # with this share, first tokens come in time


ALL = Need(1.0, 1.0)


def need_of(prompts: Iterable[Prompt], now: float, seconds_for: Callable[[int], float]) -> Need:
    """Time shares that these prompts need when computed one after another. A prompt that will be
    late in any case counts only as work. seconds_for: computing time of a number of tokens."""
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
