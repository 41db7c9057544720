"""Products with int4 whose activations are rounded to e4m3, on a GPU, in Triton's interpreter where
none is: against float64, and beside their twin in plain torch."""

from dataclasses import replace

import pytest
import torch
from support.quantised import nearest_e4m3
from test_fp8_products import assert_mostly_near, assert_near
from test_int4_products import CASES
from test_triton import DEVICE, DTYPES, ON_GPU
from torch import Tensor

from pdserve.kernels.collective.ops import Unsummed
from pdserve.kernels.linear.fp8.small_products import MAX_ROWS
from pdserve.kernels.linear.fp8.tiles import tile_size
from pdserve.kernels.linear.int4 import products, rounded_ops
from pdserve.kernels.linear.int4 import triton_ops as int4_ops
from pdserve.kernels.linear.int4.dense import rounded_into_scratch
from pdserve.kernels.linear.int4.rounded_ops import FEW_ROWS
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.ops import LinearOps, Ungated
from pdserve.kernels.linear.schemes.fp8 import rounded
from pdserve.kernels.linear.schemes.int4_fp8 import Int4Fp8
from pdserve.kernels.linear.schemes.scheme import Cut, Pieces
from pdserve.kernels.norm import triton_ops as norms
from pdserve.kernels.norm.ops import Activation, Norm

pytestmark = pytest.mark.lengthy

MANY = [FEW_ROWS + 1, 260] if ON_GPU else [FEW_ROWS + 1, 150]
CPU = torch.device("cpu")


def random(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def pieces_of(group: int, num_inputs: int, num_outputs: int) -> Pieces:
    """Draws any numbers. Zero points include 0, 15 and 16; scales of a row differ by up to 2**12,
    and one row has none but 0."""
    codes = torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8)
    shape = num_outputs, num_inputs // group if group else 1
    zeros = torch.randint(0, 17, shape).float()
    zeros[0], zeros[1], zeros[2] = 0, 15, 16
    scales = (torch.rand(shape) + 0.5) * num_inputs**-0.5 / 16
    scales[3] *= 2.0 ** torch.randint(-12, 1, shape[1:])
    scales[4] = 0.0
    return Pieces(codes, scales, zeros, (1, group))


def matrix_of(pieces: Pieces, dtype: torch.dtype = torch.float16) -> tuple[Matrix, Matrix]:
    """Makes the matrix that kernels take, and its twin in float32."""
    num_outputs, num_inputs = pieces.codes.shape
    scheme = Int4Fp8(pieces.group[1])
    cut = Cut(slice(0, num_outputs), num_outputs, slice(0, num_inputs), num_inputs)
    m = scheme.allocate([cut], dtype, torch.device(DEVICE))
    scheme.take(m, 0, pieces)
    bias = random(num_outputs, dtype=dtype)
    twin = replace(scheme.twin(m, torch.float32), bias=bias.float())
    return replace(m, bias=bias), twin


@pytest.mark.parametrize("group,num_inputs,num_outputs", CASES)
def test_codes_are_the_nearest_ones(group: int, num_inputs: int, num_outputs: int) -> None:
    pieces = pieces_of(group, num_inputs, num_outputs)
    assert pieces.scales is not None and pieces.zeros is not None
    matrix, twin = matrix_of(pieces)
    made = rounded_into_scratch(matrix)
    assert made.scales is not None and made.data.shape == (num_outputs, num_inputs)
    assert torch.equal(made.data.float() * made.scales, twin.data)

    columns = torch.arange(num_inputs) // (group or num_inputs)
    wide = pieces.scales.double()[:, columns]
    numbers = pieces.codes.double() - pieces.zeros.double()[:, columns]
    steps = wide.amax(1, keepdim=True) / 16
    ratios = torch.where(steps > 0, wide / steps.clamp(min=1e-300), 0.0)
    wanted = torch.from_numpy(nearest_e4m3((numbers * ratios).numpy()))
    # float32 may put a number that lies between two codes on its other side
    other = torch.from_numpy(nearest_e4m3((numbers * ratios * (1 + 2.0**-22)).numpy()))
    codes = made.data.cpu().double()
    assert ((codes == wanted) | (codes == other)).all()
    largest = wide == wide.amax(1, keepdim=True)
    assert torch.equal(codes[largest], (numbers * ratios)[largest]), "whole numbers are exact"
    if not group:
        assert largest.all()


def test_each_matrix_is_in_the_scratch_when_it_is_multiplied() -> None:
    x = random(FEW_ROWS + 1, 160)
    pairs = [matrix_of(pieces_of(32, 160, rows)) for rows in (40, 70, 24)]
    for matrix, twin in pairs + pairs[::-1]:
        made = rounded_ops.linear(x, matrix)
        assert_near(made, cpu_ops().linear(x.float(), twin), sums_fast=ON_GPU)


def cpu_ops() -> LinearOps:
    return Int4Fp8(0).ops(CPU)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("num_rows", MANY)
@pytest.mark.parametrize("group,num_inputs,num_outputs", CASES)
def test_products(num_rows: int, group: int, num_inputs: int, num_outputs: int) -> None:
    """Against float64, whose factors are rounded as the scheme says."""
    dtype = DTYPES[1 + (num_inputs // 8) % 2]
    matrix, twin = matrix_of(pieces_of(group, num_inputs, num_outputs), dtype)
    assert twin.bias is not None
    x = random(num_rows, num_inputs, dtype=dtype) * torch.rand(num_rows, 1, device=DEVICE).to(dtype)
    factors = rounded(x.float(), 0).double(), twin.data.double()
    want = (factors[0] @ factors[1].mT + twin.bias.double()).float()
    made = rounded_ops.linear(x, matrix)
    assert_near(made, want, sums_fast=ON_GPU)
    stream = random(num_rows, num_outputs, dtype=dtype)
    assert torch.equal(rounded_ops.add_linear(stream.clone(), x, matrix), stream + made)
    want -= twin.bias
    gaps = [
        (ops.linear(x, replace(matrix, bias=None)).float() - want).norm()
        for ops in (rounded_ops, int4_ops)
    ]
    assert gaps[0] < gaps[1] / 2, "activations are not rounded"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("group", [0, 32, 64, 128])
@pytest.mark.parametrize("num_rows", [65, 128, 400, 1024, 1025])
def test_products_of_models(num_rows: int, group: int, dtype: torch.dtype) -> None:
    for num_inputs, num_outputs in ((14336, 4096), (896, 9728)):
        check_product(num_rows, pieces_of(group, num_inputs, num_outputs), dtype)


def check_product(num_rows: int, pieces: Pieces, dtype: torch.dtype) -> None:
    matrix, twin = matrix_of(pieces, dtype)
    x = random(num_rows, pieces.codes.shape[1], dtype=dtype)
    want = cpu_ops().linear(x.float(), twin)
    assert_near(rounded_ops.linear(x, matrix), want, sums_fast=True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("num_rows", MANY)
def test_norms_and_gates(num_rows: int, activation: Activation) -> None:
    matrix, twin = matrix_of(pieces_of(64, 192, 256))
    stream = random(num_rows, 192)
    norm = Norm(random(192), 1e-5)
    want = cpu_ops().linear(norms.rms_norm(stream, norm).float(), twin)
    made, finished = rounded_ops.norm_linear(stream, norm, matrix)
    assert finished is stream
    assert_mostly_near(made, want)
    whole, _ = rounded_ops.norm_gated(stream, norm, matrix, activation)
    assert isinstance(whole, Tensor)
    assert_mostly_near(whole, norms.gate(want, activation))

    taker, taker_twin = matrix_of(pieces_of(128, 128, 40))
    hidden, _ = rounded_ops.norm_gated(stream, norm, matrix, activation, may_leave_gate=True)
    assert isinstance(hidden, Ungated), "many rows are gated while they are rounded"
    gated = norms.gate(hidden.product, activation)
    want = cpu_ops().linear(gated.float(), taker_twin)
    assert_mostly_near(rounded_ops.linear(hidden, taker), want)
    piece = hidden[num_rows - 3 :]
    assert torch.equal(rounded_ops.linear(piece, taker), int4_ops.linear(gated[-3:], taker))
    left = random(3, 40)
    added = rounded_ops.add_linear(left.clone(), piece, taker)
    assert torch.equal(added, int4_ops.add_linear(left, gated[-3:], taker))


@pytest.mark.parametrize("num_rows", [0, 1, 17, FEW_ROWS])
def test_few_rows_are_not_rounded(num_rows: int) -> None:
    matrix, _ = matrix_of(pieces_of(32, 160, 80))
    x, stream = random(num_rows, 160), random(num_rows, 80)
    norm = Norm(random(160), 1e-5)
    for ours, theirs in (
        (rounded_ops.linear(x, matrix), int4_ops.linear(x, matrix)),
        (rounded_ops.norm_linear(x, norm, matrix)[0], int4_ops.norm_linear(x, norm, matrix)[0]),
        (
            rounded_ops.norm_gated(x, norm, matrix, "silu", may_leave_gate=True)[0],
            int4_ops.norm_gated(x, norm, matrix, "silu")[0],
        ),
        (
            rounded_ops.add_linear(stream.clone(), x, matrix),
            int4_ops.add_linear(stream.clone(), x, matrix),
        ),
    ):
        assert isinstance(ours, Tensor) and torch.equal(ours, theirs)


class Pending:
    """A sum over ranks that adds nothing."""

    def sum(self) -> Tensor:
        raise AssertionError("the norm adds it")

    def add_norm(self, stream: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return norms.rms_norm(stream, norm), stream


@pytest.mark.parametrize("num_rows", [3, FEW_ROWS + 1])
def test_a_stream_that_lacks_a_sum(num_rows: int) -> None:
    matrix, _ = matrix_of(pieces_of(64, 192, 70))
    stream, norm = random(num_rows, 192), Norm(random(192), 1e-5)
    normed = norms.rms_norm(stream, norm)
    made, finished = rounded_ops.norm_linear(Unsummed(stream, Pending()), norm, matrix)
    assert finished is stream and torch.equal(made, rounded_ops.linear(normed, matrix))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("group", [32, 64, 128, 0])
def test_a_row_does_not_depend_on_its_neighbours(group: int) -> None:
    matrix, _ = matrix_of(pieces_of(group, 2432 if group == 128 else 2112, 70), torch.bfloat16)
    num_rows = FEW_ROWS + 6
    x = random(num_rows, matrix.shape[1], dtype=torch.bfloat16)
    want = rounded_ops.linear(x, matrix)
    for others in (0.0, 1e4, float("nan")):
        changed = torch.full_like(x, others)
        changed[-1] = x[-1]
        assert torch.equal(rounded_ops.linear(changed, matrix)[-1], want[-1])


def test_the_rows_to_warm_meet_all_tiles() -> None:
    """More rows than FEW_ROWS have no other kernels than the products of fp8."""
    assert FEW_ROWS >= MAX_ROWS
    rows = products.rows_to_warm()
    assert {tile_size(each) for each in rows} == {
        tile_size(each) for each in range(FEW_ROWS + 1, 8193)
    }
