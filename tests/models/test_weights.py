"""Tests what ranks hold of a weight: slices of checkpoint tensors and of drawn numbers, which are
together the whole."""

from typing import Any

import pytest
import torch
from support.stored_weights import Stored, Tensors, load, weight_of

from pdserve.kernels.linear.matrix import Shard
from pdserve.models.dummy import fill_normal
from pdserve.models.weights import Part, Plain


def qkv(rank: int, count: int) -> list[Part]:
    """Ranks share the rows of q; each two share those of k."""
    return [Part("q", 8, rank, count), Part("k", 4, rank * 2 // count, 2)]


def test_ranks_read_their_rows_of_each_part() -> None:
    stored = {"q.weight": torch.randn(8, 6), "k.weight": torch.randn(4, 6)}
    held = []
    for rank in range(4):
        weight, matrix = weight_of(qkv(rank, 4), 6)
        assert load(weight, stored) == 4 * 6, "more was read than the rank holds"
        held.append(matrix.data)
    assert torch.equal(torch.cat([rows[:2] for rows in held]), stored["q.weight"])
    for rank, rows in enumerate(held):
        assert torch.equal(rows[2:], stored["k.weight"].chunk(2)[rank // 2])


def test_ranks_read_their_columns() -> None:
    stored = {"o.weight": torch.randn(6, 8)}
    held = []
    for rank in range(2):
        weight, matrix = weight_of([Part("o", 6)], 4, Shard("in", rank, 2))
        assert load(weight, stored) == 6 * 4
        held.append(matrix.data)
    assert torch.equal(torch.cat(held, dim=1), stored["o.weight"])


def test_one_module_may_be_several_parts() -> None:
    """As shared experts are: each has rows of the module."""
    stored = {"m.weight": torch.randn(8, 3)}
    weight, matrix = weight_of([Part("m", 8, 3, 4), Part("m", 8, 0, 4)], 3)
    assert load(weight, stored) == 4 * 3
    assert torch.equal(matrix.data, stored["m.weight"][[6, 7, 0, 1]])


@pytest.mark.parametrize("axis", ["out", "in"])
def test_what_ranks_draw_is_a_part_of_the_whole(axis: str) -> None:
    whole, drawn = weight_of([Part("m", 8)], 6)
    whole.draw(3)
    parts = []
    for rank in range(2):
        if axis == "out":
            weight, matrix = weight_of([Part("m", 8, rank, 2)], 6)
        else:
            weight, matrix = weight_of([Part("m", 8)], 3, Shard("in", rank, 2))
        weight.draw(3)
        parts.append(matrix.data)
    assert torch.equal(torch.cat(parts, dim=0 if axis == "out" else 1), drawn.data)


def test_numbers_of_a_window_are_those_of_the_whole() -> None:
    whole = torch.empty(7, 5, 4)
    fill_normal(whole, 1.0, "key")
    part = torch.empty(3, 2, 4)
    fill_normal(part, 1.0, "key", (2, 1, 0), whole.shape)
    assert torch.equal(part, whole[2:5, 1:3])
    assert whole.unique().numel() > 130


def test_plain_tensors_are_stacked_beside_the_matrix() -> None:
    """A bias is cut as the rows are, whatever scheme the matrix has."""
    parts = [Part("q", 4, 1, 2), Part("k", 2)]
    plain = {"bias": Plain((), torch.float32, "bias"), "wide": Plain((3,), torch.half, "ones")}
    stored: Tensors = {}
    for part in parts:
        stored[f"{part.module}.weight"] = torch.randn(part.rows, 5)
        stored[f"{part.module}.bias"] = torch.randn(part.rows).double()
        stored[f"{part.module}.wide"] = torch.randn(part.rows, 3)
    weight, _ = weight_of(parts, 5, plain=plain)
    tensors = weight.tensors
    load(weight, stored)
    for name, dtype in (("bias", torch.float32), ("wide", torch.half)):
        want = torch.cat((stored[f"q.{name}"][2:], stored[f"k.{name}"])).to(dtype)
        assert torch.equal(tensors[name], want)


def test_a_stack_is_its_matrices() -> None:
    stored = {"a.weight": torch.randn(4, 3), "b.weight": torch.randn(4, 3)}
    weight, matrix = weight_of([Part("a", 4), Part("b", 4)], 3)
    load(weight, stored)
    stack = matrix.stacked(2)
    assert stack.shape == (4, 3)
    for number, module in enumerate("ab"):
        assert torch.equal(stack.expert(number).data, stored[f"{module}.weight"])
        assert stack.expert(number).data.data_ptr() == matrix.data[4 * number].data_ptr()


def test_a_finished_weight_keeps_nothing() -> None:
    weight, matrix = weight_of([Part("m", 2)], 2)
    assert weight.num_bytes == 2 * 2 * 4
    load(weight, {"m.weight": torch.ones(2, 2)})
    assert weight.num_bytes == 0 and matrix.data.sum() == 4


def fails(match: str) -> Any:
    return pytest.raises(ValueError, match=match)


def test_wrong_tensors_are_named() -> None:
    with fails("q has 6 rows, which 4 ranks cannot share"):
        Part("q", 6, 0, 4)
    weight, _ = weight_of([Part("m", 4, 0, 2)], 3)
    with fails(r"m.weight has shape \[2, 3\] in the checkpoint; config.json says \[4, 3\]"):
        weight.load("m.weight", Stored(torch.ones(2, 3)))
    with fails(r"m.weight is I64 in the checkpoint"):
        weight.load("m.weight", Stored(torch.ones(4, 3).long()))
