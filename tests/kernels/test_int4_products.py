"""Products with int4 on a GPU, in Triton's interpreter where none is: against float64, beside the
CPU twin."""

from dataclasses import replace

import pytest
import torch
from test_triton import DEVICE, DTYPES, ON_GPU, assert_as_good
from torch import Tensor

from pdserve.kernels.linear import reference
from pdserve.kernels.linear.int4 import dense as int4_dense
from pdserve.kernels.linear.int4 import triton_ops as int4_ops
from pdserve.kernels.linear.int4.products import FEW_ROWS, MAX_ROWS, int4_tiles, rows_to_warm
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.schemes.int4 import Int4, packed, packed_zeros
from pdserve.kernels.norm.ops import Norm

pytestmark = pytest.mark.lengthy

ROWS = [1, 2, 17, 64, 65, 130, MAX_ROWS + 1 if ON_GPU else 150]
CASES = [  # columns of a group, inputs, outputs
    (32, 160, 40),
    (32, 384, 130),
    (64, 192, 66),
    (64, 320, 134),
    (128, 128, 6),
    (128, 2432, 70),
    (0, 72, 34),
    (0, 2312, 70),
]


def drawn(group: int, num_inputs: int, num_outputs: int, bias: Tensor | None = None) -> Matrix:
    """Draws a matrix of any numbers. Its zero points include 0, 15 and 16 in each group."""
    codes = torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8)
    shape = num_outputs, num_inputs // group if group else 1
    zeros = torch.randint(0, 17, shape, dtype=torch.uint8)
    zeros[0], zeros[1], zeros[2] = 0, 15, 16
    scales = (torch.rand(shape) + 0.5) * num_inputs**-0.5 / 4
    m = Matrix(
        packed(codes),
        scales=scales.mT.contiguous().mT,
        zeros=packed_zeros(zeros, group, num_inputs).mT.contiguous().mT,
        kind="int4",
        group=(1, group),
        num_columns=num_inputs,
    )
    tensors = {name: getattr(m, name).to(DEVICE) for name in ("data", "scales", "zeros")}
    return replace(m, bias=bias, **tensors)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def check(
    num_rows: int, group: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, bias: bool
) -> None:
    """Rounded weights, such as the twin's, are no better than exact ones, so the answer has exact
    ones. Products of many rows, which round as the twin does, are compared with the twin."""
    x = random(num_rows, num_inputs, dtype=dtype) * 3
    row = random(num_outputs, dtype=dtype)
    m = drawn(group, num_inputs, num_outputs, row if bias else None)
    twin = Int4(group).twin(m, dtype)
    weight = Int4(group).twin(m, torch.float32).data.double()
    answer = x.double() @ weight.T + (row.double() if bias else 0)
    theirs = reference.linear(x, twin)
    assert_as_good(int4_ops.linear(x, m), theirs, answer, terms=num_inputs)
    stream = random(num_rows, num_outputs, dtype=dtype)
    want = reference.add_linear(stream.clone(), x, twin)
    answer += stream.double()
    assert_as_good(int4_ops.add_linear(stream, x, m), want, answer, 2, num_inputs)

    norm = Norm(random(num_inputs, dtype=dtype), 1e-5)
    wide = x.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()
    answer = normed @ weight.T + (row.double() if bias else 0)
    [ours, _], [theirs, _] = (
        ops.norm_linear(x, norm, matrix) for ops, matrix in ((int4_ops, m), (reference, twin))
    )
    assert_as_good(ours, theirs, answer, 4, num_inputs)
    gate, up = answer.chunk(2, -1)
    [ours, _], [theirs, _] = (
        ops.norm_gated(x, norm, matrix, "silu")
        for ops, matrix in ((int4_ops, m), (reference, twin))
    )
    assert_as_good(ours, theirs, gate / (1 + (-gate).exp()) * up, 8, num_inputs)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("group,num_inputs,num_outputs", CASES)
def test_products(num_rows: int, group: int, num_inputs: int, num_outputs: int) -> None:
    number = ROWS.index(num_rows) + num_inputs // 8
    dtype = torch.bfloat16 if number % 2 else torch.float16
    check(num_rows, group, num_inputs, num_outputs, dtype, bias=number % 3 > 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [0, 32, 64, 128])
@pytest.mark.parametrize("num_rows", [*ROWS, 16, 33, 128, 400, MAX_ROWS])
def test_products_of_models(num_rows: int, group: int, dtype: torch.dtype) -> None:
    for num_inputs, num_outputs in ((14336, 4096), (896, 9728)):
        check(num_rows, group, num_inputs, num_outputs, dtype, bias=group == 32)


@pytest.mark.parametrize("num_rows", [1, 20, 130, MAX_ROWS + 1])
@pytest.mark.parametrize("group", [32, 128, 0])
def test_a_product_of_whole_numbers_is_exact(num_rows: int, group: int) -> None:
    """Every column is multiplied with its own number, and every group with its own scale and zero
    point."""
    m = drawn(group, 384, 40)
    assert m.scales is not None
    m.scales.copy_(2.0 ** torch.randint(-1, 2, m.scales.shape))
    x = torch.randint(-1, 2, (num_rows, 384), device=DEVICE).half()
    x *= (torch.rand(num_rows, 384, device=DEVICE) < 0.1).half()
    weight = Int4(group).twin(m, torch.float32).data.double()
    want = x.double() @ weight.T
    assert want.abs().max() < 1024
    assert torch.equal(int4_ops.linear(x, m).double(), want)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("num_rows", [2, 40, 150])
@pytest.mark.parametrize("group", [32, 64, 128, 0])
def test_a_row_does_not_depend_on_its_neighbours(group: int, num_rows: int) -> None:
    m = drawn(group, 2432 if group == 128 else 2112, 70)
    x = random(num_rows, m.shape[1], dtype=torch.bfloat16)
    want = int4_ops.linear(x, m)
    last = num_rows - 1
    for others in (0.0, 1e4, float("nan")):
        changed = torch.full_like(x, others)
        changed[last] = x[last]
        assert torch.equal(int4_ops.linear(changed, m)[last], want[last])
    if ON_GPU:  # the interpreter's product may add up by a row's place
        assert torch.equal(int4_ops.linear(x.flip(0), m), want.flip(0))


@pytest.mark.parametrize("num_rows", [1, 5, MAX_ROWS + 1])
def test_numbers_that_are_not_finite_reach_their_rows(num_rows: int) -> None:
    m = drawn(32, 160, 34)
    x = random(num_rows, 160, dtype=torch.float16)
    x[0, 100] = float("nan")
    out = int4_ops.linear(x, m)
    assert out[0].isnan().all() and out[1:].isfinite().all()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group,num_inputs,num_outputs", CASES)
def test_many_rows_see_the_twin(
    group: int, num_inputs: int, num_outputs: int, dtype: torch.dtype
) -> None:
    m = drawn(group, num_inputs, num_outputs)
    dense = int4_dense.dequantised_into_scratch(m, dtype)
    twin = Int4(group).twin(m, dtype).data
    if dtype == torch.bfloat16 and DEVICE == "cpu":  # the interpreter cuts where a GPU rounds
        torch.testing.assert_close(dense, twin, rtol=2**-7, atol=0.0)
    else:
        assert torch.equal(dense, twin)


def test_one_scratch_grows_to_the_largest_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    scratches: dict[tuple[torch.device, torch.dtype], Tensor] = {}
    monkeypatch.setattr(int4_dense, "_scratches", scratches)
    device = torch.device(DEVICE)
    small = int4_dense.scratch(10, torch.float16, device)
    large = int4_dense.scratch(20, torch.float16, device)
    again = int4_dense.scratch(10, torch.float16, device)
    other = int4_dense.scratch(10, torch.bfloat16, device)
    assert [len(each) for each in (small, large, again, other)] == [10, 20, 10, 10]
    assert again.data_ptr() == large.data_ptr() != other.data_ptr()
    assert sorted(map(len, scratches.values())) == [10, 20]


def test_splits_do_not_depend_on_the_rows() -> None:
    for num_rows in range(1, 65):
        assert int4_tiles(num_rows, 4096, 4096, 132).num_splits == 4
        assert int4_tiles(num_rows, 28672, 4096, 132).num_splits == 1


@pytest.mark.parametrize("num_matrix_rows", [1024, 4096, 6144, 8192, 28672, 57344])
def test_the_rows_to_warm_meet_all_tiles(num_matrix_rows: int) -> None:
    def tiles(rows: int) -> object:
        return int4_tiles(rows, num_matrix_rows, 4096, num_sms=132)

    every = {tiles(rows) for rows in range(FEW_ROWS + 1, MAX_ROWS + 1)}
    assert {tiles(rows) for rows in rows_to_warm()} == every
