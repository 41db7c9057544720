"""Tests what ranks hold of weights that a checkpoint stores in 4 bits. The numbers, zeros and
scales of all parts are together those of the whole."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from support.quantised import dequantise
from support.stored_weights import Stored, Tensors, load, weight_of

from demo.storing import store_awq, store_gptq, store_packed
from pdserve.kernels.linear.matrix import WHOLE, Shard
from pdserve.kernels.linear.schemes.dense import Dense
from pdserve.kernels.linear.schemes.int4 import Int4
from pdserve.kernels.linear.schemes.scheme import Scheme
from pdserve.models.formats.source_format import Packing, SourceFormat
from pdserve.models.sources.int4 import AwqSource, GptqSource, PackedSource
from pdserve.models.sources.source import Source
from pdserve.models.weights import Part

GROUP = 32
PACKED = ("weight_packed", "weight_scale", "weight_shape")
WORDS = ("qweight", "qzeros", "scales")


@dataclasses.dataclass(frozen=True)
class Way:
    packing: Packing
    tensors: tuple[str, ...]
    has_zeros: bool
    source: Callable[[SourceFormat], Source]
    store: Callable[[torch.Tensor, int], Tensors]

    def source_of(self, group: int) -> Source:
        format = SourceFormat(
            kind="int4",
            packing=self.packing,
            group=(1, max(group, 0)),
            has_zeros=self.has_zeros,
            tensors=self.tensors,
        )
        return self.source(format)


WAYS = {
    "awq": Way("awq", WORDS, True, AwqSource, store_awq),
    "gptq": Way("gptq", (*WORDS, "g_idx"), True, GptqSource, lambda m, g: store_gptq(m, g, False)),
    "gptq_v2": Way(
        "gptq_v2",
        (*WORDS, "g_idx"),
        True,
        GptqSource,
        lambda m, g: store_gptq(m, g, False, is_v2=True),
    ),
    "packed": Way("compressed", PACKED, False, PackedSource, store_packed),
    "packed with zeros": Way(
        "compressed",
        (*PACKED, "weight_zero_point"),
        True,
        PackedSource,
        lambda m, g: store_packed(m, g, is_symmetric=False),
    ),
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def stored_as(way: Way, module: str, rows: int, columns: int, group: int) -> Tensors:
    matrix = torch.randn(rows, columns) * torch.rand(rows, 1)
    matrix[2] = matrix[2].abs()  # a zero point of 0
    return {f"{module}.{name}": tensor for name, tensor in way.store(matrix, group).items()}


def exact(way: Way, stored: Tensors, module: str) -> torch.Tensor:
    """In float64, rounded to float32."""
    own = {n.removeprefix(f"{module}."): t for n, t in stored.items() if n.startswith(f"{module}.")}
    return torch.from_numpy(dequantise(own, way.packing)).float()


@each_way
@pytest.mark.parametrize("group", [GROUP, -1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_of_every_rank(way: Way, group: int, ranks: int) -> None:
    """12 rows for a rank end within a word of eight."""
    rows = {"q": 24, "k": 16}
    stored: Tensors = {}
    for module, count in rows.items():
        stored |= stored_as(way, module, count, 160, group)
    wholes = [exact(way, stored, module) for module in rows]
    scheme = Int4(max(group, 0))
    for rank in range(ranks):
        parts = [Part(module, count, rank, ranks) for module, count in rows.items()]
        weight, matrix = weight_of(parts, 160, WHOLE, way.source_of(group), scheme)
        assert matrix.shape == (40 // ranks, 160)
        load(weight, stored)
        want = torch.cat([whole.chunk(ranks)[rank] for whole in wholes])
        assert torch.equal(scheme.twin(matrix, torch.float32).data, want)


@each_way
@pytest.mark.parametrize("group", [GROUP, -1])
def test_columns_of_every_rank(way: Way, group: int) -> None:
    """A rank reads its own words and groups, and no more."""
    stored = stored_as(way, "o", 24, 192, group)
    whole = exact(way, stored, "o")
    source, scheme = way.source_of(group), Int4(max(group, 0))
    held, read = [], 0
    for rank in range(2):
        weight, matrix = weight_of([Part("o", 24)], 96, Shard("in", rank, 2), source, scheme)
        read += load(weight, stored)
        held.append(scheme.twin(matrix, torch.float32).data)
    assert torch.equal(torch.cat(held, 1), whole)
    everyones = sum(
        tensor.numel()
        for name, tensor in stored.items()
        if group == -1 or name.endswith(("g_idx", "weight_shape"))
        if not name.endswith(("qweight", "weight_packed"))
    )
    assert read == sum(tensor.numel() for tensor in stored.values()) + everyones


@each_way
def test_columns_that_cut_a_group_are_refused(way: Way) -> None:
    shard = Shard("in", 0, 2)
    with pytest.raises(ValueError, match=r"columns 0 to 80 of 160.*32 columns.*tensor_parallel"):
        weight_of([Part("o", 24)], 80, shard, way.source_of(GROUP), Int4(GROUP))


@each_way
def test_dense_takes_them_too(way: Way) -> None:
    stored = stored_as(way, "m", 24, 64, GROUP)
    weight, matrix = weight_of([Part("m", 24)], 64, source=way.source_of(GROUP), scheme=Dense())
    load(weight, stored)
    assert torch.equal(matrix.data, exact(way, stored, "m"))


def test_a_stack_is_its_matrices() -> None:
    way, scheme = WAYS["awq"], Int4(GROUP)
    stored = stored_as(way, "a", 24, 160, GROUP) | stored_as(way, "b", 24, 160, GROUP)
    weight, matrix = weight_of(
        [Part("a", 24), Part("b", 24)], 160, source=way.source_of(GROUP), scheme=scheme
    )
    load(weight, stored)
    stack = matrix.stacked(2)
    assert stack.shape == (24, 160)
    twin = scheme.twin(stack, torch.float32)
    for number, module in enumerate("ab"):
        assert torch.equal(twin.expert(number).data, exact(way, stored, module))


def test_drawn_numbers_are_quantised() -> None:
    plain, drawn = weight_of([Part("m", 24)], 160)
    plain.draw(3)
    scheme: Scheme = Int4(GROUP)
    weight, matrix = weight_of(
        [Part("m", 24)], 160, source=WAYS["awq"].source_of(GROUP), scheme=scheme
    )
    weight.draw(3)
    gap = (scheme.twin(matrix, torch.float32).data - drawn.data).abs().max()
    assert 0 < gap < drawn.data.abs().max() / 7


@pytest.mark.parametrize("way", ["gptq", "packed", "awq"])
def test_what_contradicts_itself_is_named(way: str) -> None:
    stored = stored_as(WAYS[way], "m", 24, 64, GROUP)
    wrong, said = {
        "gptq": ("g_idx", "m.g_idx says that columns of a group are not neighbours"),
        "packed": ("weight_shape", r"m.weight_shape is \[64, 24\], but config.json says"),
        "awq": ("scales", "m.scales has numbers that cannot be scales"),
    }[way]
    tensor = stored[f"m.{wrong}"]
    stored[f"m.{wrong}"] = tensor.flip(0) if way != "awq" else tensor * torch.nan
    weight, _ = weight_of(
        [Part("m", 24)], 64, source=WAYS[way].source_of(GROUP), scheme=Int4(GROUP)
    )
    with pytest.raises(ValueError, match=said):
        for name in weight.names:
            weight.load(name, Stored(stored[name]))
