"""Tests what ranks hold of weights that a checkpoint stores in e4m3. The codes and scales of all
parts, with any groups, are together those of the whole."""

from typing import Any

import pytest
import torch
from support.stored_weights import CPU, Stored, Tensors, load, weight_of
from torch import Tensor

from pdserve.kernels.e4m3 import E4M3
from pdserve.kernels.linear.matrix import WHOLE, Matrix, Shard
from pdserve.kernels.linear.schemes.dense import Dense
from pdserve.kernels.linear.schemes.fp8 import BLOCK, Fp8, Fp8Block
from pdserve.kernels.linear.schemes.scheme import dequantised
from pdserve.models.formats.fp8 import PER_ROW, PER_TENSOR, with_input_scale
from pdserve.models.formats.source_format import SourceFormat
from pdserve.models.sources.fp8 import Fp8Source
from pdserve.models.weights import Part, Plain, StoredMatrix, Weight

BLOCKS = SourceFormat(kind="fp8_block", group=(BLOCK, BLOCK), tensors=("weight", "weight_scale"))


def fails(match: str) -> Any:
    return pytest.raises(ValueError, match=match)


def fp8_stored(module: str, rows: int, columns: int, shape: tuple[int, ...]) -> Tensors:
    """Codes in all of e4m3's range, and scales of this shape."""
    return {
        f"{module}.weight": (torch.randn(rows, columns) * 100).clamp(-448, 448).to(E4M3),
        f"{module}.weight_scale": torch.rand(shape) + 0.1,
    }


def exact(codes: Tensor, scales: Tensor) -> Tensor:
    """In float64, rounded to float32. scales: one for each code."""
    return (codes.double() * scales.double()).float()


def numbers(matrix: Matrix) -> Tensor:
    assert matrix.scales is not None
    return dequantised(matrix.data, matrix.scales, group=matrix.group)


@pytest.mark.parametrize("names_reversed", [False, True])
def test_scales_of_modules_and_of_rows_go_into_one_matrix(names_reversed: bool) -> None:
    """Whichever tensor comes first; a scale of activations is known and not waited for."""
    stored = fp8_stored("q", 6, 5, (6, 1)) | fp8_stored("k", 4, 5, ())
    parts = [Part("q", 6, 1, 2), Part("k", 4, 1, 2)]
    cuts = [part.cut(5, WHOLE) for part in parts]
    matrix = Fp8().allocate(cuts, torch.float32, CPU)
    sources = [Fp8Source(with_input_scale(f)) for f in (PER_ROW, PER_TENSOR)]
    weight = Weight(parts, {}, CPU, lambda _: None, StoredMatrix(matrix, Fp8(), sources, cuts))
    assert {"q.input_scale", "k.input_scale"} <= set(weight.names)
    assert weight.missing == set(stored)
    weight.load("q.input_scale", Stored(torch.ones(())))
    names = sorted(stored, reverse=names_reversed)
    assert load(weight, stored, names) == 3 * 5 + 3 + 2 * 5 + 1
    want = torch.cat(
        [
            exact(stored["q.weight"], stored["q.weight_scale"])[3:],
            exact(stored["k.weight"], stored["k.weight_scale"])[2:],
        ]
    )
    assert torch.equal(numbers(matrix), want)


def block_stored(module: str, rows: int, columns: int) -> Tensors:
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    return fp8_stored(module, rows, columns, blocks)


def blocks_exact(stored: Tensors, module: str) -> Tensor:
    codes, scales = stored[f"{module}.weight"], stored[f"{module}.weight_scale"]
    each = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return exact(codes, each[: len(codes), : codes.shape[1]])


@pytest.mark.parametrize(
    ("rows", "ranks", "group_rows"),
    [
        ((256, 128), 1, BLOCK),
        ((256, 100), 1, BLOCK),  # the last may end within a block
        ((100, 256), 1, 1),
        ((512, 256), 2, BLOCK),
        ((192, 192), 2, 1),  # a rank begins within a block
        ((384,), 2, 1),
    ],
)
def test_blocks_of_all_cuts(rows: tuple[int, ...], ranks: int, group_rows: int) -> None:
    stored: Tensors = {}
    for number, count in enumerate(rows):
        stored |= block_stored(f"m{number}", count, 200)
    wholes = [blocks_exact(stored, f"m{number}") for number in range(len(rows))]
    groups = set()
    for rank in range(ranks):
        parts = [Part(f"m{number}", count, rank, ranks) for number, count in enumerate(rows)]
        source = Fp8Source(BLOCKS)
        weight, matrix = weight_of(parts, 200, source=source, scheme=Fp8Block())
        load(weight, stored)
        groups.add(matrix.group)
        want = torch.cat([whole.chunk(ranks)[rank] for whole in wholes])
        assert torch.equal(numbers(matrix), want)
        assert matrix.scales is not None
        assert matrix.scales.shape == (-(-len(want) // matrix.group[0]), 2)
    assert (group_rows, BLOCK) in groups


def test_blocks_of_columns() -> None:
    stored = block_stored("o", 200, 512)
    whole = blocks_exact(stored, "o")
    source = Fp8Source(BLOCKS)
    held = []
    for rank in range(2):
        shard = Shard("in", rank, 2)
        weight, matrix = weight_of([Part("o", 200)], 256, shard, source, Fp8Block())
        assert load(weight, stored) == 200 * 256 + 2 * 2
        held.append(numbers(matrix))
    assert torch.equal(torch.cat(held, 1), whole)
    with fails("columns 0 to 100 of 200, but each scale covers 128 columns.*tensor_parallel"):
        weight_of([Part("o", 200)], 100, Shard("in", 0, 2), source, Fp8Block())


def test_dense_takes_what_is_quantised() -> None:
    """As attention over latents needs it."""
    stored = block_stored("kv", 384, 130)
    parts = [Part("kv", 384, 1, 2)]
    weight, matrix = weight_of(parts, 130, source=Fp8Source(BLOCKS))
    load(weight, stored)
    assert matrix.kind == "dense" and matrix.data.dtype == torch.float32
    assert torch.equal(matrix.data, blocks_exact(stored, "kv")[192:])


def test_a_stack_is_its_matrices() -> None:
    stored = block_stored("a", 256, 130) | block_stored("b", 256, 130)
    for scheme in (Fp8Block(), Dense()):
        source = Fp8Source(BLOCKS)
        parts = [Part("a", 256), Part("b", 256)]
        weight, matrix = weight_of(parts, 130, source=source, scheme=scheme)
        load(weight, stored)
        stack = matrix.stacked(2)
        assert stack.shape == (256, 130)
        twin = scheme.twin(stack, torch.float32)
        for number, module in enumerate("ab"):
            assert torch.equal(twin.expert(number).data, blocks_exact(stored, module))
            assert stack.expert(number).data.data_ptr() == stack.data[number].data_ptr()


def test_drawn_numbers_are_quantised() -> None:
    plain, drawn = weight_of([Part("m", 256)], 130)
    plain.draw(3)
    for scheme in (Fp8(), Fp8Block()):
        quantised, matrix = weight_of([Part("m", 256)], 130, scheme=scheme)
        quantised.draw(3)
        assert not quantised.missing
        gap = (numbers(matrix) - drawn.data).abs().max()
        assert 0 < gap < drawn.data.abs().max() / 16


def test_a_bias_stands_beside_a_quantised_matrix() -> None:
    stored = {"q.weight": torch.randn(4, 5), "q.bias": torch.randn(4)}
    plain = {"bias": Plain((), torch.float32, "bias")}
    weight, matrix = weight_of([Part("q", 4, 1, 2)], 5, scheme=Fp8(), plain=plain)
    tensors = weight.tensors
    assert weight.num_bytes == 2 * 5 + 2 * 4 + 2 * 4, "codes, scales, bias"
    load(weight, stored)
    assert torch.equal(tensors["bias"], stored["q.bias"][2:])
    assert torch.allclose(numbers(matrix), stored["q.weight"][2:], rtol=0.07)


def test_wrong_tensors_are_named() -> None:
    weight, _ = weight_of(
        [Part("m", 4)], 3, source=Fp8Source(with_input_scale(PER_ROW)), scheme=Fp8()
    )
    with fails(r"m.weight is F32 in the checkpoint; config.json says F8_E4M3"):
        weight.load("m.weight", Stored(torch.ones(4, 3)))
    with fails(r"m.weight_scale has shape \[3\] .* says \[4, 1\] or \[4\]"):
        weight.load("m.weight_scale", Stored(torch.ones(3)))
    with fails(r"m.input_scale has shape \[2\] .* says \[\] or \[1\] or \[1, 1\]"):
        weight.load("m.input_scale", Stored(torch.ones(2)))
    assert weight.missing == {"m.weight", "m.weight_scale"}


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
def test_scales_that_are_none_are_named(wrong: float) -> None:
    stored = fp8_stored("m", 4, 3, (4,))
    stored["m.weight_scale"][2] = wrong
    weight, _ = weight_of(
        [Part("m", 4)], 3, source=Fp8Source(with_input_scale(PER_ROW)), scheme=Fp8()
    )
    weight.load("m.weight", Stored(stored["m.weight"]))
    with fails("m.weight_scale has numbers that cannot be scales"):
        weight.load("m.weight_scale", Stored(stored["m.weight_scale"]))
