"""The products of experts in int4, compiled for a GPU that need not be there. They use tensor
cores, load words and rows ahead, and unpack numbers in pairs and in registers."""

from typing import Any

import pytest
from compiled import ptx

from pdserve.kernels.experts.products.tiles import FEW, MORE, SOME, int4_tile_for

pytestmark = pytest.mark.processes

MULTIPLES = ["num_inputs", "num_outputs", "stride_words", "stride_scales", "stride_zeros"]
LISTS: dict[str, Any] = {"NUM_EXPERTS": 128, "BLOCK_EXPERTS": 128, "PLACES": 8, "PDL": True}


@pytest.mark.parametrize(
    "share,group,is_gated,dtype",
    [
        (1, 128, True, "bf16"),
        (FEW, 128, False, "bf16"),
        (FEW, 32, True, "fp16"),
        (SOME, 64, False, "fp16"),
        (MORE, 128, True, "bf16"),
        (MORE + 1, 128, True, "fp16"),
        (MORE + 1, 32, False, "bf16"),
    ],
)
def test_products(share: int, group: int, is_gated: bool, dtype: str) -> None:
    tile = int4_tile_for(share)
    constants = {
        **LISTS,
        "GATED": is_gated,
        "SILU": is_gated,
        "GROUP": group,
        "FOLDED": tile.rows > 64 or group == 32,
        "BLOCK_ROWS": tile.rows,
        "BLOCK_OUT": tile.outputs,
        "STAGES": tile.num_stages,
    }
    if share == 1:
        constants |= {"counts_ptr": None, "slots_ptr": None}
    kinds = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "scales_ptr": "*fp32"}
    name = "pdserve.kernels.experts.products.int4:int4_expert_kernel"
    said = ptx(name, constants, kinds, tile.num_warps, MULTIPLES)
    assert "griddepcontrol.wait" in said and ".local" not in said
    assert "wgmma.mma_async" in said or "mma.sync" in said
    assert "cp.async.cg.shared.global" in said, "words and inputs come by 16 bytes"
    pairs = "bf16x2" if dtype == "bf16" else "f16x2"
    assert said.count(f"sub.rn.{pairs}") == 32, "a thread's words, once"
    assert "cvt.rn.f32" not in said, "numbers are converted one by one"
