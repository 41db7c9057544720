"""Collective of ranks whose devices reach each other's memory. It launches the kernels of
peer_sums.py, peer_pulled_sums.py and peer_many_sums.py.

A rank's region holds its inboxes (region.py). Rows are cut where the layout says. The kernels of a
piece have inboxes, flags and counts of their own, so each piece is a call of its own. If there are
several pieces, they are sent on a second stream. Meanwhile the first stream adds up earlier pieces
or makes later ones. Every send is launched after the last sum of its piece, and every sum after its
send; sends wait for nobody. Nothing here waits for the device. This file knows bytes and dtypes,
not who shares the regions (parallel/peer_memory.py does).
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdserve.kernels.collective import peer_many_sums, peer_pulled_sums, peer_sums
from pdserve.kernels.collective.faults import Faults
from pdserve.kernels.collective.ops import Product, ProductInto, R, Unsummed
from pdserve.kernels.collective.peer_rank import LeftSum, PeerRank
from pdserve.kernels.collective.peer_waits import LOOK
from pdserve.kernels.collective.region import PLACES, WORD, Piece, RegionLayout
from pdserve.kernels.launching.aside import Aside
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.norm.ops import Norm

KINDS = {
    torch.float32: peer_sums.FLOAT32,
    torch.bfloat16: peer_sums.BFLOAT16,
    torch.float16: peer_sums.FLOAT16,
}
NOT_EARLY = {"PDL": False}  # options of a launch that starts after all before it is done


class _Part(NamedTuple):
    """The partial rows that this rank has of one piece."""

    piece: Piece
    partial: Tensor


Rounds = list[list[_Part]]


class PeerCollective(PeerRank):
    """Implements `Collective`.

    regions: int64 `[size]` on the device, the addresses of all ranks' zeroed regions. Each region
        has `layout.num_bytes`.
    memory: the owner of the regions, kept alive.
    own: uint8 `[layout.num_bytes]`, this rank's region. Without it no product is written to where
        other ranks read it.
    """

    def __init__(
        self,
        layout: RegionLayout,
        rank: int,
        regions: Tensor,
        faults: Faults,
        memory: object = None,
        own: Tensor | None = None,
    ) -> None:
        super().__init__(layout.moves, rank, regions, faults, memory)
        self._layout = layout
        self._few_epochs = self._counters(layout.few_rows)
        self._epochs = [self._counters(layout.piece_programs) for _ in range(layout.num_pieces)]
        self._aside = Aside(regions.device, layout.num_pieces)
        self._constants = {
            "RANK": rank,
            "SIZE": layout.size,
            "SLOTS": layout.many_slots,
            "PROGRAMS": layout.piece_programs,
            "WIDTH": layout.width,
            "ROW_WORDS": layout.row_words,
            "BLOCK": next_power_of_2(layout.width),
        }
        self._pulled_epochs = self._counters(next_power_of_2(max(1, layout.most_pulled)))
        self._places: list[Tensor] = []
        if own is not None:
            place_words = layout.most_pulled * layout.row_words
            starts = [WORD * layout.pulled(place) for place in range(PLACES)]
            self._places = [
                own[start : start + WORD * place_words].view(layout.dtype) for start in starts
            ]
        self._num_pulled = 0  # calls of this step whose rows other ranks read
        self._is_ahead = False  # True while rows were sent that must be summed next

    def add(self, stream: Tensor, partial: Tensor) -> Unsummed:
        """Leaves the sum to the next norm, which adds it to the stream and writes the stream."""
        return Unsummed(stream, LeftSum(stream, functools.partial(self._sum_rows, partial)))

    def begin(self) -> None:
        self._num_pulled = 0

    def add_product(
        self, stream: Tensor, x: R, product: Product[R], into: ProductInto[R] | None = None
    ) -> Unsummed:
        """Sends rows as soon as they are made, if the product is long enough. Lets other ranks read
        the rows, if they are few. The next norm computes the same sum as with `add`."""
        layout = self._layout
        if into and self._places and layout.few_rows < len(x) <= layout.most_pulled:
            self._check_order(is_ahead=False)
            # A step begins with a place of its own, because its number of calls may be odd.
            number = self._num_pulled and 1 + self._num_pulled % 2
            self._num_pulled += 1
            place = self._places[number].view(-1, layout.row_words * WORD // layout.dtype.itemsize)
            into(x, place[: len(x), : layout.width])
            return Unsummed(
                stream, LeftSum(stream, functools.partial(self._sum_pulled, number, len(x)))
            )
        cuts = layout.product_rows(len(x))
        is_short = len(x) <= layout.few_rows or x.shape[1] < layout.least_inputs
        if len(cuts) == 1 or is_short:
            return self.add(stream, product(x))
        self._check_order(is_ahead=False)
        self._is_ahead = True
        first, *others = layout.rounds(len(x))
        sent: list[_Part] = []
        for number, rows in enumerate(cuts):
            partial = self._checked(product(x[rows]))
            pieces = first[number:] if rows is cuts[-1] else first[number : number + 1]
            made = _parts(pieces, partial, rows.start)
            for part in made:
                self._send_aside(part)
            sent += made
        rounds = [sent, *(_parts(pieces, partial, cuts[-1].start) for pieces in others)]
        sum_rounds = functools.partial(self._sum_rounds, rounds, True)
        return Unsummed(stream, LeftSum(stream, sum_rounds))

    def sum(self, partial: Tensor) -> Tensor:
        given = partial.contiguous()
        total = torch.empty_like(given)
        self._sum_rows(given, total, given, None)
        return total

    def _sum_rows(self, partial: Tensor, out: Tensor, stream: Tensor, norm: Norm | None) -> None:
        """Writes the sum to out. With a norm, adds the sum to the stream, and writes the norm of
        the stream to out."""
        self._checked(partial)
        if len(partial) <= self._layout.few_rows:
            self._sum_few(partial, out, stream, norm)
            return
        rounds = [_parts(pieces, partial, 0) for pieces in self._layout.rounds(len(partial))]
        self._sum_rounds(rounds, False, out, stream, norm)

    def _checked(self, partial: Tensor) -> Tensor:
        """Raises ValueError for rows of another width or dtype than the layout's."""
        layout = self._layout
        if partial.shape[1] != layout.width or partial.dtype != layout.dtype:
            raise ValueError(
                f"rows to be summed must be {layout.dtype} and {layout.width} wide, not "
                f"{partial.dtype} {tuple(partial.shape)}"
            )
        return partial

    def _check_order(self, is_ahead: bool) -> None:
        """Raises RuntimeError if rows would be sent again before they are summed, or summed twice.
        The counts of the ranks would no longer agree."""
        if self._is_ahead != is_ahead:
            raise RuntimeError("rows sent to other ranks must be summed once, before any others")

    def _sum_few(self, partial: Tensor, out: Tensor, stream: Tensor, norm: Norm | None) -> None:
        layout = self._layout
        launch(
            peer_sums.few_rows_kernel,
            (len(partial),),
            (
                _as_words(partial),
                _as_words(stream),
                _as_words(norm.weight if norm is not None else partial),
                _as_words(out),
                *self._shared(self._few_epochs),
            ),
            (norm.eps if norm is not None else 0.0, layout.few, self.limit),
            RANK=self.rank,
            SIZE=self.size,
            SLOTS=layout.few_rows,
            WORDS=layout.payloads,
            BLOCK=layout.payload_block,
            KIND=KINDS[partial.dtype],
            NORM=norm is not None,
            PLUS_ONE=norm is not None and norm.plus_one,
            LOOKS=LOOK,
            num_warps=8,
            **self._options,
        )

    def _sum_pulled(
        self, place: int, num_rows: int, out: Tensor, stream: Tensor, norm: Norm | None
    ) -> None:
        """Sums what all ranks have written to one of their places."""
        layout = self._layout
        launch(
            peer_pulled_sums.pull_rows_kernel,
            (num_rows,),
            (
                stream,
                norm.weight if norm is not None else stream,
                out,
                *self._shared(self._pulled_epochs),
            ),
            (
                num_rows,
                norm.eps if norm is not None else 0.0,
                layout.pulled(place),
                layout.pulled_flags,
                self.limit,
            ),
            RANK=self.rank,
            SIZE=self.size,
            RANKS=next_power_of_2(self.size),
            PROGRAMS=len(self._pulled_epochs),
            WIDTH=layout.width,
            ROW_WORDS=layout.row_words,
            BLOCK=next_power_of_2(layout.width),
            NORM=norm is not None,
            PLUS_ONE=norm is not None and norm.plus_one,
            num_warps=8,
            **self._flags,
            **self._options,
        )

    def _sum_rounds(
        self, rounds: Rounds, is_ahead: bool, out: Tensor, stream: Tensor, norm: Norm | None
    ) -> None:
        """Sums these rounds; is_ahead says whether the first round was already sent."""
        self._check_order(is_ahead)
        for parts in rounds:
            # After an event of the second stream, an early launch gains nothing.
            options = NOT_EARLY
            if not self._is_ahead and len(parts) == 1:
                options = self._options
                self._send(parts[0], self._layout.piece_programs, 1, 8, options)
            elif not self._is_ahead:
                for part in parts:
                    self._send_aside(part)
            self._is_ahead = False
            for part in parts:
                self._aside.join(part.piece.number)
                self._take(peer_many_sums.sum_rows_kernel, part, out, stream, norm, options)
            if self.size > 2:
                for part in parts:
                    kernel = peer_many_sums.finish_rows_kernel
                    self._take(kernel, part, out, stream, norm, options)

    def _send_aside(self, part: _Part) -> None:
        layout = self._layout
        programs = min(layout.send_programs, layout.piece_programs)
        self._aside.do(
            part.piece.number,
            lambda: self._send(part, programs, layout.send_tile, layout.send_warps, NOT_EARLY),
            part.partial,
        )

    def _send(
        self, part: _Part, programs: int, tile: int, num_warps: int, options: dict[str, Any]
    ) -> None:
        """Sends a part; at most `programs` programs move `tile` rows at once each."""
        layout = self._layout
        num_rows = len(part.partial)
        num_slots = cdiv(num_rows, layout.slot_rows)
        tiles = cdiv(layout.piece_programs, tile)
        launch(
            peer_many_sums.send_rows_kernel,
            (min(programs, cdiv(num_slots, tile), tiles),),
            (part.partial, *self._shared(self._epochs[part.piece.number])[:-1]),
            (num_rows, *self._offsets(part.piece)),
            **self._constants,
            SENDERS=programs,
            TILE=tile,
            TILES=next_power_of_2(cdiv(tiles, programs)),
            num_warps=num_warps,
            **options,
        )

    def _take(
        self,
        kernel: Any,
        part: _Part,
        out: Tensor,
        stream: Tensor,
        norm: Norm | None,
        options: dict[str, Any],
    ) -> None:
        """Launches a kernel that takes this part; out and stream have all rows of the call."""
        num_rows = len(part.partial)
        num_slots = cdiv(num_rows, self._layout.slot_rows)
        if num_rows < len(out):
            stream, out = stream[part.piece.rows], out[part.piece.rows]
        tensors = [stream, norm.weight if norm is not None else part.partial, out]
        if kernel is peer_many_sums.sum_rows_kernel:
            tensors.insert(0, part.partial)
        launch(
            kernel,
            (min(num_slots, self._layout.piece_programs),),
            (*tensors, *self._shared(self._epochs[part.piece.number])),
            (
                num_rows,
                norm.eps if norm is not None else 0.0,
                *self._offsets(part.piece),
                self.limit,
            ),
            **self._constants,
            NORM=norm is not None,
            PLUS_ONE=norm is not None and norm.plus_one,
            num_warps=8,
            **self._flags,
            **options,
        )

    def _offsets(self, piece: Piece) -> tuple[int, int]:
        """Returns the offsets of the piece's inboxes and flags."""
        layout = self._layout
        return layout.many + piece.slot * layout.row_words, layout.many_flags + piece.slot


def _parts(pieces: list[Piece], partial: Tensor, start: int) -> list[_Part]:
    """Cuts `partial`, the rows of a call from `start` on, into the parts of these pieces."""
    return [_Part(p, partial[p.rows.start - start : p.rows.stop - start]) for p in pieces]


def _as_words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)
