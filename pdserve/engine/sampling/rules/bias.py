"""Implements logit_bias: a request adds numbers to the logits of some tokens, at every position."""

from typing import ClassVar

import torch

from pdserve.engine.sampling.rules.slot_edits import Edits, SlotEdits
from pdserve.engine.sampling.sample_row import SampleRow
from pdserve.kernels.ops import Ops
from pdserve.protocol.sampling_params import MAX_LOGIT_BIAS


class Bias(SlotEdits):
    name = "bias"
    example: ClassVar = {"logit_bias": {0: 1.0}}

    def __init__(self, ops: Ops, vocab_size: int, num_slots: int, device: torch.device) -> None:
        super().__init__(ops, vocab_size, num_slots, MAX_LOGIT_BIAS, device)

    def edits(self, row: SampleRow) -> Edits | None:
        return row.sampling.logit_bias
