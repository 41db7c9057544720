"""The layout of the inboxes in each rank's region, which is memory that all ranks write to.

It knows sizes alone. triton_ops.py, peer_exchange.py and peer_rank.py pass the places to the
kernels.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from pdserve.kernels.collective.ops import slice_of
from pdserve.kernels.launching.launch import cdiv, next_power_of_2, power_of_2_below

WORD = 8
ALIGNED = 2  # words; what is written bare moves in pieces of 16 bytes
# Smaller pieces cost the host more time than they save on the device. Up to WHOLE_BYTES are not cut
# at all: models that are so narrow hardly have a product that is long enough to hide a transfer.
PIECE_BYTES = 16 << 20
WHOLE_BYTES = 32 << 20
LEAST_PIECE = 2048  # rows
# Up to so many bytes are read from other ranks' memory, by two ranks and by more.
PULLED_BYTES_OF_TWO = 8 << 20
PULLED_BYTES = 2 << 20
PLACES = 3  # for rows that other ranks read


@dataclass(frozen=True)
class MovesLayout:
    """Offsets, in words of 8 bytes, of what moves between ranks without being summed.

    size: number of ranks.
    dtype: dtype of the logits.
    max_rows: rows that sample in a step.
    vocab_size: columns of the logits.
    begin: the first word of this layout.
    token_block: tokens that one program moves.
    chunk: numbers of logits that share one flag.
    """

    size: int
    dtype: torch.dtype
    max_rows: int
    vocab_size: int
    begin: int
    token_block: int
    chunk: int

    @property
    def token_slots(self) -> int:
        return cdiv(self.max_rows, self.token_block)

    @property
    def chunks(self) -> int:
        """Number of chunks that one rank's logits have."""
        widest = slice_of(self.vocab_size, 0, self.size)
        return cdiv(self.max_rows * (widest.stop - widest.start), self.chunk)

    @property
    def tokens(self) -> int:
        return self.begin

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
    def end(self) -> int:
        return self.logits(self.size)


class Piece(NamedTuple):
    """Many rows that are sent and added up by kernels of their own.

    number: place of the piece among those that are summed at once.
    rows: the rows of the call.
    slot: the first slot of the piece.
    """

    number: int
    rows: slice
    slot: int


@dataclass(frozen=True)
class RegionLayout:
    """Offsets, in words of 8 bytes, of what the ranks of one home write to each other.

    size: number of ranks.
    width: columns of the residual stream.
    dtype: dtype of the residual stream and of the logits.
    max_rows: rows that sample in a step.
    vocab_size: columns of the logits.
    step_rows: rows of the largest step.
    few_rows: up to so many rows travel as words with their epochs, which is faster than two
        kernels.
    most_rows: rows that are summed at once.
    piece_rows: rows of a piece; 0: all, if they have at most WHOLE_BYTES, else as many as
        PIECE_BYTES hold, but at least LEAST_PIECE. Rows are cut so that some are sent while others
        are made or added up.
    pulled_rows: up to so many rows of a product, and more than few_rows, are read from the memory
        of the rank that made them; 0: as many as PULLED_BYTES hold.
    least_inputs: products of fewer inputs are not cut: they take less time than their rows are on
        their way.
    programs: the most programs that add up many rows, the same on all ranks.
    send_programs: programs that send a piece beside other work. They should fill few
        multiprocessors.
    send_warps: warps of each of these programs.
    send_tile: rows that each of them moves at once, a power of two.
    token_block: tokens that one program moves.
    chunk: numbers of logits that share one flag.
    """

    size: int
    width: int
    dtype: torch.dtype
    max_rows: int
    vocab_size: int
    step_rows: int
    few_rows: int = 64
    pulled_rows: int = 0
    most_rows: int = 8192
    piece_rows: int = 0
    least_inputs: int = 2048
    programs: int = 512
    send_programs: int = 32
    send_warps: int = 16
    send_tile: int = 4
    token_block: int = 128
    chunk: int = 4096

    @cached_property
    def payloads(self) -> int:
        """Number of payloads of 4 bytes that a row has."""
        return self.width * self.dtype.itemsize // 4

    @cached_property
    def payload_block(self) -> int:
        return next_power_of_2(self.payloads)

    @cached_property
    def row_words(self) -> int:
        """Number of words of a row that is written bare."""
        return words_of_row(self.width, self.dtype)

    @cached_property
    def many_rows(self) -> int:
        """Number of rows that are summed at once."""
        return min(self.step_rows, self.most_rows)

    @cached_property
    def slot_rows(self) -> int:
        """Number of rows of a slot. If there are more than two ranks, each adds up one of them."""
        return 1 if self.size == 2 else self.size

    @cached_property
    def many_slots(self) -> int:
        return cdiv(self.many_rows, self.slot_rows)

    @cached_property
    def piece_slots(self) -> int:
        """Number of slots of every piece but the last."""
        row_bytes = self.row_words * WORD
        if not self.piece_rows and self.many_rows * row_bytes <= WHOLE_BYTES:
            return self.many_slots
        held = max(LEAST_PIECE, power_of_2_below(PIECE_BYTES // row_bytes))
        return min(self.many_slots, max(1, (self.piece_rows or held) // self.slot_rows))

    @cached_property
    def num_pieces(self) -> int:
        """Number of pieces that are summed at once."""
        return cdiv(self.many_slots, self.piece_slots)

    @cached_property
    def piece_programs(self) -> int:
        """The most programs that add up a piece. A piece has as many flags from every rank."""
        return min(self.piece_slots, self.programs)

    def rounds(self, num_rows: int) -> list[list[Piece]]:
        """Cuts the rows of a call into rounds of pieces. They are always cut at the same places,
        and each piece takes the place of the piece with its number in the round before."""
        each = self.piece_slots * self.slot_rows
        rounds = []
        for begin in range(0, num_rows, self.many_rows):
            end = min(begin + self.many_rows, num_rows)
            rounds.append(
                [
                    Piece(number, slice(start, min(start + each, end)), number * self.piece_slots)
                    for number, start in enumerate(range(begin, end, each))
                ]
            )
        return rounds

    def product_rows(self, num_rows: int) -> list[slice]:
        """Cuts the rows of a product whose results are summed. It is cut at the pieces of the first
        round; the last part has at least half a piece and all remaining rows."""
        each = self.piece_slots * self.slot_rows
        count = max(1, min((num_rows + each // 2) // each, self.num_pieces))
        starts = [number * each for number in range(count)]
        return [slice(*ends) for ends in zip(starts, [*starts[1:], num_rows], strict=True)]

    @property
    def inbox_rows(self) -> int:
        """Number of places for one row each: for even and odd calls, from every other rank. With
        more than two ranks there are as many again for the sums."""
        return 2 * (self.size - 1) * self.many_slots * (1 if self.size == 2 else 2)

    @property
    def few(self) -> int:
        """Offset of the rows that travel as words. They come first."""
        return 0

    @cached_property
    def many_flags(self) -> int:
        return self.few + 2 * self.size * self.few_rows * self.payload_block

    @cached_property
    def many(self) -> int:
        return self.many_flags + aligned(self.inbox_rows)

    @cached_property
    def most_pulled(self) -> int:
        """Number of rows that other ranks read at once, or 0 if no more than few_rows could be."""
        held = (PULLED_BYTES_OF_TWO if self.size == 2 else PULLED_BYTES) // (self.row_words * WORD)
        most = min(self.step_rows, self.pulled_rows or held)
        return most if most > self.few_rows else 0

    @property
    def pulled_flags(self) -> int:
        """Offset of the flags of rows that other ranks read. For even and odd calls, there is one
        for each rank that raises it."""
        return self.many + self.inbox_rows * self.row_words

    def pulled(self, place: int) -> int:
        """Offset of one of the PLACES for rows that other ranks read."""
        flags = aligned(2 * self.size)
        return self.pulled_flags + flags + place * self.most_pulled * self.row_words

    @property
    def moves(self) -> MovesLayout:
        """The layout of tokens and logits, which come after all that is summed."""
        return MovesLayout(
            self.size,
            self.dtype,
            self.max_rows,
            self.vocab_size,
            begin=self.pulled(PLACES),
            token_block=self.token_block,
            chunk=self.chunk,
        )

    @property
    def num_bytes(self) -> int:
        return self.moves.end * WORD


@dataclass(frozen=True)
class ExchangeLayout:
    """Offsets, in words of 8 bytes, of what all ranks of a stage write to each other.

    num_homes: number of homes.
    home_size: ranks of each home.
    width: columns of the widest rows.
    dtype: dtype of these rows and of the logits.
    max_rows: rows that sample in a step, of all homes together.
    vocab_size: columns of the logits.
    step_rows: rows of a home's largest step.
    most_rows: rows of a home that cross at once. More rows cross in pieces.
    programs: the most programs of a kernel, the same on all ranks.
    token_block, chunk: see `MovesLayout`.
    """

    num_homes: int
    home_size: int
    width: int
    dtype: torch.dtype
    max_rows: int
    vocab_size: int
    step_rows: int
    most_rows: int = 4096
    programs: int = 256
    token_block: int = 128
    chunk: int = 4096

    @property
    def size(self) -> int:
        """Number of ranks that the stage has."""
        return self.num_homes * self.home_size

    @property
    def area_words(self) -> int:
        """Words of an area, which is what one program of one rank writes to another rank in one
        call."""
        rows = cdiv(min(self.step_rows, self.most_rows), self.programs)
        return rows * words_of_row(self.width, self.dtype)

    @property
    def gather_flags(self) -> int:
        return 0

    @property
    def gathered(self) -> int:
        """Offset of the rows of other homes, for even and odd calls."""
        return self.gather_flags + aligned(2 * (self.num_homes - 1) * self.programs)

    @property
    def add_flags(self) -> int:
        return self.gathered + 2 * (self.num_homes - 1) * self.programs * self.area_words

    @property
    def added(self) -> int:
        """Offset of the partial rows of other ranks, for even and odd calls."""
        return self.add_flags + aligned(2 * (self.size - 1) * self.programs)

    @property
    def moves(self) -> MovesLayout:
        """The layout of tokens and logits, which come after all rows."""
        return MovesLayout(
            self.size,
            self.dtype,
            self.max_rows,
            self.vocab_size,
            begin=self.added + 2 * (self.size - 1) * self.programs * self.area_words,
            token_block=self.token_block,
            chunk=self.chunk,
        )

    @property
    def num_bytes(self) -> int:
        return self.moves.end * WORD


def aligned(words: int) -> int:
    """Rounds a number of words up, so that they are whole pieces of 16 bytes."""
    return cdiv(words, ALIGNED) * ALIGNED


def words_of_row(width: int, dtype: torch.dtype) -> int:
    """Number of words that a row takes when it is written bare."""
    return aligned(cdiv(width * dtype.itemsize, WORD))
