"""Implements grammar: a choice follows a grammar, and ends where the grammar accepts.

The row's copy of the grammar advances by the tokens whose values are known. Where it accepts, the
tokens that end the choice are allowed, too. With ignore_eos it may happen that nothing else can
follow and no token ends the choice; then the model's own ends of sequence are allowed.
"""

import time
from typing import ClassVar

import numpy as np

from pdserve.engine.grammars.grammar import Grammar, GrammarFailed
from pdserve.engine.sampling.rules.masks.source import MaskFailed, mask_of
from pdserve.engine.sampling.sample_row import SampleRow

MAX_SLOW_MASKS = 3


class GrammarMask:
    """A MaskSource. prototype: shared by the request's choices and never advanced. mask_s: seconds
    of this thread's own time that a mask may take. The third mask that takes longer ends the
    request."""

    name: ClassVar[str] = "grammar"

    def __init__(
        self, prototype: Grammar, stop_token_ids: frozenset[int], vocab_size: int, mask_s: float
    ) -> None:
        self._grammar = prototype.copy()
        self._mask_s = mask_s
        self._endings = stop_token_ids | frozenset(prototype.eos_token_ids)
        self._stops = mask_of(stop_token_ids, vocab_size)
        self._eos = mask_of(prototype.eos_token_ids, vocab_size)
        self._own = np.zeros_like(self._stops)
        self._is_over = False  # an ending token came, and did not end the choice
        self._num_seen = 0
        self._num_slow = 0

    def needs_values(self, position: int) -> bool:
        return position > 0

    def narrow(self, row: SampleRow, mask: np.ndarray) -> bool:
        for token in row.token_ids[row.num_prompt_tokens + self._num_seen :]:
            self._advance(token)
            self._num_seen += 1
        own = self._own
        if self._is_over:
            own.fill(0)
        else:
            self._fill(row.position)
        if self._is_over or self._grammar.is_accepting():
            own |= self._stops
            if not own.any():
                own |= self._eos
        mask &= own
        return True

    def _advance(self, token: int) -> None:
        if self._is_over:
            is_allowed = token in self._endings
        else:
            is_allowed = self._grammar.advance(token)
            if not is_allowed and token in self._endings and self._grammar.is_accepting():
                is_allowed = self._is_over = True
        if not is_allowed:
            raise MaskFailed(
                f"logit_rules: grammar does not allow token {token} at position {self._num_seen}, "
                "which the choice already has: send the request again",
                "replay",
            )

    def _fill(self, position: int) -> None:
        began = time.thread_time()
        try:
            self._grammar.fill(self._own)
        except GrammarFailed as error:
            raise MaskFailed(
                f"logit_rules: grammar cannot go on at position {position}: {error}; simplify it",
                "limit",
            ) from error
        self._num_slow += time.thread_time() - began > self._mask_s
        if self._num_slow >= MAX_SLOW_MASKS:
            raise MaskFailed(
                f"logit_rules: grammar took more than engine.grammar_mask_s ({self._mask_s:g} s) "
                f"for a mask {MAX_SLOW_MASKS} times: simplify it, or raise engine.grammar_mask_s",
                "mask-time",
            )
