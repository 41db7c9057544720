"""What one step computes: how many tokens of which sequence.

Made by the scheduler, read by the engine and the model runner. Knows no device.
"""

from dataclasses import dataclass, field

from pdserve.engine.scheduling.sequence import Sequence


@dataclass
class StepPlan:
    """One step. num_tokens: per sequence, at least 1. copies: (from, to) blocks to copy before
    anything is written.

    blocked: a running sequence found no blocks, and nobody may be preempted while steps are in
    flight: complete them first.
    """

    num_tokens: dict[Sequence, int] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    blocked: bool = False

    def __bool__(self) -> bool:
        return bool(self.num_tokens)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence computes one token."""
        return all(count == 1 for count in self.num_tokens.values())
