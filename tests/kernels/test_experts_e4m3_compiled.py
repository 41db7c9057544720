"""The products of experts in e4m3, compiled for a GPU that need not be there. They multiply e4m3 on
tensor cores, load what a step takes ahead, and keep no blocks in local memory."""

from typing import Any

import pytest
from compiled import ptx

from pdserve.kernels.experts.products.tiles import FEW, MORE, SOME, Tile, e4m3_tile_for

pytestmark = pytest.mark.processes

KINDS = {
    "x_ptr": "*fp8e4nv",
    "weight_ptr": "*fp8e4nv",
    "x_scales_ptr": "*fp32",
    "scales_ptr": "*fp32",
    "out_ptr": "*bf16",
    "weight_steps": "tensordesc<fp8e4nv[128, 128]>",
}
MULTIPLES = ["num_inputs", "num_outputs", "stride_x", "stride_scales", "stride_x_scales"]
LISTS: dict[str, Any] = {"NUM_EXPERTS": 128, "BLOCK_EXPERTS": 128, "PLACES": 8, "PDL": True}
BLOCKS = {"GROUP_ROWS": 128, "GROUPED": True}
SPREAD = {"GROUP_ROWS": 1, "GROUPED": True}
ROWS = {"GROUP_ROWS": 1, "GROUPED": False}
by_scales = pytest.mark.parametrize(
    "scales", [BLOCKS, SPREAD, ROWS], ids=["blocks", "spread", "rows"]
)
by_product = pytest.mark.parametrize("is_gated", [True, False], ids=["gated", "down"])
# as launched for Qwen3-30B-A3B: of gate and up, and of down
INPUTS = {True: 2048, False: 768}


def compiled(kernel: str, tile: Tile, is_gated: bool, constants: dict[str, Any]) -> str:
    constants = {
        **LISTS,
        **constants,
        "GATED": is_gated,
        "SILU": is_gated,
        "CLAMPED": False,
        "expert_bias_ptr": None,
        "BLOCK_ROWS": tile.rows,
        "STAGES": tile.num_stages,
    }
    name = f"pdserve.kernels.experts.products.{kernel}"
    said = ptx(name, constants, KINDS, tile.num_warps, MULTIPLES)
    assert ".local" not in said and "griddepcontrol.wait" in said
    assert "cp.async.cg.shared.global" in said and "ld.global.v4" not in said
    return said


@by_product
@by_scales
@pytest.mark.parametrize("share", [1, FEW, SOME, MORE])
def test_few_rows(share: int, scales: dict[str, Any], is_gated: bool) -> None:
    tile = e4m3_tile_for(share, INPUTS[is_gated])
    constants = scales | {"BLOCK_OUT": tile.outputs, "STEPS": tile.inputs // 128}
    if share == 1:
        constants |= {"counts_ptr": None, "slots_ptr": None}
    said = compiled("e4m3:few_product_kernel", tile, is_gated, constants)
    assert f"wgmma.mma_async.sync.aligned.m64n{tile.rows}k32.f32.e4m3.e4m3" in said


@by_product
@by_scales
def test_many_rows(scales: dict[str, Any], is_gated: bool) -> None:
    tile = e4m3_tile_for(MORE + 1, INPUTS[is_gated])
    constants = scales | {"BLOCK_OUT": tile.outputs // 2, "BLOCK_IN": tile.inputs}
    constants |= {"WIDE": not is_gated, "x_steps": None}
    said = compiled("many_rows:expert_product_kernel", tile, is_gated, constants)
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in said
    assert "cp.async.bulk.tensor.2d.shared" in said
    if scales is BLOCKS:  # added up before the next product, so that registers suffice
        between = said.split("wgmma.wait_group")[1]
        assert between.count("fma.rn.f32") >= 64
