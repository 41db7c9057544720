"""A logit rule changes the logits of the rows that ask for it.

Its host half turns rows into small arrays, its device half turns these into changed logits. What
the host half knows of a row is the row's own state; what the device half keeps lies in tables with
a row for each slot. Implemented by the files beside this one, called by `row_staging` and by the
sampler.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from torch import Tensor

from pdserve.engine.sampling.sample_row import SampleRow
from pdserve.engine.sampling.staged_rows import Arrays

State = TypeVar("State")
AskedRows = list[tuple[int, SampleRow, State]]
"""The rows of a step that ask for a rule: place in the step, row, and the rule's state of it."""


class LogitRule(ABC, Generic[State]):
    """name: of the rule in messages. needs_values: it can only be staged when all tokens before the
    one to sample are known, so a step with such a row is sampled late (docs/design/engine-step.md);
    a rule for which that depends on the row has `needs_values_at`.
    example: sampling parameters that ask for it, to compile its kernels with.
    """

    name: ClassVar[str]
    needs_values: ClassVar[bool] = False
    example: ClassVar[Mapping[str, Any]] = {}

    @abstractmethod
    def join(self, row: SampleRow) -> State | None:
        """Host: its state of a row that has just got its slot; None if the row never asks for
        it."""

    def needs_values_at(self, state: State, position: int) -> bool:
        """Host: whether the row can only be staged at this position when all tokens before are
        known."""
        return self.needs_values

    @abstractmethod
    def stage(self, rows: AskedRows[State], num_rows: int) -> Arrays:
        """Host: the arrays that change the logits of a step of num_rows rows; {} if none of the
        rows asks for a change now. Rows stand at their positions."""

    @abstractmethod
    def apply(self, logits: Tensor, staged: Mapping[str, Tensor]) -> None:
        """Device: change the logits, float32 `[rows, vocab]` and contiguous, in place."""

    def sampled(self, token_ids: Tensor, staged: Mapping[str, Tensor]) -> None:
        """Device: what was drawn, int32 `[rows]`."""
        return

    def state_bytes(self) -> int:
        """Device memory of its tables."""
        return 0

    def row_bytes(self) -> int:
        """Device memory that one row's staged arrays may take."""
        return 0


def floats(values: Iterable[float]) -> np.ndarray:
    return np.fromiter(values, dtype=np.float32)
