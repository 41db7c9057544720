"""Tests which sizes of steps are captured, and which one a step takes. (Captures and replays are in
test_gpu.py.)"""

import pytest

from pdserve.engine.graph_sizes import (
    DENSE_ROWS,
    decode_sizes,
    fast_sizes,
    nearest_size,
    prompt_sizes,
    representative,
)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64, 100, 256, 500, 512])
def test_every_batch_up_to_the_largest_has_a_graph_not_much_larger(most: int) -> None:
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for batch in range(1, most + 1):
        size = min(size for size in sizes if size >= batch)
        assert size - batch < max(16 if batch > 128 else 8, 1)
        assert batch > 4 or size <= 2 * batch


def test_sizes_grow_with_ranks_and_with_experts() -> None:
    dense, pair, experts, shared = (
        prompt_sizes(8192, has_experts, ranks)
        for has_experts, ranks in ((False, 1), (False, 2), (True, 1), (True, 2))
    )
    assert dense[-1] == DENSE_ROWS
    assert pair == experts and set(dense) < set(pair) < set(shared)
    assert pair[-1] >= 2048 + 512, "two prompts of 1,024 tokens, or one of 2,048, beside decodes"
    assert shared[-1] == 8192, "a full step"
    assert all(size % 4 == 0 for size in shared), "arrays of a step begin at such places"
    pairs = zip([0, *shared], shared, strict=False)
    assert all(size - last <= max(64, last // 4) for last, size in pairs), "too much padding"


@pytest.mark.parametrize(
    ("max_rows", "last"), [(300, 300), (302, 300), (256, 256), (2, 0), (8000, 8000), (20000, 8192)]
)
def test_the_last_size_is_a_full_step_if_it_is_not_too_large(max_rows: int, last: int) -> None:
    sizes = prompt_sizes(max_rows, True, 4)
    assert max(sizes, default=0) == last and sizes == sorted(set(sizes))
    assert all(size % 4 == 0 for size in sizes)


def test_a_step_takes_the_next_size() -> None:
    sizes = prompt_sizes(8192, True, 2)
    rows = (1, 64, 65, 2561, 3072, 3073, 7168, 7169, 8192, 8193)
    found = [nearest_size(sizes, num) for num in rows]
    assert found == [64, 64, 128, 3072, 3072, 3584, 7168, 7680, 8192, 0]


def test_sizes_that_are_slower_than_a_larger_one_are_left_out() -> None:
    assert fast_sizes({64: 4.0, 128: 5.0, 448: 16.6, 512: 13.9, 640: 13.9}) == [64, 128, 640]
    assert fast_sizes({}) == []


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        ([1, 2, 4, 8, 16, 24, 32, 40, 64, 100], [100, 64, 32, 16, 8, 4, 2, 1]),
        ([64, 128, 192, 256, 320], [320, 256, 128, 64]),
        ([3], [3]),
        ([], []),
    ],
)
def test_sizes_up_to_the_same_power_of_two_have_one_that_stands_for_them(
    sizes: list[int], chosen: list[int]
) -> None:
    assert representative(sizes) == representative(sizes[::-1]) == chosen
