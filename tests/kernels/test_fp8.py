"""Products with weights in e4m3 on CPU: what rounding does, and that a row does not depend on the
rows beside it."""

import pytest
import torch
from torch import Tensor

from pdserve.kernels.experts import reference as experts_reference
from pdserve.kernels.experts.ops import Choice, Experts
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.schemes.fp8 import (
    BLOCK,
    E4M3,
    LARGEST,
    Fp8,
    Fp8Block,
    rounded,
    to_e4m3,
)
from pdserve.kernels.linear.schemes.scheme import Cut, Scheme

CPU = torch.device("cpu")
SCHEMES = [Fp8(), Fp8Block()]
by_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)


def matrix_of(scheme: Scheme, dense: Tensor) -> Matrix:
    """Quantised, as the CPU's ops take it."""
    rows, columns = dense.shape
    matrix = scheme.allocate(
        [Cut(slice(0, rows), rows, slice(0, columns), columns)], torch.float32, CPU
    )
    scheme.take(matrix, 0, scheme.quantise(dense))
    return scheme.twin(matrix, torch.float32)


@pytest.mark.parametrize("group", [(1, 0), (1, BLOCK), (BLOCK, BLOCK), (BLOCK, 0)])
def test_each_group_reaches_the_largest_number(group: tuple[int, int]) -> None:
    """And no more, though quotients round; every number is a nearest one of e4m3."""
    x = torch.randn(300, 257) * torch.logspace(-30, 30, 300)[:, None]
    codes, scales = to_e4m3(x, group)
    down, across = group[0], group[1] or 257
    assert codes.shape == x.shape and codes.float().isfinite().all()
    assert scales.shape == (-(-300 // down), -(-257 // across))
    every = torch.arange(256, dtype=torch.uint8).view(E4M3).double()
    every = every[every.isfinite()]
    for row in range(0, 300, 37):
        for column in (0, 127, 128, 256):
            block = x[row // down * down :][:down, column // across * across :][:, :across]
            scale = scales[row // down, column // across].double()
            assert abs(scale * LARGEST / block.abs().max().double() - 1) < 1e-6
            assert (
                codes[row // down * down :][:down, column // across * across :][:, :across]
                .float()
                .abs()
                .max()
                == LARGEST
            )
            wanted = x[row, column].double() / scale
            gap = (every - wanted).abs().min()
            assert abs(codes[row, column].double() - wanted) <= gap * (1 + 1e-6) + 1e-12


def test_what_has_no_largest_number_stays_as_it_is() -> None:
    x = torch.zeros(4, 256)
    x[1, 3] = 1e-42
    x[2, 200] = float("nan")
    x[3] = -5.0
    for columns in (0, BLOCK):
        back = rounded(x, columns)
        assert torch.equal(back[0], x[0]) and back[1].abs().max() <= 1e-41
        assert back[2, 200].isnan()
        assert torch.allclose(back[3], x[3], rtol=1e-6)


@by_scheme
def test_a_product_is_that_of_rounded_numbers(scheme: Scheme) -> None:
    x = torch.randn(16, 200) * 3
    dense = torch.randn(130, 200)
    matrix = matrix_of(scheme, dense)
    group = matrix.group[1]
    want = rounded(x, group).double() @ matrix.data.double().T
    made = scheme.ops(CPU).linear(x, matrix)
    assert torch.allclose(made.double(), want, atol=1e-4)
    true = x.double() @ dense.double().T
    error = (made - true).norm() / true.norm()
    assert 0.005 < error < 0.06, "e4m3 has three bits behind the point"


@by_scheme
def test_rows_do_not_depend_on_others(scheme: Scheme) -> None:
    x = torch.randn(64, 200)
    x[5] *= 1000
    matrix = matrix_of(scheme, torch.randn(96, 200))
    product = scheme.ops(CPU).linear
    whole = product(x, matrix)
    for rows in (16, 32, 48):
        assert torch.equal(product(x[:rows], matrix), whole[:rows])
        assert torch.equal(product(x[-rows:], matrix), whole[-rows:])


@by_scheme
def test_experts_are_multiplied_as_single_matrices(scheme: Scheme) -> None:
    hidden, size = 128, 128
    gate_up = [matrix_of(scheme, torch.randn(2 * size, hidden) / 11) for _ in range(3)]
    down = [matrix_of(scheme, torch.randn(hidden, size) / 11) for _ in range(3)]

    def stack(matrices: list[Matrix]) -> Matrix:
        data = torch.stack([matrix.data for matrix in matrices])
        return Matrix(data, kind=scheme.name, group=matrices[0].group)

    ops = scheme.ops(CPU)
    experts = Experts(stack(gate_up), stack(down), "silu", ops)
    x = torch.randn(16, hidden)
    chosen = torch.tensor([[row % 3] for row in range(16)], dtype=torch.int32)
    made = experts_reference.mix(x, Choice(chosen, torch.ones(16, 1)), experts)
    for row in range(16):
        number = row % 3
        rows = x[row].expand(16, hidden).contiguous()
        gate, up = ops.linear(rows, gate_up[number]).chunk(2, 1)
        want = ops.linear(torch.nn.functional.silu(gate) * up, down[number])[0]
        assert torch.allclose(made[row], want, atol=1e-5)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
def test_older_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    said = f"9.0 .* A100 has {capability[0]}.{capability[1]}: use .* 16-bit"
    with pytest.raises(ValueError, match=said):
        Fp8().ops(torch.device("cuda"))
