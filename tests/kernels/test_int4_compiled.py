"""The products with int4, compiled for a GPU that need not be there: tensor cores, words by 16
bytes, numbers taken out in pairs and in registers."""

from typing import Any

import pytest
from compiled import ptx

from pdserve.kernels.linear.int4.dense import NUM_WARPS, TILE_BLOCKS, TILE_ROWS

pytestmark = pytest.mark.processes

LINEAR = "pdserve.kernels.linear"
MULTIPLES = [
    "stride_scales",
    "stride_zeros",
    "num_inputs",
    "num_columns",
    "stride_x",
    "stride_words",
]


def kinds(dtype: str) -> dict[str, str]:
    floats = {f"{name}_ptr": f"*{dtype}" for name in ("x", "bias", "out")}
    return floats | {"scales_ptr": "*fp32", "partial_ptr": "*fp32"}


# as launched: dtype, rows, outputs, silu, group, splits, blocks, stages, warps
PRODUCTS = [
    ("bf16", 16, 64, False, 128, 4, 4, 3, 4),
    ("fp16", 16, 64, True, 128, 1, 4, 3, 4),
    ("bf16", 64, 64, False, 64, 1, 1, 4, 4),
    ("bf16", 64, 64, True, 32, 2, 1, 4, 4),
    ("fp16", 128, 64, False, 128, 1, 1, 3, 4),
    ("bf16", 128, 128, True, 32, 1, 1, 3, 8),
    ("bf16", 128, 128, True, 0, 1, 1, 3, 8),
]


@pytest.mark.parametrize("dtype,rows,outputs,silu,group,splits,blocks,stages,warps", PRODUCTS)
def test_products(
    dtype: str,
    rows: int,
    outputs: int,
    silu: bool,
    group: int,
    splits: int,
    blocks: int,
    stages: int,
    warps: int,
) -> None:
    constants: dict[str, Any] = {
        "SILU": silu,
        "ADD": True,
        "GROUP": group,
        "FOLDED": rows > 64 or group == 32,
        "BLOCK_ROWS": rows,
        "BLOCK_OUT": outputs,
        "NUM_SPLITS": splits,
        "NUM_BLOCKS": blocks,
        "STAGES": stages,
        "PDL": True,
    }
    name = f"{LINEAR}.int4.products:int4_product_kernel"
    said = ptx(name, constants, kinds(dtype), warps, MULTIPLES)
    assert "griddepcontrol.wait" in said and ".local" not in said
    assert "wgmma.mma_async" in said or "mma.sync" in said
    assert "cp.async.cg.shared.global" in said, "words and inputs come by 16 bytes"
    pairs = "bf16x2" if dtype == "bf16" else "f16x2"
    assert said.count(f"sub.rn.{pairs}") == 32 * blocks, "a thread's words, once"
    assert "cvt.rn.f32" not in said, "numbers are converted one by one"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_many_rows(dtype: str) -> None:
    constants = {"row_scales_ptr": None, "GROUP": 128, "ROWS": 16, "BLOCKS": 4, "PDL": True}
    name = f"{LINEAR}.int4.dense:dequantise_kernel"
    said = ptx(name, constants, kinds(dtype), 4, MULTIPLES)
    assert "griddepcontrol.wait" in said and ".local" not in said
    assert "st.global.v4.b32" in said


@pytest.mark.parametrize("group", [0, 32, 128])
def test_many_rows_in_e4m3(group: int) -> None:
    """Each pair of numbers is rounded by one instruction, and codes are written by 16 bytes."""
    constants = {"GROUP": group, "ROWS": TILE_ROWS, "BLOCKS": TILE_BLOCKS, "PDL": True}
    name = f"{LINEAR}.int4.dense:dequantise_kernel"
    types = {"scales_ptr": "*fp32", "row_scales_ptr": "*fp32", "out_ptr": "*fp8e4nv"}
    said = ptx(name, constants, types, NUM_WARPS, MULTIPLES)
    assert "griddepcontrol.wait" in said and ".local" not in said
    numbers_of_a_thread = TILE_ROWS * TILE_BLOCKS * 128 // (32 * NUM_WARPS)
    assert said.count("cvt.rn.satfinite.e4m3x2.f32") == numbers_of_a_thread // 2
    assert "st.global.v4.b32" in said and "st.global.b8" not in said
