"""What one step computes: how many rows of which sequence, and how many samples.

Made by the scheduler, read by the planner. Knows no device.
"""

from dataclasses import dataclass, field

from pdserve.engine.scheduling.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """num_rows: at least 1, the sequence's next ones. num_samples: the last so many of them
    sample."""

    num_rows: int
    num_samples: int


@dataclass
class StepPlan:
    """One step. copies: (from, to) blocks to copy before anything is written.

    blocked: a running sequence found no blocks, and nobody may be preempted while steps are in
    flight: complete them first.
    """

    chunks: dict[Sequence, Chunk] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    blocked: bool = False

    def __bool__(self) -> bool:
        return bool(self.chunks)

    @property
    def num_rows(self) -> int:
        return sum(chunk.num_rows for chunk in self.chunks.values())

    @property
    def is_decode(self) -> bool:
        """Whether every sequence computes one row."""
        return all(chunk.num_rows == 1 for chunk in self.chunks.values())
