"""Placement: which rank of a stage holds which experts, and how many copies of each.

All ranks hold equally many copies. An expert that many rows choose may have several copies, on as
many ranks (DeepSeek's redundant experts). This is pure arithmetic without torch: every rank
computes the same placement by itself. It knows no layers and no weights. The code that makes the
model's layers calls it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """Copies of experts on ranks. A copy's number is rank * num_local + its place on the rank."""

    experts: tuple[tuple[int, ...], ...]
    """The experts of each rank, in ascending order. No rank has an expert twice."""

    @property
    def num_ranks(self) -> int:
        return len(self.experts)

    @property
    def num_local(self) -> int:
        """Number of copies on each rank."""
        return len(self.experts[0])

    @property
    def num_copies(self) -> int:
        """Number of copies on all ranks."""
        return self.num_ranks * self.num_local

    @cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of each expert's copies, in ascending order."""
        found: dict[int, list[int]] = {}
        flat = [expert for held in self.experts for expert in held]
        for copy, expert in enumerate(flat):
            found.setdefault(expert, []).append(copy)
        return tuple(tuple(found[expert]) for expert in range(len(found)))


Placements = Mapping[int, Placement]
"""Maps each layer that is a mixture to its placement."""


def place_experts(
    num_experts: int, num_ranks: int, num_redundant: int = 0, load: Sequence[int] | None = None
) -> Placement:
    """Places one copy of each of `num_experts`, and `num_redundant` further copies, on the ranks.

    If the ranks cannot share that many copies equally, there are a few more.
    load: number of rows that chose each expert. None: all are alike, and then experts without
        further copies are placed on the ranks in blocks.
    Raises ValueError if there are more further copies than the ranks can use.
    """
    num_copies = -(-(num_experts + num_redundant) // num_ranks) * num_ranks
    _check(num_experts, num_ranks, num_redundant, num_copies)
    if num_copies == num_experts and load is None:
        return Placement(_blocks(num_experts, num_ranks))
    weights = list(load) if load is not None and any(load) else [1] * num_experts
    counts = _count_copies(weights, num_ranks, num_copies)
    return Placement(_deal(weights, counts, num_ranks, num_copies // num_ranks))


def _check(num_experts: int, num_ranks: int, num_redundant: int, num_copies: int) -> None:
    if num_redundant < 0:
        raise ValueError(
            f"engine.redundant_experts ({num_redundant}) must not be negative: 0 means no "
            "further copies"
        )
    most = num_experts * num_ranks
    if num_copies > most:
        raise ValueError(
            f"engine.redundant_experts ({num_redundant}) is too high: {num_ranks} ranks with one "
            f"copy each of {num_experts} experts hold {most} copies, so choose at most "
            f"{most - num_experts}"
        )


def _blocks(num_experts: int, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    size = num_experts // num_ranks
    return tuple(tuple(range(rank * size, (rank + 1) * size)) for rank in range(num_ranks))


def _count_copies(load: Sequence[int], num_ranks: int, num_copies: int) -> list[int]:
    """Number of copies of each expert. Each further copy goes to the expert with the most rows per
    copy among those that some rank lacks, and to the lowest one of equals."""
    counts = [1] * len(load)
    for _ in range(num_copies - len(load)):
        needy = [expert for expert, count in enumerate(counts) if count < num_ranks]
        counts[max(needy, key=lambda expert: load[expert] / counts[expert])] += 1
    return counts


def _deal(
    load: Sequence[int], counts: Sequence[int], num_ranks: int, num_local: int
) -> tuple[tuple[int, ...], ...]:
    """Deals the copies one by one, heaviest first, to the least loaded rank that has room and lacks
    the expert.

    If all ranks with room have the expert, a full rank that lacks it gives its lightest possible
    copy to one of them. A full rank holds more experts than a rank with room, so it always has one
    that the other lacks.
    """
    share = [rows / count for rows, count in zip(load, counts, strict=True)]
    ranks = [_Rank(num_local) for _ in range(num_ranks)]
    for expert in sorted(range(len(load)), key=lambda expert: (-share[expert], expert)):
        for _ in range(counts[expert]):
            lacking = [rank for rank in ranks if expert not in rank.experts]
            with_room = [rank for rank in lacking if rank.has_room]
            target = min(with_room or lacking, key=lambda rank: rank.load)
            if not with_room:
                taker = next(rank for rank in ranks if rank.has_room)
                movable = target.experts - taker.experts
                lightest = min(movable, key=lambda expert: (share[expert], expert))
                target.remove(lightest, share)
                taker.add(lightest, share)
            target.add(expert, share)
    return tuple(tuple(sorted(rank.experts)) for rank in ranks)


class _Rank:
    """A rank while copies are dealt to it."""

    def __init__(self, num_local: int) -> None:
        self.num_local = num_local
        self.experts: set[int] = set()
        self.load = 0.0

    @property
    def has_room(self) -> bool:
        return len(self.experts) < self.num_local

    def add(self, expert: int, share: Sequence[float]) -> None:
        self.experts.add(expert)
        self.load += share[expert]

    def remove(self, expert: int, share: Sequence[float]) -> None:
        self.experts.remove(expert)
        self.load -= share[expert]
