"""Implements thinking_budget: after a number of reasoning tokens, the end delimiter is forced,
token by token.

    outside --the start delimiter is complete--> inside --the end delimiter is complete--> outside

With a start delimiter, a choice begins outside. Without one, it begins inside: its prompt ends in
reasoning, which then comes only once. Tokens inside count over all stretches of reasoning; those of
a start delimiter do not count. If the model has begun an end by itself, that end is completed. A
grammar may not allow the end yet, for example inside a character of several tokens. Then it is
forced later.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from pdserve.engine.sampling.rules.masks.source import MASK_DTYPE
from pdserve.engine.sampling.sample_row import SampleRow


class Delimiter:
    """Finds a sequence of tokens in a stream, one token at a time (Knuth, Morris and Pratt).
    num_matched: number of its first tokens with which the stream ends now."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        self.num_matched = 0
        self._fallback = [0] * len(self.token_ids)
        length = 0
        for place in range(1, len(self.token_ids)):
            while length and self.token_ids[place] != self.token_ids[length]:
                length = self._fallback[length - 1]
            length += self.token_ids[place] == self.token_ids[length]
            self._fallback[place] = length

    def push(self, token: int) -> bool:
        """Add a token. Returns True if it completes the sequence, which then begins anew."""
        while self.num_matched and token != self.token_ids[self.num_matched]:
            self.num_matched = self._fallback[self.num_matched - 1]
        self.num_matched += token == self.token_ids[self.num_matched]
        if self.num_matched < len(self.token_ids):
            return False
        self.num_matched = 0
        return True


class ThinkingBudget:
    """A MaskSource."""

    name: ClassVar[str] = "thinking_budget"

    def __init__(self, settings: Mapping[str, Any], gives_way: bool = False) -> None:
        """Read the settings of a request. gives_way: do not force an end that the mask does not
        allow. Otherwise nothing is left to draw in that case."""
        self._gives_way = gives_way
        self._budget: int = settings["tokens"]
        self._end = Delimiter(settings["end"])
        start = settings.get("start")
        self._start = Delimiter(start) if start is not None else None
        self._is_inside = start is None
        self._num_inside = 0
        self._num_seen = 0

    def needs_values(self, position: int) -> bool:
        """True if the budget may be spent: at most all generated tokens lie inside."""
        return position >= self._budget and (self._is_inside or self._start is not None)

    def narrow(self, row: SampleRow, mask: np.ndarray) -> bool:
        for token in row.token_ids[row.num_prompt_tokens + self._num_seen :]:
            self._push(token)
        self._num_seen = row.num_known
        if not self._is_inside or self._num_inside < self._budget:
            return False
        forced = self._end.token_ids[self._end.num_matched]
        allowed = mask[forced // 32] & MASK_DTYPE(1 << forced % 32)
        if not allowed and self._gives_way:
            return False
        mask.fill(0)
        mask[forced // 32] = allowed
        return True

    def _push(self, token: int) -> None:
        if self._is_inside:
            self._num_inside += 1
            self._is_inside = not self._end.push(token)
        elif self._start is not None:
            self._is_inside = self._start.push(token)
