"""Implements bad_words: sequences of tokens that a choice never completes.

The token of a one-token sequence is never drawn. In a longer sequence, the last token is hidden
where the choice's generated tokens end with all tokens before it; the prompt does not count.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from pdserve.engine.sampling.rules.masks.source import MASK_DTYPE, mask_of
from pdserve.engine.sampling.sample_row import SampleRow


class BadWords:
    """A MaskSource."""

    name: ClassVar[str] = "bad_words"

    def __init__(self, words: Sequence[Sequence[int]], vocab_size: int) -> None:
        single = [ids[0] for ids in words if len(ids) == 1]
        self._never = ~mask_of(single, vocab_size) if single else None
        # By the second-last token of the sequence: the tokens before the last, backwards, and the
        # last token, which is to be hidden.
        self._longer: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for *beginning, last in words:
            if beginning:
                self._longer[beginning[-1]].append((beginning[::-1], last))

    def needs_values(self, position: int) -> bool:
        return bool(self._longer) and position > 0

    def narrow(self, row: SampleRow, mask: np.ndarray) -> bool:
        if self._never is not None:
            mask &= self._never
        hidden = self._completing(row)
        for token in hidden:
            mask[token // 32] &= ~MASK_DTYPE(1 << token % 32)
        return self._never is not None or bool(hidden)

    def _completing(self, row: SampleRow) -> list[int]:
        """Returns the tokens that would complete a sequence."""
        if not self._longer or not row.num_known:
            return []
        tokens = row.token_ids
        return [
            last
            for backwards, last in self._longer.get(tokens[-1], ())
            if len(backwards) <= row.num_known
            and all(tokens[-1 - i] == token for i, token in enumerate(backwards))
        ]
