"""Implements grammar: a choice follows a grammar, and ends where the grammar accepts.

The row's copy of the grammar advances by the tokens whose values are known. Where it accepts, the
tokens that end the choice are allowed, too. With ignore_eos it may happen that nothing else can
follow and no token ends the choice; then the model's own ends of sequence are allowed. The masks of
a step's rows are filled together.
"""

import time
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from pdserve.engine.grammars.grammar import Grammar, GrammarFailed
from pdserve.engine.sampling.rules.masks.source import MASK_DTYPE, MaskFailed, mask_of
from pdserve.engine.sampling.sample_row import SampleRow

MAX_SLOW_MASKS = 3
ALONE_STEPS = 16


class GrammarMask:
    """A MaskSource, which `GrammarFiller` fills before it narrows. prototype: shared by the
    request's choices and never advanced."""

    name: ClassVar[str] = "grammar"

    def __init__(self, prototype: Grammar, stop_token_ids: frozenset[int], vocab_size: int) -> None:
        self.grammar = prototype.copy()
        self._endings = stop_token_ids | frozenset(prototype.eos_token_ids)
        self._stops = mask_of(stop_token_ids, vocab_size)
        self._eos = mask_of(prototype.eos_token_ids, vocab_size)
        self._own = np.zeros_like(self._stops)
        self._is_over = False  # an ending token came, and did not end the choice
        self._num_seen = 0
        self._failure: MaskFailed | None = None
        self.num_slow = 0

    def needs_values(self, position: int) -> bool:
        return position > 0

    def advance(self, row: SampleRow) -> bool:
        """Advance by the tokens whose values are known. Returns True if the mask then depends on
        the grammar."""
        try:
            for token in row.token_ids[row.num_prompt_tokens + self._num_seen :]:
                self._advance(token)
                self._num_seen += 1
        except MaskFailed as error:
            self.fail(error)
        if self._is_over:
            self._own = np.zeros_like(self._stops)
        return not self._is_over and self._failure is None

    def take(self, mask: np.ndarray) -> None:
        """Keep the mask that the grammar filled; it is changed later."""
        self._own = mask

    def fail(self, failure: MaskFailed) -> None:
        """Let `narrow` raise this."""
        self._failure = failure

    def narrow(self, row: SampleRow, mask: np.ndarray) -> bool:
        if self._failure is not None:
            raise self._failure
        own = self._own
        if self._is_over or self.grammar.is_accepting():
            own |= self._stops
            if not own.any():
                own |= self._eos
        mask &= own
        return True

    def _advance(self, token: int) -> None:
        if self._is_over:
            is_allowed = token in self._endings
        else:
            is_allowed = self.grammar.advance(token)
            if not is_allowed and token in self._endings and self.grammar.is_accepting():
                is_allowed = self._is_over = True
        if not is_allowed:
            raise MaskFailed(
                f"logit_rules: grammar does not allow token {token} at position {self._num_seen}, "
                "which the choice already has: send the request again",
                "replay",
            )


class GrammarFiller:
    """Fills the grammar masks of a step's rows.

    All masks are filled in one call, so nobody knows how long each takes. If a call takes longer
    than a single mask may, the masks of the next ALONE_STEPS steps are filled one by one. Then the
    third mask of a row that takes too long ends its request.

    num_words: number of words of a mask.
    mask_s: seconds that a mask may take; of this thread's own time, if it is filled alone.
    """

    def __init__(self, num_words: int, mask_s: float) -> None:
        self._num_words = num_words
        self._mask_s = mask_s
        self._num_alone = 0  # steps to come whose masks are filled one by one

    def fill(self, asked: Sequence[tuple[SampleRow, GrammarMask]]) -> None:
        """Advance these rows and fill their masks. The position of each row is set."""
        ready = [(row, source) for row, source in asked if source.advance(row)]
        if not ready:
            return
        masks = np.empty((len(ready), self._num_words), dtype=MASK_DTYPE)
        for (_, source), mask in zip(ready, masks, strict=True):
            source.take(mask)
        if len(ready) == 1 or self._num_alone:
            self._num_alone = max(0, self._num_alone - 1)
            for (row, source), mask in zip(ready, masks, strict=True):
                self._fill_alone(row, source, mask)
        else:
            self._fill_together(ready, masks)

    def _fill_together(
        self, ready: Sequence[tuple[SampleRow, GrammarMask]], masks: np.ndarray
    ) -> None:
        grammars = [source.grammar for _, source in ready]
        began = time.perf_counter()
        failures = grammars[0].fill_all(grammars, masks)
        if time.perf_counter() - began > self._mask_s:
            self._num_alone = ALONE_STEPS
        for (row, source), failure in zip(ready, failures, strict=True):
            if failure is not None:
                source.fail(_limit(row, failure))

    def _fill_alone(self, row: SampleRow, source: GrammarMask, mask: np.ndarray) -> None:
        began = time.thread_time()
        try:
            source.grammar.fill(mask)
        except GrammarFailed as failure:
            source.fail(_limit(row, failure))
        if time.thread_time() - began <= self._mask_s:
            return
        self._num_alone = ALONE_STEPS
        source.num_slow += 1
        if source.num_slow >= MAX_SLOW_MASKS:
            source.fail(
                MaskFailed(
                    "logit_rules: grammar took more than engine.grammar_mask_s "
                    f"({self._mask_s:g} s) for a mask {MAX_SLOW_MASKS} times: simplify it, or "
                    "raise engine.grammar_mask_s",
                    "mask-time",
                )
            )


def _limit(row: SampleRow, failure: GrammarFailed) -> MaskFailed:
    return MaskFailed(
        f"logit_rules: grammar cannot go on at position {row.position}: {failure}; simplify it",
        "limit",
    )
