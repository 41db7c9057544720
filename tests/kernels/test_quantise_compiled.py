"""The rounding of activations to e4m3, compiled for a GPU that need not be there: rows of any model
stay in registers, and are read in pieces of 16 bytes."""

import re

import pytest
from compiled import ptx

from pdserve.kernels.launching.launch import cdiv, next_power_of_2
from pdserve.kernels.linear.fp8.quantise import quantise_warps

pytestmark = pytest.mark.processes

KINDS = {
    "x_ptr": "*bf16",
    "norm_ptr": "*bf16",
    "codes_ptr": "*fp8e4nv",
    "scales_ptr": "*fp32",
    "eps": "fp32",
}


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("before", ["nothing", "norm", "silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [768, 4096, 14336, 28672])
def test_rows_stay_in_registers(width: int, before: str, is_grouped: bool) -> None:
    block = next_power_of_2(cdiv(width, 128))
    constants = {
        "chosen_ptr": None,
        "WIDTH": width,
        "NORM": before == "norm",
        "PLUS_ONE": False,
        "GATED": before in ("silu", "gelu_tanh"),
        "SILU": before == "silu",
        "CLAMPED": False,
        "GROUPED": is_grouped,
        "BLOCK": block,
        "PDL": True,
    }
    if before != "norm":
        constants["norm_ptr"] = None
    name = "pdserve.kernels.linear.fp8.quantise:quantise_kernel"
    said = ptx(name, constants, KINDS, quantise_warps(block), ["stride_x"])
    assert ".local" not in said and "griddepcontrol.wait" in said
    loads = re.findall(r"ld\.global\.(v\d)?", said)
    assert loads and set(loads) == {"v4"}
