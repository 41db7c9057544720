"""Chooses the home that a request should live in, if the engine has several.

The best home is the one where its first token would come soonest. Three things count: the prompt
after the prefix that is cached there, the prompts that run there, and the sequences that slow it
down. All are counted in prompt tokens, as routers do for workers (router/choosing/predict.py).
Knows no queue. Called by the scheduler, and for reservations.
"""

from collections.abc import Iterable, Mapping

from pdserve.engine.scheduling.home import Home
from pdserve.engine.scheduling.sequence import Sequence

# a decoding sequence costs its neighbours as much time as this many prompt tokens
DECODE_TOKENS = 256


def load_of(seq: Sequence) -> int:
    """Cost of a sequence in a home, in prompt tokens."""
    return DECODE_TOKENS + (seq.num_uncomputed if seq.num_uncomputed > 1 else 0)


def loads_of(homes: Iterable[Home], sequences: Iterable[Sequence]) -> dict[int, int]:
    """Cost of each home's sequences and reservations, in prompt tokens."""
    loads = {home.number: home.num_reserved * DECODE_TOKENS for home in homes}
    for seq in sequences:
        if seq.request.home is not None:
            loads[seq.request.home] += load_of(seq)
    return loads


def in_order(homes: Iterable[Home], costs: Mapping[int, int]) -> list[Home]:
    """The homes by rising cost. Of equal ones, the home with more free blocks comes first. costs:
    by number of home."""
    return sorted(homes, key=lambda home: (costs[home.number], -home.blocks.num_free, home.number))
