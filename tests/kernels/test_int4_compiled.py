"""The products with int4, compiled for a GPU that need not be there: tensor cores, words by 16
bytes, numbers taken out in pairs and in registers."""

from typing import Any

import pytest
from compiled import ptx

pytestmark = pytest.mark.processes

LINEAR = "pdserve.kernels.linear"
MULTIPLES = ["num_inputs", "num_columns", "stride_x", "stride_words"]


def kinds(dtype: str) -> dict[str, str]:
    floats = {f"{name}_ptr": f"*{dtype}" for name in ("x", "bias", "out")}
    return floats | {"scales_ptr": "*fp32", "partial_ptr": "*fp32", "zeros_ptr": "*u8"}


# as launched: dtype, rows, outputs, silu, group, splits, stages, warps
PRODUCTS = [
    ("bf16", 16, 64, False, 128, 4, 6, 4),
    ("fp16", 16, 64, True, 128, 1, 6, 4),
    ("bf16", 64, 64, False, 64, 1, 4, 4),
    ("bf16", 64, 128, True, 32, 1, 3, 8),
    ("fp16", 128, 128, False, 128, 1, 2, 8),
    ("bf16", 128, 64, True, 0, 1, 2, 8),
]


@pytest.mark.parametrize("dtype,rows,outputs,silu,group,splits,stages,warps", PRODUCTS)
def test_few_rows(
    dtype: str,
    rows: int,
    outputs: int,
    silu: bool,
    group: int,
    splits: int,
    stages: int,
    warps: int,
) -> None:
    constants: dict[str, Any] = {
        "SILU": silu,
        "ADD": True,
        "GROUP": group,
        "BLOCK_ROWS": rows,
        "BLOCK_OUT": outputs,
        "NUM_SPLITS": splits,
        "STAGES": stages,
        "PDL": True,
    }
    name = f"{LINEAR}.int4_products:int4_product_kernel"
    said = ptx(name, constants, kinds(dtype), warps, MULTIPLES)
    assert "griddepcontrol.wait" in said and ".local" not in said
    assert "wgmma.mma_async" in said or "mma.sync" in said
    assert "cp.async.cg.shared.global" in said, "words and inputs come by 16 bytes"
    pairs = "bf16x2" if dtype == "bf16" else "f16x2"
    assert said.count(f"sub.rn.{pairs}") == (64 if silu else 32), "a thread's words, once"
    assert "cvt.rn.f32.s32" not in said, "numbers are converted one by one"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize("silu", [True, False])
def test_one_row(dtype: str, group: int, silu: bool) -> None:
    constants: dict[str, Any] = {
        "SILU": silu,
        "ADD": True,
        "GROUP": group,
        "BLOCK_OUT": 4 if silu else 8,
        "NUM_BLOCKS": 8,
        "PDL": True,
    }
    name = f"{LINEAR}.int4_row:int4_row_kernel"
    said = ptx(name, constants, kinds(dtype), 2, MULTIPLES)
    assert "griddepcontrol.wait" in said and ".local" not in said
    loads = [line for line in said.splitlines() if "ld.global.L1::evict_first" in line]
    assert len(loads) == 8, "16 words of a thread, now and of the next step"
    assert all(".v4.b32" in line for line in loads)
    assert "cvt.rn.f32.s32" not in said, "numbers are converted one by one"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_many_rows(dtype: str) -> None:
    constants = {"GROUP": 128, "ROWS": 8, "COLUMNS": 512, "PDL": True}
    name = f"{LINEAR}.int4_dense:dequantise_kernel"
    said = ptx(name, constants, kinds(dtype), 4, MULTIPLES)
    assert "griddepcontrol.wait" in said and ".local" not in said
    assert "st.global.v4.b32" in said
