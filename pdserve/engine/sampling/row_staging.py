"""The sampler's host half: turns the parameters of a step's rows into small arrays, which go to the
device in one copy.

There are temperatures, keys and filters if a row is drawn, and the arrays of each rule that a row
asks for. Rows that are greedy and unedited need none. Remembers the row of each slot. Knows neither
logits nor device. Called by the planner.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pdserve.engine.sampling.randomness import Purpose, row_keys
from pdserve.engine.sampling.rules.logit_rule import AskedRows, floats
from pdserve.engine.sampling.rules.registry import Rules
from pdserve.engine.sampling.rules.token_mask import MaskTotals, TokenMask
from pdserve.engine.sampling.sample_row import SampleRow
from pdserve.engine.sampling.staged_rows import Arrays, StagedRows


class RowStaging:
    def __init__(self, rules: Rules, vocab_size: int, num_slots: int) -> None:
        self._rules = rules
        self._vocab_size = vocab_size
        self._num_slots = num_slots
        self._rows: dict[int, SampleRow] = {}  # by slot

    @property
    def mask_totals(self) -> MaskTotals:
        """Totals of the rule that masks tokens."""
        found = (rule.totals for rule in self._rules if isinstance(rule, TokenMask))
        return next(found, MaskTotals())  # a paper model has no rules

    def get(self, slot: int) -> SampleRow | None:
        """The row that has joined in this slot."""
        return self._rows.get(slot)

    def join(self, row: SampleRow) -> SampleRow:
        """Take in a row that samples for the first time in its slot. Its position must be set.
        AssertionError for a slot outside 1..num_slots."""
        assert 0 < row.slot <= self._num_slots, f"slot {row.slot} lies outside 1..{self._num_slots}"
        states = ((place, rule.join(row)) for place, rule in enumerate(self._rules))
        row.states = tuple((place, state) for place, state in states if state is not None)
        self._rows[row.slot] = row
        return row

    def release(self, slot: int) -> None:
        """Forget the row of a slot whose sequence is gone."""
        self._rows.pop(slot, None)

    def needs_values(self, row: SampleRow, position: int) -> bool:
        """True if the row can be staged at this position only when all tokens before are known."""
        rules = self._rules
        return any(rules[place].needs_values_at(state, position) for place, state in row.states)

    def stage(self, rows: Sequence[SampleRow], positions: Sequence[int]) -> StagedRows:
        """Make the message for these rows at these positions."""
        asked: dict[int, AskedRows[Any]] = {}
        for index, (row, position) in enumerate(zip(rows, positions, strict=True)):
            row.position = position
            for place, state in row.states:
                asked.setdefault(place, []).append((index, row, state))
        staged = {
            self._rules[place].name: self._rules[place].stage(asked[place], len(rows))
            for place in sorted(asked)
        }
        scored = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
        return StagedRows(
            num_rows=len(rows),
            draws=self._draws(rows),
            rules={name: arrays for name, arrays in staged.items() if arrays},
            scored_rows=tuple(scored),
            num_top=tuple(rows[i].sampling.logprobs or 0 for i in scored),
        )

    def _draws(self, rows: Sequence[SampleRow]) -> Arrays:
        """Temperatures and keys if a row is drawn, and filters if a drawn row has one."""
        params = [row.sampling for row in rows]
        drawn = [p for p in params if not p.greedy]
        if not drawn:
            return {}
        numbers = np.array(
            [(p.seed or 0, r.choice, r.position) for p, r in zip(params, rows, strict=True)],
            np.int64,
        )
        seeds, choices, positions = numbers.T
        arrays = {
            "keys": row_keys(seeds, choices, positions, Purpose.SAMPLE),
            "temperature": floats(0.0 if p.greedy else p.temperature for p in params),
        }
        vocab = self._vocab_size
        if any(0 < p.top_k < vocab or p.top_p < 1.0 or p.min_p > 0.0 for p in drawn):
            top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
            arrays["top_k"] = np.array(top_k, dtype=np.int32)
            arrays["top_p"] = floats(p.top_p for p in params)
            arrays["min_p"] = floats(p.min_p for p in params)
        return arrays
