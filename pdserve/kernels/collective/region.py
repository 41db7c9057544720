"""Where the inboxes lie in each rank's region of memory that all ranks write to.

Knows sizes alone; triton_ops.py hands the places to the kernels.
"""

from dataclasses import dataclass

import torch

from pdserve.kernels.collective.ops import slice_of
from pdserve.kernels.launching.launch import cdiv, next_power_of_2

WORD = 8
ALIGNED = 2  # words: what is written bare moves in pieces of 16 bytes


@dataclass(frozen=True)
class RegionLayout:
    """Offsets in words of 8 bytes. width: of the residual stream; max_rows: that sample in a step;
    vocab_size: of the logits, of the same dtype; step_rows: of the largest step.

    few_rows: that travel as words with their epochs; most_rows: that are summed at once;
    token_block: tokens that one program moves; chunk: numbers of logits behind one flag.
    """

    size: int
    width: int
    dtype: torch.dtype
    max_rows: int
    vocab_size: int
    step_rows: int
    few_rows: int = 32
    most_rows: int = 8192
    token_block: int = 128
    chunk: int = 4096

    @property
    def payloads(self) -> int:
        """Of 4 bytes, in a row."""
        return self.width * self.dtype.itemsize // 4

    @property
    def payload_block(self) -> int:
        return next_power_of_2(self.payloads)

    @property
    def row_words(self) -> int:
        """Of a row that is written bare."""
        return aligned(cdiv(self.width * self.dtype.itemsize, WORD))

    @property
    def many_rows(self) -> int:
        """That are summed at once."""
        return min(self.step_rows, self.most_rows)

    @property
    def many_slots(self) -> int:
        """A program has one: a row, or of more than two ranks as many rows as there are ranks."""
        return self.many_rows if self.size == 2 else cdiv(self.many_rows, self.size)

    @property
    def many_pieces(self) -> int:
        """Of a row each: for even and odd calls, from every other rank, and of more than two ranks
        again for the sums."""
        return 2 * (self.size - 1) * self.many_slots * (1 if self.size == 2 else 2)

    @property
    def token_slots(self) -> int:
        return cdiv(self.max_rows, self.token_block)

    @property
    def chunks(self) -> int:
        """Of one rank's logits."""
        widest = slice_of(self.vocab_size, 0, self.size)
        return cdiv(self.max_rows * (widest.stop - widest.start), self.chunk)

    @property
    def few(self) -> int:
        """The rows that travel as words come first."""
        return 0

    @property
    def many_flags(self) -> int:
        return self.few + 2 * self.size * self.few_rows * self.payload_block

    @property
    def many(self) -> int:
        return self.many_flags + aligned(self.many_pieces)

    @property
    def tokens(self) -> int:
        return self.many + self.many_pieces * self.row_words

    @property
    def credits(self) -> int:
        return self.tokens + 2 * self.token_slots * self.token_block

    def flags(self, source: int) -> int:
        return self.credits + (1 + source) * aligned(self.chunks)

    def logits(self, source: int) -> int:
        return self.flags(self.size) + source * self.chunks * (
            self.chunk * self.dtype.itemsize // WORD
        )

    @property
    def num_bytes(self) -> int:
        return self.logits(self.size) * WORD


def aligned(words: int) -> int:
    """So many, and those that fill up what is written bare."""
    return cdiv(words, ALIGNED) * ALIGNED
