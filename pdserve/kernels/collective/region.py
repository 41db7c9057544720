"""Where the inboxes lie in each rank's region of memory that all ranks write to.

Knows sizes alone; triton_ops.py, peer_exchange.py and peer_rank.py hand the places to the kernels.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from pdserve.kernels.collective.ops import slice_of
from pdserve.kernels.launching.launch import cdiv, next_power_of_2

WORD = 8
ALIGNED = 2  # words: what is written bare moves in pieces of 16 bytes


@dataclass(frozen=True)
class MovesLayout:
    """Offsets in words of 8 bytes of what moves between `size` ranks without being summed, from
    word `begin` on. dtype: of the logits. max_rows: rows that sample in a step. token_block: tokens
    that one program moves. chunk: numbers of logits behind one flag."""

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
        """The number of chunks of one rank's logits."""
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
    """Many rows that are sent and added up by kernels of their own. number: of the piece among
    those that are summed at once. slot: its first one."""

    number: int
    rows: slice
    slot: int


@dataclass(frozen=True)
class RegionLayout:
    """Offsets in words of 8 bytes. width: of the residual stream; max_rows: that sample in a step;
    vocab_size: of the logits, of the same dtype; step_rows: of the largest step.

    few_rows: that travel as words with their epochs; most_rows: that are summed at once;
    piece_rows: where these are cut, so that some are sent while others are made or added up;
    programs: the most that add up many rows, the same on all ranks; token_block: tokens that one
    program moves; chunk: numbers of logits behind one flag.

    send_programs, send_warps, send_tile: programs that send a piece beside other work, warps of
    each, and rows that it moves at once (a power of two). They should fill few multiprocessors.
    """

    size: int
    width: int
    dtype: torch.dtype
    max_rows: int
    vocab_size: int
    step_rows: int
    few_rows: int = 32
    most_rows: int = 8192
    piece_rows: int = 2048
    programs: int = 512
    send_programs: int = 32
    send_warps: int = 16
    send_tile: int = 4
    token_block: int = 128
    chunk: int = 4096

    @cached_property
    def payloads(self) -> int:
        """Of 4 bytes, in a row."""
        return self.width * self.dtype.itemsize // 4

    @cached_property
    def payload_block(self) -> int:
        return next_power_of_2(self.payloads)

    @cached_property
    def row_words(self) -> int:
        """Of a row that is written bare."""
        return words_of_row(self.width, self.dtype)

    @cached_property
    def many_rows(self) -> int:
        """That are summed at once."""
        return min(self.step_rows, self.most_rows)

    @cached_property
    def slot_rows(self) -> int:
        """Of more than two ranks each adds up a row of every slot."""
        return 1 if self.size == 2 else self.size

    @cached_property
    def many_slots(self) -> int:
        return cdiv(self.many_rows, self.slot_rows)

    @cached_property
    def piece_slots(self) -> int:
        """Of every piece but the last."""
        return min(self.many_slots, max(1, self.piece_rows // self.slot_rows))

    @cached_property
    def num_pieces(self) -> int:
        """That are summed at once."""
        return cdiv(self.many_slots, self.piece_slots)

    @cached_property
    def piece_programs(self) -> int:
        """The most that add up a piece; a piece has so many flags from every rank."""
        return min(self.piece_slots, self.programs)

    def rounds(self, num_rows: int) -> list[list[Piece]]:
        """How a call's rows are cut: always at the same places, and a piece of every round takes
        the place of that with its number in the round before."""
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
        """How a product is cut whose rows are summed: at pieces of the first round, where the last
        product has at least half a piece and all that is left."""
        each = self.piece_slots * self.slot_rows
        count = max(1, min((num_rows + each // 2) // each, self.num_pieces))
        starts = [number * each for number in range(count)]
        return [slice(*ends) for ends in zip(starts, [*starts[1:], num_rows], strict=True)]

    @property
    def inbox_rows(self) -> int:
        """Places for a row each: for even and odd calls, from every other rank, and of more than
        two ranks again for the sums."""
        return 2 * (self.size - 1) * self.many_slots * (1 if self.size == 2 else 2)

    @property
    def few(self) -> int:
        """The rows that travel as words come first."""
        return 0

    @cached_property
    def many_flags(self) -> int:
        return self.few + 2 * self.size * self.few_rows * self.payload_block

    @cached_property
    def many(self) -> int:
        return self.many_flags + aligned(self.inbox_rows)

    @property
    def moves(self) -> MovesLayout:
        """Where tokens and logits lie: after all that is summed."""
        return MovesLayout(
            self.size,
            self.dtype,
            self.max_rows,
            self.vocab_size,
            begin=self.many + self.inbox_rows * self.row_words,
            token_block=self.token_block,
            chunk=self.chunk,
        )

    @property
    def num_bytes(self) -> int:
        return self.moves.end * WORD


@dataclass(frozen=True)
class ExchangeLayout:
    """Offsets in words of 8 bytes for `num_homes` homes of `home_size` ranks each. width: number of
    columns of the widest rows. dtype: of these rows and of the logits. max_rows: rows that sample
    in a step, of all homes together. step_rows: rows of a home's largest step.

    most_rows: rows of a home that cross at once; more cross in pieces. programs: the most that a
    kernel has, the same on all ranks. token_block, chunk: see `MovesLayout`.
    """

    num_homes: int
    home_size: int
    width: int
    dtype: torch.dtype
    max_rows: int
    vocab_size: int
    step_rows: int
    most_rows: int = 1024
    programs: int = 256
    token_block: int = 128
    chunk: int = 4096

    @property
    def size(self) -> int:
        """The number of ranks of the stage."""
        return self.num_homes * self.home_size

    @property
    def area_words(self) -> int:
        """Words of an area: what one program of one rank writes to another rank in one call."""
        rows = cdiv(min(self.step_rows, self.most_rows), self.programs)
        return rows * words_of_row(self.width, self.dtype)

    @property
    def gather_flags(self) -> int:
        return 0

    @property
    def gathered(self) -> int:
        """Rows of other homes, for even and odd calls."""
        return self.gather_flags + aligned(2 * (self.num_homes - 1) * self.programs)

    @property
    def add_flags(self) -> int:
        return self.gathered + 2 * (self.num_homes - 1) * self.programs * self.area_words

    @property
    def added(self) -> int:
        """Partial rows of other ranks, for even and odd calls."""
        return self.add_flags + aligned(2 * (self.size - 1) * self.programs)

    @property
    def moves(self) -> MovesLayout:
        """Where tokens and logits lie: after all rows."""
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
    """So many, and those that fill up what is written bare."""
    return cdiv(words, ALIGNED) * ALIGNED


def words_of_row(width: int, dtype: torch.dtype) -> int:
    """The words that a row takes when it is written bare."""
    return aligned(cdiv(width * dtype.itemsize, WORD))
