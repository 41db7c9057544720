"""Products of few rows, compiled for a GPU that need not be there: they ask for weights before they
wait for the kernels before them."""

from typing import Any

import pytest
from compiled import ptx

pytestmark = pytest.mark.processes

KINDS = {f"{name}_ptr": "*bf16" for name in ("x", "weight", "out")}
KINDS |= {f"{name}_ptr": "*fp32" for name in ("scales", "x_scales", "partial")}
CODES = {"x_ptr": "*fp8e4nv", "weight_ptr": "*fp8e4nv"}
CONSTANTS: dict[str, Any] = {"SILU": True, "ADD": False, "NUM_SPLITS": 1, "STAGES": 4, "PDL": True}
CONSTANTS |= {"bias_ptr": None, "partial_ptr": None, "arrivals_ptr": None, "BLOCK_OUT": 64}
CONSTANTS |= {"BLOCK_ROWS": 16}
PRODUCTS = {
    "linear.small_products": ({"BLOCK_IN": 128}, {}),
    "linear.fp8.small_products": ({"STEPS": 2, "GROUPED": False, "GROUP_ROWS": 1}, CODES),
    "linear.int4.products": ({"GROUP": 128, "FOLDED": False, "NUM_BLOCKS": 1}, {}),
}


@pytest.mark.parametrize("ahead", [0, 1024])
@pytest.mark.parametrize("module", PRODUCTS)
def test_weights_are_asked_for_before_the_wait(module: str, ahead: int) -> None:
    own, kinds = PRODUCTS[module]
    name = "int4_product_kernel" if "int4" in module else "small_product_kernel"
    said = ptx(
        f"pdserve.kernels.{module}:{name}",
        CONSTANTS | own | {"AHEAD": ahead},
        KINDS | kinds,
        4,
        ["num_inputs", "stride_x", "stride_weight", "stride_words", "stride_scales"],
    )
    asked, _, waited = said.partition("griddepcontrol.wait")
    assert waited and "prefetch.global.L2" not in waited
    assert ("prefetch.global.L2" in asked) == (ahead > 0)


@pytest.mark.parametrize("grouped", [False, True])
def test_one_row_of_codes_is_cast_by_instructions(grouped: bool) -> None:
    """Bytes are not moved one by one, and the first weights are loaded before the wait."""
    constants: dict[str, Any] = {"SILU": True, "ADD": False, "bias_ptr": None, "PDL": True}
    constants |= {"GROUPED": grouped, "GROUP_ROWS": 128 if grouped else 1}
    constants |= {"BLOCK_OUT": 2, "BLOCK_WORDS": 512}
    said = ptx(
        "pdserve.kernels.linear.fp8.row_product:row_product_kernel",
        constants,
        {f"{name}_ptr": "*i32" for name in ("x", "weight")}
        | {f"{name}_ptr": "*fp32" for name in ("x_scales", "scales")}
        | {"out_ptr": "*bf16"},
        4,
        ["num_words"],
    )
    assert "cvt.rn.f16x2.e4m3x2" in said and "prmt" not in said and ".local" not in said
    before, _, _ = said.partition("griddepcontrol.wait")
    assert "ld.global" in before and "v4" in before
