"""The kernels of several ranks, compiled for a GPU that need not be there: that they compile, and
that rows cross in pieces of 16 bytes."""

import re
from typing import Any

import pytest
from compiled import ptx

pytestmark = pytest.mark.processes

BFLOAT16 = 1  # peer_sums.BFLOAT16, which imports Triton
CONSTANTS: dict[str, Any] = dict(
    RANK=1,
    SLOTS=8192,
    WIDTH=4096,
    ROW_WORDS=1024,
    WORDS=2048,
    KIND=BFLOAT16,
    NORM=True,
    PLUS_ONE=False,
    PROGRAMS=512,
    LOOKS=1024,
    NAPS=1,
    PDL=True,
)
# of send_rows_kernel: every program for itself, or few beside other work
ALL = dict(SENDERS=512, TILE=1, TILES=1)
ASIDE = dict(SENDERS=32, TILE=4, TILES=4)


@pytest.mark.parametrize("aside", [False, True], ids=["alone", "aside"])
@pytest.mark.parametrize("size", [2, 4])
def test_what_sends_compiles(size: int, aside: bool) -> None:
    constants = CONSTANTS | (ASIDE if aside else ALL) | {"SIZE": size, "BLOCK": 4096}
    kinds = {"regions_ptr": "*i64", "partial_ptr": "*bf16"}
    kernel = "pdserve.kernels.collective.peer_many_sums:send_rows_kernel"
    said = ptx(kernel, constants, kinds, num_warps=16 if aside else 8)
    narrow = re.findall(r"(?:ld|st)\.global\.[a-z0-9.]*b16", said)
    assert not narrow, narrow
    assert "st.global.v4.b32" in said and "ld.global.v4.b32" in said
    assert "atom.global.sys.release.exch" in said
    assert "nanosleep" not in said and "ld.global.sys.acquire" not in said


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("peer_pulled_sums:pull_rows_kernel", 2),
        ("peer_pulled_sums:pull_rows_kernel", 4),
        ("peer_sums:few_rows_kernel", 2),
        ("peer_many_sums:sum_rows_kernel", 2),
        ("peer_many_sums:sum_rows_kernel", 4),
        ("peer_many_sums:finish_rows_kernel", 4),
    ],
)
def test_they_compile(name: str, size: int) -> None:
    is_few = "few" in name
    rows = ["partial_ptr", "stream_ptr", "weight_ptr", "out_ptr"]
    kinds = {"regions_ptr": "*i64", "eps": "fp32"} | dict.fromkeys(
        rows, "*i32" if is_few else "*bf16"
    )
    constants = CONSTANTS | {"SIZE": size, "RANKS": size, "BLOCK": 2048 if is_few else 4096}
    said = ptx(f"pdserve.kernels.collective.{name}", constants, kinds, num_warps=8)
    # nothing that it loads or stores is narrower than the device allows
    narrow = set(re.findall(r"(?:ld|st)\.global\.[a-z0-9.]*b16", said))
    assert not narrow, narrow
    if not is_few:
        assert "st.global.v4.b32" in said
        tells = (size > 2 and ":sum" in name) or ":pull" in name
        assert ("atom.global.sys.release.exch" in said) == tells
        assert "ld.global.cg.v4.b32" in said
        assert "nanosleep" in said
        acquires = "atom.global.sys.acquire" if ":pull" in name else "ld.global.sys.acquire"
        assert acquires in said
