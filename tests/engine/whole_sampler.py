"""Both halves of the sampler together, as an engine of one rank has them: rows in, tokens out."""

import torch
from torch import Tensor

from pdserve.engine.sampling.row_staging import RowStaging
from pdserve.engine.sampling.rules.registry import Rules, logit_rules
from pdserve.engine.sampling.sample_row import SampleRow
from pdserve.engine.sampling.sampled_tokens import SampledTokens
from pdserve.engine.sampling.sampler import Sampler
from pdserve.engine.sampling.staged_rows import StagedRows
from pdserve.kernels.ops import TORCH, Ops


class WholeSampler:
    def __init__(
        self,
        vocab_size: int,
        num_slots: int,
        ops: Ops = TORCH,
        device: str = "cpu",
        num_eos: int = 2,
        more: Rules = (),
    ) -> None:
        """Make a sampler. more: rules in addition to those that every engine has."""
        self.device = torch.device(device)
        self.rules = (*logit_rules(ops, vocab_size, num_slots, num_eos, self.device), *more)
        self.staging = RowStaging(self.rules, vocab_size, num_slots)
        self.on_device = Sampler(ops, vocab_size, self.rules, self.device)

    def stage(self, rows: list[SampleRow]) -> StagedRows:
        """Rows at the positions they say; one that is not its slot's yet joins."""
        for row in rows:
            if self.staging.get(row.slot) is not row:
                self.staging.join(row)
        return self.staging.stage(rows, [row.position for row in rows])

    def sample(self, logits: Tensor, rows: list[SampleRow]) -> SampledTokens:
        return self.on_device.sample(logits, self.stage(rows))
