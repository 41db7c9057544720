"""A mask source says which tokens one row may draw next. Masks are bits of 32-bit words, as the
kernel `apply_token_mask` reads them."""

from collections.abc import Iterable
from typing import ClassVar, Protocol

import numpy as np

from pdserve.engine.sampling.sample_row import SampleRow

MASK_DTYPE = np.uint32


class MaskFailed(Exception):
    """A row's mask cannot be made, so its request ends. reason: one of a few words, the label of a
    metric."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class MaskSource(Protocol):
    """The state of one mask rule for one row. name: of the rule, as in requests."""

    name: ClassVar[str]

    def needs_values(self, position: int) -> bool:
        """True if the mask at this position depends on the values of tokens before it."""

    def narrow(self, row: SampleRow, mask: np.ndarray) -> bool:
        """Clear the bits of tokens that the row may not draw at its position; uint32 `[words]`.
        Returns True if the source limits anything there. Raises MaskFailed."""


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def full_mask(vocab_size: int) -> np.ndarray:
    """Returns uint32 `[words]` with the bits of all tokens, and no bit beyond the vocabulary."""
    mask = np.full(num_words(vocab_size), 0xFFFFFFFF, dtype=MASK_DTYPE)
    if vocab_size % 32:
        mask[-1] = (1 << vocab_size % 32) - 1
    return mask


def mask_of(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Returns uint32 `[words]` with the bits of these tokens; ids beyond the vocabulary are left
    out."""
    ids = np.fromiter(token_ids, dtype=np.int64)
    ids = ids[ids < vocab_size]
    bits = np.zeros(32 * num_words(vocab_size), dtype=bool)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view(MASK_DTYPE)
