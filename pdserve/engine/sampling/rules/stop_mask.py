"""min_tokens: no token that would end a choice is drawn before it has so many."""

from typing import ClassVar

import torch

from pdserve.engine.sampling.rules.slot_edits import Edits, SlotEdits
from pdserve.engine.sampling.sample_row import SampleRow
from pdserve.kernels.ops import Ops
from pdserve.kernels.sampling.reference import NEG_INF
from pdserve.protocol.logit_rules import asks_mask
from pdserve.protocol.sampling_params import MAX_STOP_TOKEN_IDS


class StopMask(SlotEdits):
    """num_eos: how many end-of-sequence tokens the model has."""

    name = "stop_mask"
    example: ClassVar = {"min_tokens": 1, "stop_token_ids": [0]}

    def __init__(
        self, ops: Ops, vocab_size: int, num_slots: int, num_eos: int, device: torch.device
    ) -> None:
        super().__init__(ops, vocab_size, num_slots, MAX_STOP_TOKEN_IDS + num_eos, device)
        # of the row that joined last: choices of a request share their stop tokens
        self._last: tuple[frozenset[int], Edits] = frozenset(), {}

    def edits(self, row: SampleRow) -> Edits | None:
        if not self.is_active(row):  # positions only grow
            return None
        if asks_mask(row.sampling.logit_rules):  # it may have to end: the rule token_mask knows
            return None
        if self._last[0] is not row.stop_token_ids:
            edits = dict.fromkeys(row.stop_token_ids, NEG_INF)
            self._last = row.stop_token_ids, edits
        return self._last[1]

    def is_active(self, row: SampleRow) -> bool:
        return row.position < row.sampling.min_tokens
