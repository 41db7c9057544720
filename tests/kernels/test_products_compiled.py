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
