"""Implements allowed_token_ids: no other token is drawn."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from pdserve.engine.sampling.rules.masks.source import mask_of
from pdserve.engine.sampling.sample_row import SampleRow


class AllowedTokens:
    """A MaskSource."""

    name: ClassVar[str] = "allowed_token_ids"

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        self._allowed = mask_of(token_ids, vocab_size)

    def needs_values(self, position: int) -> bool:
        return False

    def narrow(self, row: SampleRow, mask: np.ndarray) -> bool:
        mask &= self._allowed
        return True
