"""The kernels of experts and of latents, compiled for a GPU that need not be there. They compile,
fit into shared memory, and multiply on tensor cores from loads that run ahead."""

from typing import Any

import pytest
from compiled import ptx

pytestmark = pytest.mark.processes

ROWS = ["x", "weight", "out", "hidden", "made", "q", "kv", "latent", "latents", "keys", "queries"]
ROWS += ["rotated", "norm", "expert_bias"]
FLOATS = [
    "logit_bias",
    "parts",
    "weights",
    "out_weights",
    "bias",
    "partial",
    "max",
    "sum",
    "cos",
    "sin",
]
KINDS = (
    {f"{name}_ptr": "*bf16" for name in ROWS}
    | {f"{name}_ptr": "*fp32" for name in FLOATS}
    | {"live_ptr": "*u8", "load_ptr": "*i64", "slots_ptr": "*i32"}
    | {"scaling": "fp32", "scale_log2": "fp32", "eps": "fp32"}
)
MULTIPLES = [
    "num_inputs",
    "num_outputs",
    "width",
    "stride_x",
    "stride_weight",
    "stride_latent",
    "stride_q_token",
    "stride_q_head",
    "stride_block",
    "stride_token",
    "stride_head",
    "stride_q",
    "size",
]
BIASES = ("expert_bias_ptr", "logit_bias_ptr")
DENSE = {"x_scales_ptr": None, "scales_ptr": None, "WIDE": False, "GROUP_ROWS": 1, "GROUPED": False}
LATENT = {"RANK": 512, "BLOCK_RANK": 512, "PIECE": 64, "ROPE": 64, "BLOCK_ROPE": 64}
# as launched for Qwen3-30B-A3B and DeepSeek-V3
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "router": (
        "experts.routes:router_product_kernel",
        {"BLOCK_ROWS": 16, "BLOCK_OUT": 16, "BLOCK_IN": 128, "SPLITS": 4, "BLOCK_COUNTS": 128},
        4,
    ),
    "choice": (
        "experts.routes:choose_kernel",
        {
            "SPLITS": 4,
            "NUM_GROUPS": 8,
            "GROUP_SIZE": 32,
            "BLOCK_GROUPS": 8,
            "BLOCK_SIZE": 32,
            "TOP_K": 8,
            "PLACES": 9,
            "BLOCK_K": 16,
            "TOP_GROUPS": 4,
            "SOFTMAX": False,
            "NORMALIZE": True,
            "BEST_TWO": True,
        },
        1,
    ),
    "plain choice": (
        "experts.routes:choose_kernel",
        {
            "SPLITS": 1,
            "NUM_GROUPS": 1,
            "GROUP_SIZE": 60,
            "BLOCK_GROUPS": 1,
            "BLOCK_SIZE": 64,
            "TOP_K": 4,
            "PLACES": 4,
            "BLOCK_K": 4,
            "TOP_GROUPS": 1,
            "SOFTMAX": True,
            "NORMALIZE": False,
            "BEST_TWO": False,
            "bias_ptr": None,
            "live_ptr": None,
        },
        1,
    ),
    "place": (
        "experts.places:place_kernel",
        {
            "NUM_LOCAL": 36,
            "NUM_SHARED": 1,
            "TP_RANK": 1,
            "TP": 2,
            "PLACES": 9,
            "BLOCK_PLACES": 16,
            "BLOCK_ROWS": 2,
        },
        1,
    ),
    "place one row": (
        "experts.places:place_kernel",
        {
            "NUM_LOCAL": 16,
            "NUM_SHARED": 0,
            "TP_RANK": 0,
            "TP": 1,
            "PLACES": 8,
            "BLOCK_PLACES": 8,
            "BLOCK_ROWS": 4,
            "counts_ptr": None,
            "slots_ptr": None,
        },
        1,
    ),
    "few gated": (
        "experts.products.few_rows:few_gated_kernel",
        {"NUM_INPUTS": 2048, "PLACES": 8, "SILU": True, "BLOCK_OUT": 1, "BLOCK_IN": 512},
        2,
    ),
    "few down": (
        "experts.products.few_rows:few_down_kernel",
        {
            "NUM_INPUTS": 768,
            "PLACES": 8,
            "BLOCK_PLACES": 8,
            "ADD": True,
            "BLOCK_OUT": 2,
            "BLOCK_IN": 512,
        },
        8,
    ),
    "many gated": (
        "experts.products.many_rows:expert_product_kernel",
        DENSE
        | {
            "NUM_EXPERTS": 128,
            "BLOCK_EXPERTS": 128,
            "PLACES": 8,
            "GATED": True,
            "SILU": True,
            "BLOCK_ROWS": 32,
            "BLOCK_OUT": 64,
            "BLOCK_IN": 128,
            "STAGES": 3,
            "x_steps": None,
            "weight_steps": None,
        },
        4,
    ),
    "many down": (
        "experts.products.many_rows:expert_product_kernel",
        DENSE
        | {
            "NUM_EXPERTS": 128,
            "BLOCK_EXPERTS": 128,
            "PLACES": 8,
            "GATED": False,
            "SILU": False,
            "BLOCK_ROWS": 64,
            "BLOCK_OUT": 128,
            "BLOCK_IN": 64,
            "STAGES": 4,
            "x_steps": None,
            "weight_steps": None,
        },
        4,
    ),
    "latent decode": (
        "latents.attention:latent_kernel",
        LATENT | {"PARTS": 16, "BLOCK_M": 16, "BLOCK_N": 64, "starts_ptr": None},
        4,
    ),
    "latent prefill": (
        "latents.attention:latent_kernel",
        LATENT | {"PARTS": 1, "BLOCK_M": 64, "BLOCK_N": 32},
        8,
    ),
    "latent merge": (
        "latents.attention:latent_merge_kernel",
        {"RANK": 512, "BLOCK": 128, "PARTS": 16},
        4,
    ),
    "laid out": (
        "latents.expanded_rows:lay_out_kernel",
        {
            "RANK": 512,
            "BLOCK_RANK": 512,
            "ROPE": 64,
            "BLOCK_ROPE": 64,
            "WIDTH": 192,
            "ROWS": 8,
            "COLUMNS": 1024,
        },
        4,
    ),
    "taken back": ("latents.expanded_rows:take_back_kernel", {"ROWS": 8, "COLUMNS": 1024}, 4),
    "latent rows": (
        "latents.rows:rope_write_latent_kernel",
        {
            "HALF": 32,
            "BLOCK_HALF": 32,
            "BLOCK_HEADS": 16,
            "RANK": 512,
            "BLOCK_RANK": 512,
            "PLUS_ONE": False,
            "INTERLEAVED": True,
        },
        4,
    ),
    "combine": (
        "experts.products.many_rows:combine_kernel",
        {"PLACES": 8, "ADD": True, "BLOCK": 1024},
        4,
    ),
}


# gpt-oss's: biases of router and experts, a clamped gate
for name in ("plain choice", "few gated", "few down", "many gated", "many down"):
    kernel, constants, num_warps = CASES[name]
    more = {"CLAMPED": True, "SILU": False} if "gated" in name else {}
    CASES[f"{name} with biases"] = kernel, constants | more | {"biased": True}, num_warps


@pytest.mark.parametrize("case", CASES)
def test_they_compile(case: str) -> None:
    name, constants, num_warps = CASES[case]
    constants = dict(constants)
    has_biases = constants.pop("biased", False)
    absent = {name: None for name in ([] if has_biases else BIASES)}
    constants = {"CLAMPED": False, "PDL": True} | absent | constants
    said = ptx(f"pdserve.kernels.{name}", constants, KINDS, num_warps, MULTIPLES)
    assert ("griddepcontrol.wait" in said) == ("expanded_rows" not in name)
    if "product_kernel" in name or ":latent_kernel" in name:
        assert "wgmma" in said or "mma.sync" in said
        assert "cp.async" in said
