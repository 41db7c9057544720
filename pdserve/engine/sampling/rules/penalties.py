"""Implements repetition_penalty, presence_penalty and frequency_penalty, by counts of the tokens of
a slot's sequence.

The counts stay on the device. A row that joins is counted on the host. From then on, every draw
adds itself to the counts, whether or not the host knows its value yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.sampling.rules.logit_rule import AskedRows, LogitRule, floats
from pdserve.engine.sampling.sample_row import SampleRow
from pdserve.engine.sampling.staged_rows import Arrays
from pdserve.kernels.ops import Ops
from pdserve.kernels.sampling.reference import IN_PROMPT


@dataclass
class Counted:
    """Says if the device has counts of the row; then every draw adds its token to them."""

    is_counted: bool = False


class Penalties(LogitRule[Counted]):
    name = "penalties"
    example: ClassVar = {"presence_penalty": 0.5}

    def __init__(self, ops: Ops, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._num_slots = num_slots
        self._device = device
        # int32 [num_slots + 1, vocab], made when it is first needed
        self._counts: Tensor | None = None

    def join(self, row: SampleRow) -> Counted | None:
        s = row.sampling
        asks = s.repetition_penalty != 1.0 or s.presence_penalty or s.frequency_penalty
        return Counted() if asks else None

    def stage(self, rows: AskedRows[Counted], num_rows: int) -> Arrays:
        """AssertionError if a row joins while one of its tokens is in flight."""
        at = [index for index, _, _ in rows]
        slots = np.array([row.slot for _, row, _ in rows], dtype=np.int32)
        params = [row.sampling for _, row, _ in rows]
        arrays = {
            "slots": _spread(slots, at, num_rows),
            "repetition": _spread(
                floats(p.repetition_penalty for p in params), at, num_rows, off=1
            ),
            "frequency": _spread(floats(p.frequency_penalty for p in params), at, num_rows),
            "presence": _spread(floats(p.presence_penalty for p in params), at, num_rows),
            "rows": np.array(at, dtype=np.int64),
            "counts_rows": slots.astype(np.int64) * self._vocab_size,
            "ones": np.ones(len(rows), dtype=np.int32),
        }
        fresh = [row for _, row, state in rows if not state.is_counted]
        if fresh:
            counted = [_count(row) for row in fresh]
            for _, _, state in rows:
                state.is_counted = True
            places = [
                ids + row.slot * self._vocab_size
                for row, (ids, _) in zip(fresh, counted, strict=True)
            ]
            arrays["fresh_slots"] = np.array([row.slot for row in fresh], dtype=np.int64)
            arrays["counted_at"] = np.concatenate(places)
            arrays["counted"] = np.concatenate([amounts for _, amounts in counted])
        return arrays

    def apply(self, logits: Tensor, staged: Mapping[str, Tensor]) -> None:
        counts = self._made()
        if "fresh_slots" in staged:
            counts.index_fill_(0, staged["fresh_slots"], 0)
            counts.view(-1).index_add_(0, staged["counted_at"], staged["counted"])
        settings = (staged[name] for name in ("slots", "repetition", "frequency", "presence"))
        self._ops.sampling.apply_penalties(logits, counts, *settings)

    def sampled(self, token_ids: Tensor, staged: Mapping[str, Tensor]) -> None:
        at = staged["counts_rows"] + token_ids.index_select(0, staged["rows"])
        self._made().view(-1).index_add_(0, at, staged["ones"])

    def state_bytes(self) -> int:
        return (self._num_slots + 1) * self._vocab_size * 4

    def _made(self) -> Tensor:
        if self._counts is None:
            shape = self._num_slots + 1, self._vocab_size
            self._counts = torch.empty(shape, dtype=torch.int32, device=self._device)
        return self._counts


def _spread(values: np.ndarray, at: list[int], num_rows: int, off: float = 0) -> np.ndarray:
    """Returns `[num_rows]` with the values at these rows, and `off` elsewhere."""
    if len(values) == num_rows:
        return values
    spread = np.full(num_rows, off, dtype=values.dtype)
    spread[at] = values
    return spread


def _count(row: SampleRow) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (int64), and the numbers that are added to apply_penalties' counts (int32) for
    each. An id may come twice."""
    known = row.num_known
    assert known == row.position, (
        "a sequence cannot take its first penalised sample while it has tokens in flight"
    )
    tokens = np.array(row.token_ids, dtype=np.int64)
    prompt = np.unique(tokens[: row.num_prompt_tokens])
    amounts = np.ones(len(prompt) + known, dtype=np.int32)
    amounts[: len(prompt)] = IN_PROMPT
    return np.concatenate((prompt, tokens[row.num_prompt_tokens :])), amounts
