"""The plan of one step: the number of rows and samples of each sequence.

Made by the scheduler, read by the planner. Knows no device.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pdserve.engine.scheduling.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """The next num_rows rows of a sequence, at least 1. The last num_samples of them sample."""

    num_rows: int
    num_samples: int


def chunk_of(seq: Sequence, num_rows: int) -> Chunk:
    """A chunk of the sequence's next rows. Its last row samples, if tokens are wanted of it."""
    samples = num_rows == seq.num_uncomputed and seq.request.kind == "generate"
    return Chunk(num_rows, num_samples=int(samples))


@dataclass
class HomePlan:
    """The part of a step that one home has; empty if the home has nothing to do. copies: (from, to)
    blocks that are copied before anything is written."""

    chunks: dict[Sequence, Chunk] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(chunk.num_rows for chunk in self.chunks.values())


class StepPlan:
    """One step of all homes. homes: the part of each home.

    blocked: a running sequence found no blocks, and steps in flight do not allow a preemption. They
    must be completed first.
    """

    def __init__(self, num_homes: int = 1) -> None:
        self.homes = tuple(HomePlan() for _ in range(num_homes))
        self.blocked = False

    def __bool__(self) -> bool:
        return any(home.chunks for home in self.homes)

    def __iter__(self) -> Iterator[tuple[Sequence, Chunk]]:
        """The chunks of all homes, home after home."""
        for home in self.homes:
            yield from home.chunks.items()

    @property
    def num_rows(self) -> int:
        return sum(home.num_rows for home in self.homes)

    @property
    def num_sequences(self) -> int:
        return sum(len(home.chunks) for home in self.homes)

    def add(self, seq: Sequence, chunk: Chunk, copies: list[tuple[int, int]]) -> None:
        """Plan a chunk in the sequence's home. copies: block copies that the chunk needs."""
        assert chunk.num_rows > 0
        home = self.homes[seq.home]
        home.chunks[seq] = chunk
        home.copies += copies

    def remove(self, seq: Sequence) -> int:
        """Take the sequence out of the plan. Returns the number of its rows in the plan."""
        home = self.homes[seq.home]
        chunk = home.chunks.pop(seq, None)
        home.copies = [pair for pair in home.copies if pair[1] not in seq.owned_blocks]
        return chunk.num_rows if chunk is not None else 0
