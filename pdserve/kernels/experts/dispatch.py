"""Dispatch brings a step's rows to the ranks that hold their experts, and brings the results back.

`GatheredRows` brings every row of every home to every rank of the stage: when a row chooses eight
of many experts, it needs nearly all ranks of a node. An all-to-all between nodes would be another
implementation. This file knows rows and choices; no weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdserve.kernels.collective.ops import Exchange, Stream
from pdserve.kernels.experts.ops import Choice


@dataclass(frozen=True, slots=True)
class Brought:
    """Rows that may need this rank's experts.

    x: `[T, hidden]`.
    choice: the router's choice for these rows.
    own: the rows that belong to the rank's own home.
    """

    x: Tensor
    choice: Choice
    own: range


class Dispatch(Protocol):
    """Moves rows between homes. home_rows: number of rows of the step in each home; every rank
    gives the same."""

    def bring(self, x: Tensor, choice: Choice, home_rows: Sequence[int]) -> Brought:
        """Brings rows to this rank. x `[T, hidden]` and choice: those of the rank's own home."""
        ...

    def take_back(self, stream: Tensor, made: Tensor, home_rows: Sequence[int]) -> Stream:
        """Adds the results of all ranks to the stream of the own home, in float32, in the order of
        the ranks. made: `[brought rows, hidden]`, this rank's part of the results."""
        ...


class GatheredRows:
    """Does what `Dispatch` says, by gathering all rows on all ranks."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def bring(self, x: Tensor, choice: Choice, home_rows: Sequence[int]) -> Brought:
        exchange = self._exchange
        if exchange.num_homes == 1:
            return Brought(x, choice, range(len(x)))
        first = sum(home_rows[: exchange.home])
        own = range(first, first + len(x))
        packed = torch.cat((choice.experts, choice.weights.view(torch.int32)), 1)
        places = choice.experts.shape[1]
        experts, weights = exchange.gather_rows(packed, home_rows).split(places, 1)
        gathered = Choice(experts.contiguous(), weights.contiguous().view(torch.float32))
        return Brought(exchange.gather_rows(x, home_rows), gathered, own)

    def take_back(self, stream: Tensor, made: Tensor, home_rows: Sequence[int]) -> Stream:
        return self._exchange.add_rows(stream, made, home_rows)
