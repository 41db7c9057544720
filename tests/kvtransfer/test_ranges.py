"""Descriptor arithmetic, also for tensor parallel degrees that differ, checked against copying
element by element."""

import msgspec
import numpy as np
import pytest

from pdserve.configs.kv_layout import KVLayout
from pdserve.kvtransfer.p2p.ranges import (
    BlockSizes,
    HeadRange,
    count_descriptors,
    local_descriptors,
    order_pairs,
    plan_for,
    plan_heads,
    remote_descriptors,
)
from pdserve.protocol.handoff import GroupMemory, RankMemory


def layout(heads: tuple[int, ...]) -> KVLayout:
    return KVLayout.uniform(num_layers=2, heads=heads, head_dim=4, block_size=16, dtype="float32")


def rank_pool(heads: tuple[int, ...], address: int = 0) -> RankMemory:
    return RankMemory(
        agent_name="p",
        agent_metadata=b"",
        address=address,
        memory="DRAM",
        device_id=0,
        groups=(GroupMemory((0, 1), heads, 0, layout(heads).head_bytes),),
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "step", "covered", "filled"),
    [
        (16, 16, 1, (3, 5), 5),
        (64, 16, 4, (12, 20), 1),
        (16, 64, 1, (0, 2), 20),
        (32, 128, 1, (0, 2), 20),
    ],
)
def test_blocks_of_other_sizes(
    ours: int, theirs: int, step: int, covered: tuple[int, int], filled: int
) -> None:
    """Ours from 3 to before 5 of them; five of theirs."""
    sizes = BlockSizes(ours, theirs)
    assert (sizes.step, sizes.cover(3, 5), sizes.filled(5)) == (step, covered, filled)


def test_equal_heads_are_one_whole_block() -> None:
    assert plan_heads((0, 1, 2, 3), [(0, 1, 2, 3)], 10) == [HeadRange(0, 0, 0, 40)]


def test_wide_prefill_narrow_decode_takes_each_rank_once() -> None:
    plan = plan_heads((0, 1, 2, 3), [(0, 1), (2, 3)], 10)
    assert plan == [HeadRange(0, 0, 0, 20), HeadRange(1, 20, 0, 20)]


def test_narrow_prefill_wide_decode_takes_a_part() -> None:
    assert plan_heads((2, 3), [(0, 1, 2, 3)], 10) == [HeadRange(0, 0, 20, 20)]


def test_replicated_heads_are_read_from_one_rank() -> None:
    assert plan_heads((1,), [(0,), (0,), (1,), (1,)], 10) == [HeadRange(2, 0, 0, 10)]


def test_a_peer_that_stores_other_layers_or_rows_is_refused() -> None:
    ours = layout((0, 1))
    good = rank_pool((0, 1))
    assert plan_for(ours, [good]) == [HeadRange(0, 0, 0, ours.block_bytes)]
    group = good.groups[0]
    later = msgspec.structs.replace(good, groups=(msgspec.structs.replace(group, offset=96),))
    assert plan_for(ours, [later]) == [HeadRange(0, 0, 96, ours.block_bytes)]
    for groups in (
        (msgspec.structs.replace(group, layers=(0, 1, 2)),),
        (group, group),
        (),
    ):
        with pytest.raises(ValueError, match="the peer stores layers in groups"):
            plan_for(ours, [msgspec.structs.replace(good, groups=groups)])
    wide = msgspec.structs.replace(group, head_bytes=group.head_bytes + 8)
    with pytest.raises(ValueError, match="KV head bytes differ"):
        plan_for(ours, [msgspec.structs.replace(good, groups=(wide,))])


def test_missing_head_is_named() -> None:
    with pytest.raises(ValueError, match="KV head 5 is stored on no rank"):
        plan_heads((4, 5), [(0, 1), (4,)], 10)


@pytest.mark.parametrize("heads", [(0, 1, 2, 3), (1, 2), (3, 0, 1)])
@pytest.mark.parametrize("ranks", [[(0, 1, 2, 3)], [(0, 1), (2, 3)], [(0,), (3,), (2, 1)]])
def test_plan_moves_every_head_of_every_block(
    heads: tuple[int, ...], ranks: list[tuple[int, ...]]
) -> None:
    """Apply the pieces to byte arrays: each destination head must hold exactly that global head of
    that block."""
    ours = layout(heads)
    num_blocks = 5
    head_bytes = ours.head_bytes

    def content(block: int, head: int) -> np.ndarray:
        return np.full(head_bytes, 10 * block + head, np.uint8)

    pools = [
        np.concatenate([content(block, head) for block in range(num_blocks) for head in stored])
        for stored in ranks
    ]
    local = np.zeros(num_blocks * ours.block_bytes, np.uint8)
    for span in plan_heads(heads, ranks, head_bytes):
        pool = rank_pool(ranks[span.rank])
        theirs = remote_descriptors(pool, len(pool.groups[0].heads) * head_bytes, num_blocks, span)
        mine = local_descriptors(0, ours.block_bytes, num_blocks, span, "DRAM", 0)
        assert mine.num_bytes == theirs.num_bytes and mine.count == num_blocks
        for block in range(num_blocks):
            source = theirs.address + block * theirs.stride
            target = mine.address + block * mine.stride
            local[target : target + mine.num_bytes] = pools[span.rank][
                source : source + theirs.num_bytes
            ]
    expected = np.concatenate(
        [content(block, head) for block in range(num_blocks) for head in heads]
    )
    assert np.array_equal(local, expected)


def test_addresses_count_from_the_pool() -> None:
    span = HeadRange(0, 8, 16, 4)
    assert local_descriptors(1000, 64, 3, span, "VRAM", 2).address == 1008
    assert remote_descriptors(rank_pool((0,), address=5000), 32, 3, span).address == 5016


@pytest.mark.parametrize(
    ("local", "remote", "whole", "parts"),
    [
        ([], [], 0, 0),
        ([4], [9], 1, 1),
        ([4, 5, 6], [1, 2, 3], 1, 3),
        ([4, 5, 7], [1, 2, 3], 2, 3),
        ([4, 5, 6], [1, 2, 4], 2, 3),
        ([6, 5, 4], [3, 2, 1], 1, 3),
    ],
)
def test_neighbours_on_both_sides_merge(
    local: list[int], remote: list[int], whole: int, parts: int
) -> None:
    local_ids, remote_ids = order_pairs(local, remote)
    assert dict(zip(local_ids, remote_ids, strict=True)) == dict(zip(local, remote, strict=True))
    assert count_descriptors(local_ids, remote_ids, whole_blocks=True) == whole
    assert count_descriptors(local_ids, remote_ids, whole_blocks=False) == parts
