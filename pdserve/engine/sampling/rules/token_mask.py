"""Implements allowed_token_ids, bad_words, thinking_budget and grammar: they say which tokens a row
may draw at all.

All masks of a row are combined on the host. So an empty mask is noticed before anything is drawn,
and its request ends with an error. For a row that asks for masks, this rule also hides stop tokens
before min_tokens, unless nothing else is allowed. The device keeps nothing: each step that needs a
mask brings it, one bit per token.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.sampling.rules.logit_rule import AskedRows, LogitRule
from pdserve.engine.sampling.rules.masks.allowed_tokens import AllowedTokens
from pdserve.engine.sampling.rules.masks.bad_words import BadWords
from pdserve.engine.sampling.rules.masks.grammar_mask import GrammarFiller, GrammarMask
from pdserve.engine.sampling.rules.masks.source import (
    MaskFailed,
    MaskSource,
    full_mask,
    mask_of,
    num_words,
)
from pdserve.engine.sampling.rules.masks.thinking_budget import ThinkingBudget
from pdserve.engine.sampling.sample_row import SampleRow
from pdserve.engine.sampling.staged_rows import Arrays
from pdserve.kernels.ops import Ops
from pdserve.protocol.logit_rules import asks_mask

MASK_S = 0.1


@dataclass
class MaskTotals:
    """Running totals since start."""

    num_masks: int = 0
    seconds: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)  # requests that masks ended, by reason

    def clear(self) -> None:
        self.num_masks, self.seconds = 0, 0.0
        self.errors.clear()


@dataclass(frozen=True)
class Masked:
    """The mask sources of one row."""

    sources: list[MaskSource]
    grammar: GrammarMask | None  # the one among the sources
    stops: np.ndarray | None  # uint32 [words], the tokens that end the row; None without min_tokens


class TokenMask(LogitRule[Masked]):
    """The rule that masks tokens. mask_s: see GrammarFiller."""

    name = "token_mask"
    example: ClassVar = {"logit_rules": {"allowed_token_ids": [0]}}

    def __init__(
        self,
        ops: Ops,
        vocab_size: int,
        num_slots: int,
        device: torch.device,
        mask_s: float = MASK_S,
    ) -> None:
        self.totals = MaskTotals()
        self._ops = ops
        self._vocab_size = vocab_size
        self._width = num_words(vocab_size)
        self._full = full_mask(vocab_size)
        self._filler = GrammarFiller(self._width, mask_s)

    def join(self, row: SampleRow) -> Masked | None:
        """AssertionError if the row's grammar is not built yet."""
        asked = row.sampling.logit_rules
        if asked is None or not asks_mask(asked):
            return None
        vocab = self._vocab_size
        sources: list[MaskSource] = []
        grammar: GrammarMask | None = None
        if "allowed_token_ids" in asked:
            sources.append(AllowedTokens(asked["allowed_token_ids"], vocab))
        if "bad_words" in asked:
            sources.append(BadWords(asked["bad_words"], vocab))
        if "grammar" in asked:
            assert row.grammar is not None, "a row with a grammar joins before that is built"
            grammar = GrammarMask(row.grammar, row.stop_token_ids, vocab)
            sources.append(grammar)
        if "thinking_budget" in asked:  # after the grammar, to which it gives way
            settings, has_grammar = asked["thinking_budget"], "grammar" in asked
            sources.append(ThinkingBudget(settings, gives_way=has_grammar))
        has_stops = row.sampling.min_tokens and row.stop_token_ids
        stops = mask_of(row.stop_token_ids, vocab) if has_stops else None
        return Masked(sources, grammar, stops)

    def needs_values_at(self, state: Masked, position: int) -> bool:
        return any(source.needs_values(position) for source in state.sources)

    def stage(self, rows: AskedRows[Masked], num_rows: int) -> Arrays:
        """Make masks. If a row's mask cannot be made, the row gets an error instead, and what is
        drawn for it is dropped."""
        began = time.perf_counter()
        self._filler.fill([(row, state.grammar) for _, row, state in rows if state.grammar])
        made = []
        for at, row, state in rows:
            try:
                mask = self._mask(row, state)
            except MaskFailed as failure:
                if not row.error:
                    row.error = str(failure)
                    count = self.totals.errors.get(failure.reason, 0)
                    self.totals.errors[failure.reason] = count + 1
                continue
            if mask is not None:
                made.append((at, mask))
        self.totals.num_masks += len(made)
        self.totals.seconds += time.perf_counter() - began
        if not made:
            return {}
        return {
            "rows": np.array([at for at, _ in made], dtype=np.int32),
            "words": np.concatenate([mask for _, mask in made]).view(np.int32),
        }

    def apply(self, logits: Tensor, staged: Mapping[str, Tensor]) -> None:
        words = staged["words"].view(-1, self._width)
        self._ops.sampling.apply_token_mask(logits, staged["rows"], words)

    def row_bytes(self) -> int:
        return 4 * self._width

    def _mask(self, row: SampleRow, state: Masked) -> np.ndarray | None:
        """Returns uint32 `[words]`; None if everything is allowed. Raises MaskFailed."""
        mask = self._full.copy()
        limits = [source.name for source in state.sources if source.narrow(row, mask)]
        if not mask.any():
            raise MaskFailed(
                f"logit_rules: {' and '.join(limits)} leave no token to draw at position "
                f"{row.position}: allow more",
                "empty",
            )
        if state.stops is not None and row.position < row.sampling.min_tokens:
            others = mask & ~state.stops
            if others.any():
                return others
        return mask if limits else None
