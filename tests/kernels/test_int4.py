"""Weights of 4 bits: packed and back, quantised, and multiplied."""

import pytest
import torch

from pdserve.kernels.linear import reference
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.schemes.int4 import Int4, packed, unpacked
from pdserve.kernels.linear.schemes.scheme import Cut, Pieces

CPU = torch.device("cpu")


def held(scheme: Int4, dense: torch.Tensor) -> Matrix:
    rows, columns = dense.shape
    cut = Cut(slice(0, rows), rows, slice(0, columns), columns)
    matrix = scheme.allocate([cut], torch.float32, CPU)
    scheme.take(matrix, 0, Pieces(dense))
    return matrix


@pytest.mark.parametrize("columns", [8, 96, 128, 160, 512])
def test_what_was_packed_comes_back(columns: int) -> None:
    codes = torch.randint(0, 16, (6, columns), dtype=torch.uint8)
    data = packed(codes)
    assert data.dtype == torch.int32 and data.shape == (6, 16 * -(-columns // 128))
    assert torch.equal(unpacked(data, columns), codes)
    stacked = data.unflatten(0, (2, 3))
    assert torch.equal(unpacked(stacked, columns), codes.unflatten(0, (2, 3)))


def test_neighbours_are_in_neighbouring_words() -> None:
    """The order that products rely on."""
    codes = torch.randint(0, 16, (3, 256), dtype=torch.uint8)
    data = packed(codes)
    for column in (0, 1, 15, 16, 127, 128, 200):
        block, place = divmod(column, 128)
        number, word = divmod(place, 16)
        found = data[:, 16 * block + word].long() % 2**32 // 16**number % 16
        assert torch.equal(found, codes[:, column].long())


@pytest.mark.parametrize("columns", [0, 32, 64])
def test_each_number_is_a_nearest_one(columns: int) -> None:
    dense = torch.randn(5, 192) * torch.logspace(-20, 20, 5)[:, None]
    dense[1] = dense[1].abs()
    dense[2] = -dense[2].abs()
    scheme = Int4(columns)
    matrix = held(scheme, dense)
    assert matrix.scales is not None and matrix.zeros is not None
    groups = 192 // columns if columns else 1
    assert matrix.scales.shape == (5, groups) and matrix.zeros.shape == (5, 2)
    assert matrix.zeros.dtype == torch.int32 and matrix.shape == (5, 192)
    size = columns or 192
    steps = matrix.scales.double().repeat_interleave(size, 1)
    spread = torch.stack([matrix.zeros >> 8 * place & 0xFF for place in range(4)], 2)
    zeros = spread.flatten(1)[:, :6].double().repeat_interleave(32, 1)
    back = scheme.twin(matrix, torch.float32).data.double()
    gap = (back - dense.double()).abs()
    assert (gap <= steps * 1.0001).all(), "ends of a range are off by the zero's own rounding"
    every = (torch.arange(16).double()[:, None, None] - zeros) * steps
    nearest = (every - dense.double()).abs().amin(0)
    assert (
        torch.allclose(gap, nearest, rtol=1e-5, atol=0.0) or (gap - nearest <= steps * 1e-5).all()
    )


def test_zeros_and_numbers_that_are_not_finite() -> None:
    dense = torch.zeros(2, 64)
    dense[1, 3] = float("nan")
    scheme = Int4(32)
    back = scheme.twin(held(scheme, dense), torch.float32).data
    assert torch.equal(back[0], dense[0])


def test_a_product_is_that_of_the_dequantised_matrix_bit_for_bit() -> None:
    x = torch.randn(16, 160)
    scheme = Int4(32)
    twin = scheme.twin(held(scheme, torch.randn(48, 160)), torch.float32)
    assert twin.shape == (48, 160) and twin.kind == "int4"
    dense = Matrix(twin.data)
    assert torch.equal(scheme.ops(CPU).linear(x, twin), reference.linear(x, dense))
