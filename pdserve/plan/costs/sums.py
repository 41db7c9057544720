"""Seconds of sums over the ranks of a home, as the kernels of kernels/collective make them.

Few rows are words that a kernel sends and takes. More rows are written bare, and between more than
two ranks they are summed in two steps. A long product is cut into parts, so that its rows are on
their way while the next part is multiplied. Rows that ranks read where they were made
(peer_pulled_sums.py) take as long here as rows that are sent. The numbers of rows are those of
kernels/collective/region.py, and a test compares them. step.py uses this module, which needs no
torch.
"""

from dataclasses import dataclass

from pdserve.plan.costs.rates import Rates

ITEM = 2  # bytes per number: bfloat16
FEW_ROWS = 64
MANY_ROWS = 8192  # rows that are summed at once
PIECE_BYTES, LEAST_PIECE = 16 << 20, 2048
WHOLE_BYTES = 32 << 20
LEAST_INPUTS = 2048


@dataclass(frozen=True)
class Sums:
    """The sums of one model. With one rank nothing is summed.

    width: columns of the residual stream.
    ranks: ranks of a home.
    """

    width: int
    ranks: int
    rates: Rates

    def seconds(self, num_rows: int) -> float:
        """Returns the seconds to sum rows that are all there."""
        ranks, rates = self.ranks, self.rates
        if ranks == 1:
            return 0.0
        if num_rows <= FEW_ROWS:
            num_bytes = 2 * (ranks - 1) * num_rows * self.width * ITEM
            seconds = rates.sum_s + (ranks - 2) * rates.more_ranks_s
            return seconds + num_bytes / rates.word_bytes_per_s
        steps = 1 if ranks == 2 else 2
        return self._tail_s() + steps * self._transfer_s(num_rows)

    def parts(self, num_rows: int, num_in: int) -> list[int]:
        """Returns the rows of each part of the product that makes these rows, of num_in inputs per
        rank. There is one part if the product is not cut."""
        row_bytes = self.width * ITEM
        is_short = num_rows <= FEW_ROWS or num_in < LEAST_INPUTS
        if is_short or MANY_ROWS * row_bytes <= WHOLE_BYTES:
            return [num_rows]
        piece = max(LEAST_PIECE, 1 << (PIECE_BYTES // row_bytes).bit_length() - 1)
        count = max(1, min((num_rows + piece // 2) // piece, MANY_ROWS // piece))
        return [piece] * (count - 1) + [num_rows - piece * (count - 1)]

    def beside_s(self, parts: list[int], product_s: float) -> float:
        """Returns the seconds that a sum takes beyond the product of product_s seconds that makes
        its rows in these parts. The second step of more than two ranks is not hidden."""
        num_rows = sum(parts)
        made = sent = 0.0
        for rows in parts:
            made += product_s * rows / num_rows
            sent = max(sent, made) + self._transfer_s(rows)
        second = 0.0 if self.ranks == 2 else self._transfer_s(num_rows)
        return self._tail_s() + sent - made + second

    def _tail_s(self) -> float:
        return self.rates.many_sum_s if self.ranks == 2 else self.rates.two_step_s

    def _transfer_s(self, num_rows: int) -> float:
        """Returns the seconds of one step of a sum: to the other of two ranks all rows are sent, to
        each of several its share."""
        ranks, rates = self.ranks, self.rates
        num_bytes = num_rows * self.width * ITEM
        if ranks == 2:
            return num_bytes / rates.store_bytes_per_s
        return num_bytes * (ranks - 1) / ranks / rates.two_step_bytes_per_s
