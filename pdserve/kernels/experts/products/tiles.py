"""The tile sizes of the kernels of a mixture, chosen by the number of rows.

There are few sizes, so that few kernels are compiled. `rows_to_warm` returns numbers of rows that
meet them all. This file needs no torch.
"""

from dataclasses import dataclass

from pdserve.kernels.experts.routing import Routing

LONG_INPUTS = 1024  # wide tiles pay for products with at least so many inputs
# The most rows per expert for tiles of 16, 32 and 64 rows.
FEW, SOME, MORE = 10, 24, 64
# The most rows for the first and the second tile of the router.
ROUTED = (64, 1024)


@dataclass(frozen=True)
class Tile:
    """The step of a program: rows x outputs x inputs."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    has_tma: bool = False


def tile_for(rows_an_expert: float, num_inputs: int, is_gated: bool, itemsize: int) -> Tile:
    """Returns a tile for about as many rows as an expert gets, so that its weights are read once if
    possible. Both products of an expert get tiles with the same number of rows. The tile's outputs
    count gate and up together."""
    if itemsize == 4:
        return Tile(16, 64, 64, 4, 2) if rows_an_expert <= SOME else Tile(64, 64, 32, 4, 2)
    if rows_an_expert <= FEW:
        return Tile(16, 64, 128, 4, 4)
    if rows_an_expert <= SOME:
        return Tile(32, 128, 128, 4, 3)
    if rows_an_expert <= MORE:
        return Tile(64, 128, 64, 4, 4)
    if is_gated or num_inputs >= LONG_INPUTS:
        return Tile(128, 256, 64, 8, 4, has_tma=True)
    return Tile(128, 128, 64, 8, 3, has_tma=True)


def e4m3_tile_for(rows_an_expert: float, num_inputs: int) -> Tile:
    """Returns a tile of a product in e4m3, whose scales cover steps of 128 inputs.

    For up to 64 rows, two such steps are taken together, because DRAM gives 256 bytes of a row at a
    time. Then two or more programs share a multiprocessor. For more rows, wide tiles pay whatever
    the inputs are: the accumulator and the sums of a step leave registers for only one program
    anyway.
    """
    if rows_an_expert > MORE:
        return Tile(128, 256, 128, 8, 4, has_tma=True)
    rows = 16 if rows_an_expert <= FEW else 32 if rows_an_expert <= SOME else 64
    return Tile(rows, 64, 256, 4, min(-(-num_inputs // 256), 4 if rows < 64 else 3))


def int4_tile_for(rows_an_expert: float) -> Tile:
    """Returns a tile of a product in int4: steps of 128 inputs, which are packed together."""
    if rows_an_expert > MORE:
        return Tile(128, 128, 128, 8, 3)
    rows = 16 if rows_an_expert <= FEW else 32 if rows_an_expert <= SOME else 64
    return Tile(rows, 64, 128, 4, 5 if rows < 64 else 4)


def router_tile(num_rows: int, num_experts: int) -> tuple[int, int, int]:
    """Returns rows and experts of a program, and the largest number of parts of the inputs. Few
    rows get many programs. With many rows, each row is read once."""
    if num_rows <= ROUTED[0]:
        return 16, 16, 4
    if num_rows <= ROUTED[1]:
        return 64, 32, 4
    return 32, min(max(1 << (num_experts - 1).bit_length(), 16), 128), 1


def rows_to_warm(routing: Routing, num_everywhere: int | None = None) -> list[int]:
    """Returns numbers of rows that meet every tile size, except for the single row.

    num_everywhere: see `Lists`; with it the rows are those of all homes together.
    """
    num_experts = num_everywhere or routing.num_experts + routing.num_shared
    share = num_experts / routing.num_places
    shares = (FEW // 2, (FEW + SOME) // 2, (SOME + MORE) // 2, 2 * MORE)
    rows = {max(round(rows_an_expert * share), 2) for rows_an_expert in shares}
    return sorted(rows | {2, *(limit + 1 for limit in ROUTED)})
