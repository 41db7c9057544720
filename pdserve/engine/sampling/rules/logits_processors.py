"""Implements logits_processors: functions of `LLM`'s user that change logits.

A function gets the tokens that a choice has generated so far, as a list, and its logits, float32
`[vocab]` on the engine's device. It returns logits of the same shape. Functions cannot be sent to
other processes. So the device half finds in this object what the host half left there: a step is
sampled right after it is staged.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.sampling.rules.logit_rule import AskedRows, LogitRule
from pdserve.engine.sampling.sample_row import SampleRow
from pdserve.engine.sampling.staged_rows import Arrays
from pdserve.kernels.ops import Ops

Processor = Callable[[list[int], Tensor], Tensor]


class LogitsProcessors(LogitRule[Sequence[Processor]]):
    name = "logits_processors"
    needs_values: ClassVar[bool] = True

    def __init__(self, ops: Ops, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._calls: list[tuple[int, list[int], Sequence[Processor]]] = []

    def join(self, row: SampleRow) -> Sequence[Processor] | None:
        return (row.sampling.logit_rules or {}).get(self.name)

    def stage(self, rows: AskedRows[Sequence[Processor]], num_rows: int) -> Arrays:
        self._calls = [
            (at, row.token_ids[row.num_prompt_tokens :], processors) for at, row, processors in rows
        ]
        return {"rows": np.array([at for at, _, _ in rows], dtype=np.int32)}

    def apply(self, logits: Tensor, staged: Mapping[str, Tensor]) -> None:
        """Raises what a function raises, and ValueError if it returns something other than
        logits."""
        for at, tokens, processors in self._calls:
            row = logits[at]
            for processor in processors:
                changed = processor(list(tokens), row)
                if not isinstance(changed, Tensor) or changed.shape != row.shape:
                    raise ValueError(
                        f"logits_processors: {processor!r} must return the logits, a tensor of "
                        f"shape {tuple(row.shape)}, not {changed!r:.80}"
                    )
                row = changed
            logits[at] = row
        self._calls = []
