"""Common base of biases and masked stop tokens: tables of edits of single logits, with a row for
each slot.

A row's edits are sent once, when they are first asked for. In every other step only its slot is
sent, four bytes. The rule that derives from it says which logits get what.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.sampling.rules.logit_rule import AskedRows, LogitRule, floats
from pdserve.engine.sampling.sample_row import SampleRow
from pdserve.engine.sampling.staged_rows import Arrays
from pdserve.kernels.ops import Ops

EDIT_BYTES = 16  # bytes of an edit on its way to the tables
WIDTH_MULTIPLE = 16  # Triton compiles a kernel anew for a width that is not a multiple of 16

Edits = Mapping[int, float]
"""The number that is added to the logit of each token id."""


@dataclass
class SentEdits:
    """A row's edits, with a flag that says if the device has them."""

    edits: Edits
    is_sent: bool = False


class SlotEdits(LogitRule[SentEdits]):
    """A LogitRule without name and example. max_edits: maximum number of edits of a row."""

    def __init__(
        self, ops: Ops, vocab_size: int, num_slots: int, max_edits: int, device: torch.device
    ) -> None:
        # at most one edit per token
        self.width = -(-min(max_edits, vocab_size) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        self._num_slots = num_slots
        self._ops = ops
        self._device = device
        self._tables: tuple[Tensor, Tensor, Tensor] | None = None  # made when first needed

    @abstractmethod
    def edits(self, row: SampleRow) -> Edits | None:
        """The edits of a row, at all positions where `is_active`; None if it never has any."""

    def is_active(self, row: SampleRow) -> bool:
        """True if the row's edits apply at its position."""
        return True

    def join(self, row: SampleRow) -> SentEdits | None:
        edits = self.edits(row)
        return SentEdits(edits) if edits else None

    def stage(self, rows: AskedRows[SentEdits], num_rows: int) -> Arrays:
        active = [asked for asked in rows if self.is_active(asked[1])]
        if not active:
            return {}
        slots = np.zeros(num_rows, dtype=np.int32)
        slots[[at for at, _, _ in active]] = [row.slot for _, row, _ in active]
        arrays = {"slots": slots}
        changed = [(row.slot, state) for _, row, state in active if not state.is_sent]
        if changed:
            self._stage_changes(changed, arrays)
        return arrays

    def apply(self, logits: Tensor, staged: Mapping[str, Tensor]) -> None:
        counts, ids, values = self._made()
        if "changed_slots" in staged:
            counts.index_copy_(0, staged["changed_slots"], staged["changed_counts"])
            ids.view(-1).index_copy_(0, staged["changed_at"], staged["changed_ids"])
            values.view(-1).index_copy_(0, staged["changed_at"], staged["changed_values"])
        self._ops.sampling.apply_edits(logits, staged["slots"], counts, ids, values)

    def state_bytes(self) -> int:
        return (self._num_slots + 1) * (self.width * 8 + 4)

    def row_bytes(self) -> int:
        return self.width * EDIT_BYTES

    def _stage_changes(self, changed: list[tuple[int, SentEdits]], arrays: Arrays) -> None:
        """Stage edits that the device lacks. `changed_at` are flat positions in the tables
        `[num_slots + 1, width]`."""
        made: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # choices of a request share edits
        for _, state in changed:
            if id(state.edits) not in made:
                ids = np.array(list(state.edits), dtype=np.int32)
                made[id(state.edits)] = ids, floats(state.edits.values())
            state.is_sent = True
        sent = [(slot, *made[id(state.edits)]) for slot, state in changed]
        starts = [np.arange(len(ids)) + slot * self.width for slot, ids, _ in sent]
        arrays["changed_slots"] = np.array([slot for slot, _, _ in sent], dtype=np.int64)
        arrays["changed_counts"] = np.array([len(ids) for _, ids, _ in sent], dtype=np.int32)
        arrays["changed_at"] = np.concatenate(starts)
        arrays["changed_ids"] = np.concatenate([ids for _, ids, _ in sent])
        arrays["changed_values"] = np.concatenate([values for _, _, values in sent])

    def _made(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns counts, int32 `[num_slots + 1]`; ids, int32, and values, float32, both
        `[num_slots + 1, width]`."""
        if self._tables is None:
            shape = self._num_slots + 1, self.width
            self._tables = (
                torch.zeros(shape[0], dtype=torch.int32, device=self._device),
                torch.empty(shape, dtype=torch.int32, device=self._device),
                torch.empty(shape, dtype=torch.float32, device=self._device),
            )
        return self._tables
