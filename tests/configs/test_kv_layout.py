"""The arithmetic of a block's bytes, checked against a tensor of that shape."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pdserve.configs.kv_layout import DTYPE_BYTES, KVLayout, LayerGroup, rows_digest

TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
}


def layout(**changes: Any) -> KVLayout:
    values = {
        "num_layers": 3,
        "heads": (4, 5, 6, 7),
        "head_dim": 8,
        "block_size": 16,
        "dtype": "bfloat16",
        **changes,
    }
    return KVLayout.uniform(**values)


@given(
    num_layers=st.integers(1, 5),
    num_heads=st.integers(1, 6),
    first_head=st.integers(0, 9),
    head_dim=st.sampled_from([2, 12, 64, 80]),
    block_size=st.sampled_from([1, 16, 128]),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    data=st.data(),
)
def test_bytes_are_those_of_a_contiguous_tensor(
    num_layers: int,
    num_heads: int,
    first_head: int,
    head_dim: int,
    block_size: int,
    dtype: str,
    data: st.DataObject,
) -> None:
    heads = tuple(range(first_head, first_head + num_heads))
    made = KVLayout.uniform(
        num_layers=num_layers, heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    [shape] = made.shapes
    block = torch.empty(shape, dtype=TORCH[dtype])
    size = block.element_size()
    assert block.shape == (num_heads, num_layers, 2, block_size, head_dim)
    assert made.block_bytes == block.numel() * size
    assert made.offsets == (0,) and made.head_bytes == (block.stride(0) * size,)
    assert made.token_bytes == made.block_bytes // block_size
    start = data.draw(st.integers(0, num_heads - 1))
    end = data.draw(st.integers(start + 1, num_heads))
    part = block[start:end]
    assert part.is_contiguous()
    assert (part.storage_offset() * size, part.numel() * size) == (
        start * made.head_bytes[0],
        len(part) * made.head_bytes[0],
    )


def test_blocks_for_tokens() -> None:
    assert [layout().num_blocks_for(count) for count in (0, 1, 16, 17, 32, 33)] == [
        0,
        1,
        1,
        2,
        2,
        3,
    ]


def test_an_8b_block_is_2_mib() -> None:
    made = KVLayout.uniform(
        num_layers=32, heads=tuple(range(8)), head_dim=128, block_size=16, dtype="bfloat16"
    )
    assert made.block_bytes == 2 << 20 and made.head_bytes == (256 << 10,)


def test_one_plane_is_half_a_block() -> None:
    group = LayerGroup(layers=(0, 1), heads=(0,), row_width=4, planes=1, dtype="float16")
    made = KVLayout(groups=(group,), block_size=2)
    assert made.shapes == ((1, 2, 1, 2, 4),)
    assert (made.head_bytes, made.block_bytes) == ((32,), 32)


@given(
    widths=st.lists(st.sampled_from([8, 16, 24, 64, 72]), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    block_size=st.sampled_from([1, 2, 16, 64]),
)
def test_groups_stand_one_after_another_and_rows_at_multiples_of_themselves(
    widths: list[int], heads: int, block_size: int
) -> None:
    groups = tuple(
        LayerGroup(
            layers=(2 * number, 2 * number + 1),
            heads=tuple(range(heads)),
            planes=1 + number % 2,
            row_width=width,
            dtype="bfloat16",
        )
        for number, width in enumerate(widths)
    )
    made = KVLayout(groups=groups, block_size=block_size)
    end = 0
    for shape, offset, head_bytes in zip(made.shapes, made.offsets, made.head_bytes, strict=True):
        assert offset == end
        end += 2 * torch.Size(shape).numel()
        assert heads * head_bytes == end - offset
    assert end <= made.block_bytes == block_size * made.token_bytes
    for shape in made.shapes:
        plane_bytes = 2 * block_size * shape[-1]
        assert made.block_bytes % plane_bytes == 0, "the reference addresses planes of a layer"
    assert made.token_bytes == made.with_block_size(4 * block_size).token_bytes


def test_the_digest_says_whether_bytes_mean_the_same() -> None:
    def digest(*layouts: KVLayout, model: str = "model") -> str:
        return rows_digest(model, [group for one in layouts for group in one.groups])

    base = digest(layout())
    assert base == digest(layout(heads=(0, 1)))  # a rank with other heads
    assert base == digest(layout(heads=(0,)), layout(heads=(1,)))
    assert base == digest(layout(block_size=32))  # rows pass through a staging ring
    assert base == digest(layout()) and len(base) == 32
    [group] = layout().groups
    half = len(group.layers) // 2
    stages = [
        KVLayout(groups=(group.model_copy(update={"layers": layers}),), block_size=16)
        for layers in (group.layers[:half], group.layers[half:])
    ]
    assert base == digest(*stages) != digest(stages[0])
    others = [
        digest(layout(), model="other"),
        digest(layout(num_layers=4)),
        digest(layout(head_dim=16)),
        digest(layout(dtype="float16")),
    ]
    assert len({base, *others}) == 5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "float8"}, "dtype must be one of"),
        ({"num_layers": 0}, "needs layers"),
        ({"heads": ()}, "needs layers, heads"),
        ({"head_dim": 0}, "row_width"),
        ({"block_size": 24}, "power of two"),
        ({"block_size": 0}, "power of two"),
    ],
)
def test_a_bad_layout_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        layout(**changes)


def test_groups_hold_each_layer_once_and_are_frozen() -> None:
    [group] = layout().groups
    with pytest.raises(ValidationError, match="groups must hold each layer once"):
        KVLayout(groups=(group, group), block_size=16)
    with pytest.raises(ValidationError, match="groups must hold each layer once"):
        KVLayout(groups=(), block_size=16)
    other = LayerGroup(layers=(7,), heads=(0,), row_width=4, dtype="bfloat16")
    with pytest.raises(ValidationError, match=r"multiples of 16 bytes, not \[16, 8\]"):
        KVLayout(groups=(group, other), block_size=16)
    with pytest.raises(ValidationError, match="planes"):
        LayerGroup(layers=(0,), heads=(0,), row_width=4, planes=3)
    with pytest.raises(ValidationError, match="frozen"):
        layout().block_size = 32  # type: ignore[misc]
