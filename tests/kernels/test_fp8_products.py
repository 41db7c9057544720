"""Products in e4m3 on a GPU, in Triton's interpreter where none is: against their twin in plain
torch."""

from dataclasses import replace

import pytest
import torch
from test_triton import DEVICE, ON_GPU
from torch import Tensor

from pdserve.kernels.linear.fp8 import triton_ops as fp8_ops
from pdserve.kernels.linear.fp8.quantise import launch_quantise
from pdserve.kernels.linear.fp8.small_products import MAX_ROWS
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.schemes.fp8 import Fp8, Fp8Block, product, to_e4m3
from pdserve.kernels.linear.schemes.scheme import Cut, Scheme
from pdserve.kernels.norm import triton_ops as norms
from pdserve.kernels.norm.ops import Activation, Norm

pytestmark = pytest.mark.lengthy

SCHEMES = [Fp8(), Fp8Block()]
by_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)


def random(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def matrix_of(
    scheme: Scheme, num_outputs: int, num_inputs: int, dtype: torch.dtype = torch.float16
) -> tuple[Matrix, Matrix]:
    """As kernels take it, and its twin in float32."""
    cut = Cut(slice(0, num_outputs), num_outputs, slice(0, num_inputs), num_inputs)
    matrix = scheme.allocate([cut], dtype, torch.device(DEVICE))
    dense = random(num_outputs, num_inputs, dtype=torch.float32) * num_inputs**-0.5
    scheme.take(matrix, 0, scheme.quantise(dense * torch.rand(num_outputs, 1, device=DEVICE)))
    matrix = replace(matrix, bias=random(num_outputs, dtype=dtype))
    assert matrix.bias is not None
    return matrix, replace(scheme.twin(matrix, torch.float32), bias=matrix.bias.float())


def assert_near(made: Tensor, want: Tensor, sums_fast: bool = False) -> None:
    """With `sums_fast`, tensor cores have kept 14 bits of a sum: a few of many are off by more."""
    if sums_fast:
        gap = made.float() - want
        assert gap.norm() < 5e-3 * want.norm() and gap.abs().max() < 0.1
        return
    close = 1e-2 if made.dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(made.float(), want, rtol=close, atol=max(close, 1.5e-2))


def assert_mostly_near(made: Tensor, want: Tensor) -> None:
    """A norm that rounds otherwise in its last bit may round an activation to the next of e4m3."""
    gap = (made.float() - want).abs()
    close = 1e-2 if made.dtype == torch.bfloat16 else 2e-3
    assert (gap > 1.5e-2 + close * want.abs()).float().mean() < 5e-3
    assert gap.max() < 0.3


SHAPES = [(1, 200), (2, 200), (17, 200), (64, 200), (65, 200), (260, 130), (1, 2100), (40, 2100)]


@pytest.mark.sampled(5)
@by_scheme
@pytest.mark.parametrize("num_rows,num_inputs", SHAPES)
def test_products_are_those_of_the_twin(scheme: Scheme, num_rows: int, num_inputs: int) -> None:
    check(scheme, num_rows, 130, num_inputs, torch.float16)


@pytest.mark.gpu
@by_scheme
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 16, 33, 64, 65, 100, 256, 257, 1000, 4096])
def test_products_of_models(num_rows: int, dtype: torch.dtype, scheme: Scheme) -> None:
    """The shapes include those that cuBLAS takes, and scales for blocks that it would misread."""
    for num_inputs, num_outputs in ((4096, 6144), (14336, 4096), (896, 9728), (4096, 28672)):
        check(scheme, num_rows, num_outputs, num_inputs, dtype)
        check(scheme, num_rows, num_outputs, num_inputs, dtype, has_bias=False)


def check(
    scheme: Scheme,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    has_bias: bool = True,
) -> None:
    matrix, twin = matrix_of(scheme, num_outputs, num_inputs, dtype)
    if not has_bias:
        matrix, twin = replace(matrix, bias=None), replace(twin, bias=None)
    x = random(num_rows, num_inputs, dtype=dtype)
    norm = Norm(torch.ones_like(x[0]), 1e-5)
    want = product(x.float(), twin)
    sums_fast = DEVICE == "cuda" and num_rows > MAX_ROWS and not matrix.group[1]
    assert_near(fp8_ops.linear(x, matrix), want, sums_fast)
    stream = random(num_rows, num_outputs, dtype=dtype)
    made = fp8_ops.add_linear(stream.clone(), x, matrix)
    assert_near(made, stream.float() + want, sums_fast)
    want = product(norms.rms_norm(x, norm).float(), twin)
    made, finished = fp8_ops.norm_linear(x, norm, matrix)
    assert finished is x
    assert_mostly_near(made, want)
    gate, up = want.chunk(2, 1)
    hidden, _ = fp8_ops.norm_gated(x, norm, matrix, "silu")
    assert isinstance(hidden, Tensor)
    assert_mostly_near(hidden, torch.nn.functional.silu(gate) * up)


@pytest.mark.sampled(5)
@by_scheme
@pytest.mark.parametrize("num_rows", [3, 70])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_a_gate_that_is_left_to_the_next_product_gives_the_same_bits(
    activation: Activation, num_rows: int, scheme: Scheme
) -> None:
    inputs, size, outputs = 192, 160, 64
    wide, _ = matrix_of(scheme, 2 * size, inputs)
    narrow, _ = matrix_of(scheme, outputs, size)
    x, norm = random(num_rows, inputs), Norm(random(inputs), 1e-5)
    gated, _ = fp8_ops.norm_gated(x, norm, wide, activation)
    left, _ = fp8_ops.norm_gated(x, norm, wide, activation, may_leave_gate=True)
    assert isinstance(gated, Tensor) and gated.shape == (num_rows, size)
    is_fused = activation == "silu" and num_rows <= MAX_ROWS  # in the product before it
    assert isinstance(left, Tensor) == is_fused
    stream = random(num_rows, outputs)
    sums = [fp8_ops.add_linear(stream.clone(), hidden, narrow) for hidden in (gated, left)]
    assert torch.equal(*sums)
    assert torch.equal(fp8_ops.linear(left[1:], narrow), fp8_ops.linear(gated[1:], narrow))
    post = Norm(random(outputs), 1e-5)
    sums = [fp8_ops.add_linear(stream.clone(), hidden, narrow, post) for hidden in (gated, left)]
    assert torch.equal(*sums)


@pytest.mark.sampled(5)
@by_scheme
@pytest.mark.parametrize("num_inputs", [300, 4096 if ON_GPU else 272])
@pytest.mark.parametrize("num_rows", [5, 64, 80])
def test_rows_do_not_depend_on_others_and_nan_stays(
    scheme: Scheme, num_rows: int, num_inputs: int
) -> None:
    matrix, _ = matrix_of(scheme, 96, num_inputs)
    x = random(num_rows, num_inputs)
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
    x = (random(5, width, dtype=torch.float32) * torch.logspace(-3, 3, 5).to(DEVICE)[:, None]).to(
        dtype
    )
    x[1, width // 2] = float("nan")
    x[2] = 0
    codes, scales = (each.cpu() for each in launch_quantise(x, columns)[:2])
    want, want_scales = to_e4m3(x.cpu(), (1, columns))
    assert torch.equal(scales.nan_to_num(-1), want_scales.nan_to_num(-1))
    assert torch.equal(codes.float().nan_to_num(500), want.float().nan_to_num(500))


@pytest.mark.gpu
@by_scheme
@pytest.mark.parametrize("num_rows", [1, 7, 64, 300])
def test_graphs_give_the_same_again(scheme: Scheme, num_rows: int) -> None:
    """Splits of a product meet in counters that each call leaves as it found them."""
    matrix, _ = matrix_of(scheme, 4096, 14336, torch.bfloat16)
    x = random(num_rows, 14336, dtype=torch.bfloat16)
    want = fp8_ops.linear(x, matrix)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = [fp8_ops.linear(x, matrix) for _ in range(3)]
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(each, want) for each in made)
