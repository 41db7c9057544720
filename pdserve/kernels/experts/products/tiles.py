"""The steps that the kernels of a mixture take, by the number of rows.

Few sizes of each, so that few kernels are compiled, and `rows_to_warm` names numbers of rows that
meet them all. Torch-free.
"""

from dataclasses import dataclass

from pdserve.kernels.experts.routing import Routing

LONG_INPUTS = 1024  # of a product of which wide tiles pay
# the most rows an expert for tiles of 16, 32 and 64 rows
FEW, SOME, MORE = 10, 24, 64
# the most rows for each tile of the router
ROUTED = (64, 1024)


@dataclass(frozen=True)
class Tile:
    """A step of a program: rows x outputs x inputs."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    has_tma: bool = False


def tile_for(rows_an_expert: float, num_inputs: int, is_gated: bool, itemsize: int) -> Tile:
    """A tile for about as many rows as an expert gets, so that its weights are read once where that
    is possible. Both products of an expert get tiles of the same rows. outputs: of gate and up
    together."""
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
    """A tile of a product in e4m3: steps of 128 inputs, for which scales stand. Of up to 64 rows
    they are two together, because DRAM gives 256 bytes of a row at a time, and two programs or more
    share a multiprocessor. Wide tiles pay whatever the inputs: what is added up and the sums of a
    step leave registers for one program anyway."""
    if rows_an_expert > MORE:
        return Tile(128, 256, 128, 8, 4, has_tma=True)
    rows = 16 if rows_an_expert <= FEW else 32 if rows_an_expert <= SOME else 64
    return Tile(rows, 64, 256, 4, min(-(-num_inputs // 256), 4 if rows < 64 else 3))


def int4_tile_for(rows_an_expert: float) -> Tile:
    """A tile of a product in int4: steps of 128 inputs, which are packed together."""
    if rows_an_expert > MORE:
        return Tile(128, 128, 128, 8, 3)
    rows = 16 if rows_an_expert <= FEW else 32 if rows_an_expert <= SOME else 64
    return Tile(rows, 64, 128, 4, 5 if rows < 64 else 4)


def router_tile(num_rows: int, num_experts: int) -> tuple[int, int, int]:
    """Rows and experts of a program, and into how many parts the inputs may be dealt: many programs
    of few rows; of many rows, each read once."""
    if num_rows <= ROUTED[0]:
        return 16, 16, 4
    if num_rows <= ROUTED[1]:
        return 64, 32, 4
    return 32, min(max(1 << (num_experts - 1).bit_length(), 16), 128), 1


def rows_to_warm(routing: Routing, num_everywhere: int | None = None) -> list[int]:
    """Numbers of rows that meet every size of a step, but for the single row. num_everywhere: see
    `Lists`; then the rows are those of all homes together."""
    num_experts = num_everywhere or routing.num_experts + routing.num_shared
    share = num_experts / routing.num_places
    shares = (FEW // 2, (FEW + SOME) // 2, (SOME + MORE) // 2, 2 * MORE)
    rows = {max(round(rows_an_expert * share), 2) for rows_an_expert in shares}
    return sorted(rows | {2, *(limit + 1 for limit in ROUTED)})
