"""The Triton products in e4m3 against their twin in plain torch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pdserve.kernels.linear import fp8_ops
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.quantise import launch_quantise
from pdserve.kernels.linear.schemes.fp8 import Fp8, Fp8Block, product, to_e4m3
from pdserve.kernels.linear.schemes.scheme import Cut, Scheme
from pdserve.kernels.norm import triton_ops as norms
from pdserve.kernels.norm.ops import Norm

CPU = torch.device("cpu")
SCHEMES = [Fp8(), Fp8Block()]
by_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)


def matrix_of(scheme: Scheme, num_outputs: int, num_inputs: int) -> tuple[Matrix, Matrix]:
    """As kernels take it, and its twin in float32."""
    cut = Cut(slice(0, num_outputs), num_outputs, slice(0, num_inputs), num_inputs)
    matrix = scheme.allocate([cut], torch.float16, CPU)
    dense = torch.randn(num_outputs, num_inputs) * torch.rand(num_outputs, 1) * num_inputs**-0.5
    scheme.take(matrix, 0, scheme.quantise(dense))
    matrix = replace(matrix, bias=torch.randn(num_outputs).half())
    assert matrix.bias is not None
    return matrix, replace(scheme.twin(matrix, torch.float32), bias=matrix.bias.float())


def assert_near(made: Tensor, want: Tensor) -> None:
    # a norm that rounds otherwise in its last bit may round an activation to the next of e4m3
    torch.testing.assert_close(made.float(), want, rtol=2e-3, atol=1.5e-2)


@by_scheme
@pytest.mark.parametrize("num_inputs", [200, 2100])
@pytest.mark.parametrize("num_rows", [1, 2, 17, 64, 65, 300])
def test_products_are_those_of_the_twin(scheme: Scheme, num_rows: int, num_inputs: int) -> None:
    matrix, twin = matrix_of(scheme, 130, num_inputs)
    x, norm = torch.randn(num_rows, num_inputs).half(), Norm(torch.ones(num_inputs).half(), 1e-5)
    want = product(x.float(), twin)
    assert_near(fp8_ops.linear(x, matrix), want)
    stream = torch.randn(num_rows, 130).half()
    assert_near(fp8_ops.add_linear(stream.clone(), x, matrix), stream.float() + want)
    want = product(norms.rms_norm(x, norm).float(), twin)
    made, finished = fp8_ops.norm_linear(x, norm, matrix)
    assert finished is x
    assert_near(made, want)
    gate, up = want.chunk(2, 1)
    made, _ = fp8_ops.norm_gated(x, norm, matrix, "silu")
    assert_near(made, torch.nn.functional.silu(gate) * up)


@by_scheme
@pytest.mark.parametrize("num_rows", [5, 64, 80])
def test_rows_do_not_depend_on_others_and_nan_stays(scheme: Scheme, num_rows: int) -> None:
    matrix, _ = matrix_of(scheme, 96, 300)
    x = torch.randn(num_rows, 300).half()
    alone = fp8_ops.linear(x, matrix)
    x[3, 7] = float("nan")
    x[4] = 0
    made = fp8_ops.linear(x, matrix)
    assert made[3].isnan().all()
    assert matrix.bias is not None and torch.equal(made[4], matrix.bias)
    others = [row for row in range(num_rows) if row not in (3, 4)]
    assert torch.equal(made[others], alone[others])


@pytest.mark.parametrize("columns", [0, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 100, 384, 1000])
def test_activations_are_rounded_bit_for_bit(width: int, dtype: torch.dtype, columns: int) -> None:
    x = (torch.randn(5, width) * torch.logspace(-3, 3, 5)[:, None]).to(dtype)
    x[1, width // 2] = float("nan")
    x[2] = 0
    codes, scales = launch_quantise(x, columns)
    want, want_scales = to_e4m3(x, (1, columns))
    assert torch.equal(scales.nan_to_num(-1), want_scales.nan_to_num(-1))
    assert torch.equal(codes.float().nan_to_num(500), want.float().nan_to_num(500))
