"""What a rank holds of a weight: slices of checkpoint tensors and of drawn numbers, that are
together the whole."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.kernels.linear.matrix import WHOLE, Shard
from pdserve.kernels.linear.schemes.scheme import TensorSpec
from pdserve.models.dummy import fill_normal
from pdserve.models.weights import Init, Part, Weight

CPU = torch.device("cpu")


class Stored:
    """A checkpoint tensor that notes what is read of it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.shape)
        self.num_read = 0

    def read(self, window: tuple[slice, ...]) -> Tensor:
        piece = self._tensor[window]
        self.num_read += piece.numel()
        return piece


def weight_of(
    parts: list[Part], specs: Mapping[str, TensorSpec], shard: Shard = WHOLE, **inits: Init
) -> tuple[Weight, dict[str, Tensor]]:
    """The weight, and where its tensors are when it has finished."""
    held: dict[str, Tensor] = {}
    known: dict[str, Init] = {name: inits.get(name, "matrix") for name in specs}
    return Weight(parts, specs, known, CPU, held.update, shard), held


def dense(rows: int, columns: int) -> dict[str, TensorSpec]:
    return {"weight": TensorSpec((rows, columns), torch.float32, 0, 1)}


def load(weight: Weight, stored: dict[str, Tensor]) -> int:
    """Loads all that the weight takes; how many numbers were read."""
    read = 0
    for name in weight.names:
        source = Stored(stored[name])
        weight.load(name, source)
        read += source.num_read
    assert not weight.missing
    weight.finish()
    return read


def qkv(rank: int, count: int) -> list[Part]:
    """Ranks share the rows of q; each two share those of k."""
    return [Part("q", 8, rank, count), Part("k", 4, rank * 2 // count, 2)]


def test_ranks_read_their_rows_of_each_part() -> None:
    stored = {"q.weight": torch.randn(8, 6), "k.weight": torch.randn(4, 6)}
    held = []
    for rank in range(4):
        weight, tensors = weight_of(qkv(rank, 4), dense(2 + 2, 6))
        assert load(weight, stored) == 4 * 6, "more was read than the rank holds"
        held.append(tensors["weight"])
    assert torch.equal(torch.cat([rows[:2] for rows in held]), stored["q.weight"])
    for rank, rows in enumerate(held):
        assert torch.equal(rows[2:], stored["k.weight"].chunk(2)[rank // 2])


def test_ranks_read_their_columns() -> None:
    stored = {"o.weight": torch.randn(6, 8)}
    held = []
    for rank in range(2):
        weight, tensors = weight_of([Part("o", 6)], dense(6, 4), Shard("in", rank, 2))
        assert load(weight, stored) == 6 * 4
        held.append(tensors["weight"])
    assert torch.equal(torch.cat(held, dim=1), stored["o.weight"])


@pytest.mark.parametrize("axis", ["out", "in"])
def test_what_ranks_draw_is_a_part_of_the_whole(axis: str) -> None:
    whole, drawn = weight_of([Part("m", 8)], dense(8, 6))
    whole.draw(3)
    whole.finish()
    parts = []
    for rank in range(2):
        if axis == "out":
            weight, tensors = weight_of([Part("m", 8, rank, 2)], dense(4, 6))
        else:
            weight, tensors = weight_of([Part("m", 8)], dense(8, 3), Shard("in", rank, 2))
        weight.draw(3)
        weight.finish()
        parts.append(tensors["weight"])
    assert torch.equal(torch.cat(parts, dim=0 if axis == "out" else 1), drawn["weight"])


def test_numbers_of_a_window_are_those_of_the_whole() -> None:
    whole = torch.empty(7, 5, 4)
    fill_normal(whole, 1.0, "key")
    part = torch.empty(3, 2, 4)
    fill_normal(part, 1.0, "key", (2, 1, 0), whole.shape)
    assert torch.equal(part, whole[2:5, 1:3])
    assert whole.unique().numel() > 130


def test_tensors_of_other_shapes_are_cut_in_proportion() -> None:
    """Four numbers of a row packed in one, transposed; a scale for each group of 4 columns; one
    number a module."""
    stored: dict[str, Tensor] = {}
    for module, rows in (("gate", 16), ("up", 16)):
        stored[f"{module}.packed"] = torch.randint(100, (8, rows // 4)).int()
        stored[f"{module}.scales"] = torch.randn(rows, 2)
        stored[f"{module}.amax"] = torch.randn(())
    specs = {
        "packed": TensorSpec((8, 4), torch.int32, out_axis=1, in_axis=0),
        "scales": TensorSpec((16, 2), torch.float32, out_axis=0, in_axis=1),
        "amax": TensorSpec((), torch.float32),
    }
    parts = [Part("gate", 16, 1, 2), Part("up", 16, 1, 2)]
    weight, tensors = weight_of(parts, specs)
    load(weight, stored)
    both = ("gate", "up")
    assert torch.equal(
        tensors["packed"], torch.cat([stored[f"{m}.packed"][:, 2:] for m in both], 1)
    )
    assert torch.equal(tensors["scales"], torch.cat([stored[f"{m}.scales"][8:] for m in both]))
    assert torch.equal(tensors["amax"], torch.stack([stored[f"{m}.amax"] for m in both]))

    columns = Shard("in", 1, 2)
    specs = {
        "packed": TensorSpec((4, 4), torch.int32, out_axis=1, in_axis=0),
        "scales": TensorSpec((16, 1), torch.float32, out_axis=0, in_axis=1),
    }
    weight, tensors = weight_of([Part("gate", 16)], specs, columns)
    load(weight, stored)
    assert torch.equal(tensors["packed"], stored["gate.packed"][4:])
    assert torch.equal(tensors["scales"], stored["gate.scales"][:, 1:])


def test_a_finished_weight_keeps_nothing() -> None:
    weight, tensors = weight_of([Part("m", 2)], dense(2, 2))
    load(weight, {"m.weight": torch.ones(2, 2)})
    assert weight.num_bytes == 0 and tensors["weight"].sum() == 4


def fails(match: str) -> Any:
    return pytest.raises(ValueError, match=match)


def test_wrong_tensors_are_named() -> None:
    with fails("q has 6 rows, which 4 ranks cannot share"):
        Part("q", 6, 0, 4)
    weight, _ = weight_of([Part("m", 4, 0, 2)], dense(2, 3))
    with fails(r"m.weight has shape \[2, 3\] in the checkpoint; config.json says \[4, 3\]"):
        weight.load("m.weight", Stored(torch.ones(2, 3)))
    with fails(r"m.weight is torch.int64: quantised"):
        weight.load("m.weight", Stored(torch.ones(4, 3).long()))
    packed, _ = weight_of([Part("m", 4)], {"packed": TensorSpec((4, 3), torch.int8, 0, 1)})
    with fails(r"m.packed is torch.float32, not torch.int8 as its scheme says"):
        packed.load("m.packed", Stored(torch.ones(4, 3)))
    with fails(r"m.packed is torch.int8: load_format 'dummy' draws floating weights alone"):
        packed.draw(0)
