"""The kernels that exchange rows between homes, compiled for a GPU that need not be there: that
they compile, and that rows cross in pieces of 16 bytes."""

import re
from typing import Any

import pytest
from compiled import ptx

pytestmark = pytest.mark.processes

KERNELS = "pdserve.kernels.collective.peer_rows"
CONSTANTS: dict[str, Any] = dict(
    RANK=5,
    HOMES=4,
    HOME_SIZE=2,
    AREAS=256,
    AREA_WORDS=4096,
    LOOKS=1024,
    NAPS=1,
    PDL=True,
)
WIDE = {"ld.global.cg.v4.b32", "ld.global.v4.b32", "st.global.v4.b32"}


def vector_moves(said: str) -> set[str]:
    """How rows are read and written; what ranks wait by are single words."""
    return set(re.findall(r"(?:ld|st)\.global(?:\.cg)?\.v[248]\.b(?:16|32)", said))


@pytest.mark.parametrize(("width", "tile"), [(2048, 1), (16, 64)])
def test_rows_are_gathered(width: int, tile: int) -> None:
    """Rows of 4096 bfloat16, moved as integers of 4 bytes, and of a choice of 8 experts."""
    more = dict(HELD=1024, WIDTH=width, STRIDE=width, TILE=tile, BLOCK=width)
    kinds = {"regions_ptr": "*i64"}
    sends = ptx(f"{KERNELS}:send_gathered_kernel", CONSTANTS | more, kinds, 8)
    assert vector_moves(sends) == WIDE - {"ld.global.cg.v4.b32"}
    assert "atom.global.sys.release.exch" in sends and "nanosleep" not in sends
    takes = ptx(f"{KERNELS}:take_gathered_kernel", CONSTANTS | more, kinds, 8)
    assert vector_moves(takes) == WIDE - {"ld.global.v4.b32"}
    assert "ld.global.sys.acquire" in takes and "nanosleep" in takes


@pytest.mark.parametrize("with_norm", [False, True])
def test_rows_are_added_up(with_norm: bool) -> None:
    more = dict(HELD=1024, WIDTH=4096, STRIDE=4096, BLOCK=4096, NORM=with_norm, PLUS_ONE=False)
    rows = ["partial_ptr", "stream_ptr", "weight_ptr", "out_ptr"]
    kinds = {"regions_ptr": "*i64", "eps": "fp32"} | dict.fromkeys(rows, "*bf16")
    for name in ("send_partial_kernel", "add_rows_kernel"):
        said = ptx(f"{KERNELS}:{name}", CONSTANTS | more, kinds, 8)
        sends = name.startswith("send")
        assert vector_moves(said) == (WIDE - {"ld.global.cg.v4.b32"} if sends else WIDE)
        narrow = set(re.findall(r"(?:ld|st)\.global\.[a-z0-9.]*b16", said))
        assert not narrow, narrow
        assert ("atom.global.sys.release.exch" in said) == sends
        assert ("ld.global.sys.acquire" in said) == ("nanosleep" in said) == (not sends)
