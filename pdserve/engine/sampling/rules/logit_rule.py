"""A logit rule changes the logits of the rows that ask for it.

Its host half turns rows into small arrays, and its device half uses these to change logits. The
host half keeps its knowledge of a row in that row's own state. The device half keeps tables with a
row for each slot. Implemented by the files beside this one; called by `row_staging` and by the
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
"""The rows of a step that ask for a rule: index in the step, row, and the rule's state for it."""


class LogitRule(ABC, Generic[State]):
    """A logit rule, with its host and device halves.

    - name: identifies the rule in messages.
    - needs_values: the rule can be staged only when all tokens before the one to sample are known.
      A step with such a row is sampled late (docs/design/engine-step.md). If that depends on the
      row, the rule overrides `needs_values_at`.
    - example: sampling parameters that ask for the rule, used to compile its kernels.
    """

    name: ClassVar[str]
    needs_values: ClassVar[bool] = False
    example: ClassVar[Mapping[str, Any]] = {}

    @abstractmethod
    def join(self, row: SampleRow) -> State | None:
        """Host: make the rule's state for a row that has just got its slot; None if the row never
        asks for the rule."""

    def needs_values_at(self, state: State, position: int) -> bool:
        """Host: True if the row can be staged at this position only when all tokens before are
        known."""
        return self.needs_values

    @abstractmethod
    def stage(self, rows: AskedRows[State], num_rows: int) -> Arrays:
        """Host: make the arrays that change the logits of a step with num_rows rows; {} if no row
        asks for a change now. The position of each row is set."""

    @abstractmethod
    def apply(self, logits: Tensor, staged: Mapping[str, Tensor]) -> None:
        """Device: change the logits, float32 `[rows, vocab]` and contiguous, in place."""

    def sampled(self, token_ids: Tensor, staged: Mapping[str, Tensor]) -> None:
        """Device: take note of the drawn tokens, int32 `[rows]`."""
        return

    def state_bytes(self) -> int:
        """Device memory of the rule's tables."""
        return 0

    def row_bytes(self) -> int:
        """Maximum device memory of one row's staged arrays."""
        return 0


def floats(values: Iterable[float]) -> np.ndarray:
    return np.fromiter(values, dtype=np.float32)
