"""The kernels of experts, compiled for a GPU that need not be there: that they compile, and
multiply on tensor cores."""

from typing import Any

import pytest
from compiled import ptx

pytestmark = pytest.mark.processes

ROOM = "pdserve.kernels.experts"
ROWS = dict.fromkeys(["x_ptr", "weight_ptr", "out_ptr", "hidden_ptr", "made_ptr"], "*bf16")
FLOATS = dict.fromkeys(["parts_ptr", "weights_ptr", "bias_ptr"], "*fp32")
KINDS = ROWS | FLOATS | {"live_ptr": "*u8", "load_ptr": "*i64", "scaling": "fp32"}
# as launched for Qwen3-30B-A3B and DeepSeek-V3
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "router": (
        "routes:router_product_kernel",
        {"BLOCK_ROWS": 16, "BLOCK_OUT": 16, "BLOCK_IN": 128, "SPLITS": 4, "BLOCK_COUNTS": 128},
        4,
    ),
    "choice": (
        "routes:choose_kernel",
        {
            "SPLITS": 4,
            "NUM_GROUPS": 8,
            "GROUP_SIZE": 32,
            "BLOCK_GROUPS": 8,
            "BLOCK_SIZE": 32,
            "TOP_K": 8,
            "BLOCK_K": 8,
            "TOP_GROUPS": 4,
            "SOFTMAX": False,
            "NORMALIZE": True,
            "BEST_TWO": True,
        },
        1,
    ),
    "few gated": (
        "few_rows:few_gated_kernel",
        {"TOP_K": 8, "SILU": True, "BLOCK_OUT": 2, "BLOCK_IN": 1024},
        4,
    ),
    "few down": (
        "few_rows:few_down_kernel",
        {"TOP_K": 8, "ADD": True, "BLOCK_OUT": 4, "BLOCK_IN": 1024},
        4,
    ),
    "many gated": (
        "many_rows:expert_product_kernel",
        {
            "NUM_EXPERTS": 128,
            "BLOCK_EXPERTS": 128,
            "SLOTS_A_ROW": 8,
            "GATED": True,
            "SILU": True,
            "BLOCK_ROWS": 128,
            "BLOCK_OUT": 64,
            "BLOCK_IN": 64,
            "STAGES": 3,
        },
        8,
    ),
    "combine": ("many_rows:combine_kernel", {"TOP_K": 8, "ADD": True, "BLOCK": 1024}, 4),
}


@pytest.mark.parametrize("case", CASES)
def test_they_compile(case: str) -> None:
    name, constants, num_warps = CASES[case]
    said = ptx(f"{ROOM}.{name}", constants | {"PDL": True}, KINDS, num_warps)
    assert "griddepcontrol.wait" in said
    if "product" in name:
        assert "wgmma" in said or "mma.sync" in said
