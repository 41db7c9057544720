"""Implements min_tokens: before a choice has min_tokens tokens, none that would end it is drawn."""

from typing import ClassVar

import torch

from pdserve.engine.sampling.rules.slot_edits import Edits, SlotEdits
from pdserve.engine.sampling.sample_row import SampleRow
from pdserve.kernels.ops import Ops
from pdserve.kernels.sampling.reference import NEG_INF
from pdserve.protocol.logit_rules import asks_mask
from pdserve.protocol.sampling_params import MAX_STOP_TOKEN_IDS


class StopMask(SlotEdits):
    """Hides stop tokens. num_eos: number of end-of-sequence tokens of the model."""

    name = "stop_mask"
    example: ClassVar = {"min_tokens": 1, "stop_token_ids": [0]}

    def __init__(
        self, ops: Ops, vocab_size: int, num_slots: int, num_eos: int, device: torch.device
    ) -> None:
        super().__init__(ops, vocab_size, num_slots, MAX_STOP_TOKEN_IDS + num_eos, device)
        # edits of the row that joined last, because choices of a request share their stop tokens
        self._last: tuple[frozenset[int], Edits] = frozenset(), {}

    def edits(self, row: SampleRow) -> Edits | None:
        if not self.is_active(row):  # positions only grow, so it will never be active
            return None
        if asks_mask(row.sampling.logit_rules):  # left to token_mask: the row may have to end
            return None
        if self._last[0] is not row.stop_token_ids:
            edits = dict.fromkeys(row.stop_token_ids, NEG_INF)
            self._last = row.stop_token_ids, edits
        return self._last[1]

    def is_active(self, row: SampleRow) -> bool:
        return row.position < row.sampling.min_tokens
