"""Descriptor arithmetic, also for tensor parallel degrees that differ, checked against copying
element by element."""

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch

from pdserve.configs.kv_layout import KVLayout, LayerGroup
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.kvtransfer.p2p.ranges import (
    BlockRange,
    BlockSizes,
    count_descriptors,
    groups_of,
    local_descriptors,
    order_pairs,
    plan_for,
    remote_descriptors,
)
from pdserve.protocol.handoff import GroupMemory, KVCacheMeta, RankMemory


def layout(heads: tuple[int, ...]) -> KVLayout:
    return KVLayout.uniform(num_layers=2, heads=heads, head_dim=4, block_size=16, dtype="float32")


def of_groups(*groups: LayerGroup) -> KVLayout:
    return KVLayout(groups=groups, block_size=16)


def rank_memory(
    groups: tuple[GroupMemory, ...], block_bytes: int, address: int = 0, home: int = 0
) -> RankMemory:
    return RankMemory(
        agent_name="p",
        agent_metadata=b"",
        address=address,
        memory="DRAM",
        device_id=0,
        block_bytes=block_bytes,
        groups=groups,
        home=home,
    )


def meta_of(*layouts: KVLayout, homes: Sequence[int] = ()) -> KVCacheMeta:
    """Describe an engine whose ranks have these layouts. homes: of the ranks; none: all have home
    0."""
    pairs = zip(layouts, homes or [0] * len(layouts), strict=True)
    return meta_with(
        *(rank_memory(groups_of(each), each.block_bytes, home=home) for each, home in pairs)
    )


def meta_with(*ranks: RankMemory) -> KVCacheMeta:
    return KVCacheMeta(
        engine_id="p",
        incarnation=1,
        connector="local",
        model="model",
        rows="rows",
        block_size=16,
        num_blocks=5,
        generation_address=0,
        mailbox="",
        ranks=ranks,
    )


HEAD = layout((0,)).block_bytes
WIDE = LayerGroup(layers=(0, 2), heads=(0, 1), row_width=4)
NARROW = LayerGroup(layers=(1,), heads=(0, 1), row_width=12)


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
    """Checks the arithmetic. covered: the peer's blocks for ours from 3 to before 5. filled: blocks
    of ours that five of the peer's fill."""
    sizes = BlockSizes(ours, theirs)
    assert (sizes.step, sizes.cover(3, 5), sizes.filled(5)) == (step, covered, filled)


def test_equal_heads_are_one_whole_block() -> None:
    whole = layout((0, 1, 2, 3))
    assert plan_for(whole, meta_of(whole)) == [BlockRange(0, 0, 0, 4 * HEAD)]


def test_wide_prefill_narrow_decode_takes_each_rank_once() -> None:
    plan = plan_for(layout((0, 1, 2, 3)), meta_of(layout((0, 1)), layout((2, 3))))
    assert plan == [BlockRange(0, 0, 0, 2 * HEAD), BlockRange(1, 2 * HEAD, 0, 2 * HEAD)]


def test_narrow_prefill_wide_decode_takes_a_part() -> None:
    plan = plan_for(layout((2, 3)), meta_of(layout((0, 1, 2, 3))))
    assert plan == [BlockRange(0, 0, 2 * HEAD, 2 * HEAD)]


def test_replicated_heads_are_read_from_one_rank() -> None:
    ranks = [layout((head,)) for head in (0, 0, 1, 1)]
    assert plan_for(layout((1,)), meta_of(*ranks)) == [BlockRange(2, 0, 0, HEAD)]


def test_ranks_take_turns_at_the_copies_of_a_head() -> None:
    """TP4 of two KV heads, at both ends."""
    meta = meta_of(*(layout((rank // 2,)) for rank in range(4)))
    plans = [plan_for(layout((rank // 2,)), meta, rank) for rank in range(4)]
    assert [[span.rank for span in plan] for plan in plans] == [[0], [1], [2], [3]]
    assert [span.rank for span in plan_for(layout((0, 1)), meta, 1)] == [1, 3]


def test_a_plan_reads_the_ranks_of_one_home() -> None:
    """TP2 in each of two homes, whose ranks of two stages do not follow each other."""
    halves = [layout((0, 1)), layout((2, 3))]
    meta = meta_of(*halves, *halves, homes=(0, 0, 1, 1))
    whole = layout((0, 1, 2, 3))
    for home, ranks in ((0, (0, 1)), (1, (2, 3))):
        assert plan_for(whole, meta, home=home) == [
            BlockRange(ranks[0], 0, 0, 2 * HEAD),
            BlockRange(ranks[1], 2 * HEAD, 0, 2 * HEAD),
        ]
    stages = [of_groups(LayerGroup(layers=(i,), heads=(0,), row_width=4)) for i in (1, 0)]
    parted = meta_of(*(stage for stage in stages for _ in range(2)), homes=(0, 1, 0, 1))
    for home in (0, 1):
        assert [span.rank for span in plan_for(layout((0,)), parted, 5, home)] == [2 + home, home]
    with pytest.raises(ValueError, match=r"KV head 2 of layer 0 .* no rank of the peer's home 1"):
        plan_for(whole, meta_of(whole, halves[0], homes=(0, 1)), home=1)


def test_ranks_of_all_homes_take_turns_at_the_copies_in_one() -> None:
    """A latent, which each of four ranks of a home stores, read by as many homes of one rank."""
    one = layout((0,))
    meta = meta_of(*[one] * 8, homes=[0] * 4 + [1] * 4)
    turns = [[plan_for(one, meta, rank, home)[0].rank for rank in range(4)] for home in (0, 1)]
    assert turns == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_stages_are_a_range_where_their_layers_are_a_group() -> None:
    stages = [
        LayerGroup(layers=layers, heads=(0, 1), row_width=4) for layers in ((0, 1), (2, 3, 4))
    ]
    ours = of_groups(*stages)
    alone = [of_groups(stage) for stage in stages]
    sizes = [each.block_bytes for each in alone]
    assert plan_for(ours, meta_of(*alone)) == [
        BlockRange(0, 0, 0, sizes[0]),
        BlockRange(1, sizes[0], 0, sizes[1]),
    ]
    assert plan_for(alone[1], meta_of(ours)) == [BlockRange(0, 0, sizes[0], sizes[1])]
    heads = [
        of_groups(*(stage.model_copy(update={"heads": (h,)}) for stage in stages)) for h in (0, 1)
    ]
    plans = [plan_for(half, meta_of(*alone)) for half in heads]
    assert [[span.rank for span in plan] for plan in plans] == [[0, 1], [0, 1]]


def test_stages_are_a_range_for_each_head_elsewhere() -> None:
    ours = layout((0, 1))
    stages = [of_groups(LayerGroup(layers=(i,), heads=(0, 1), row_width=4)) for i in (0, 1)]
    half = HEAD // 2
    assert plan_for(ours, meta_of(*stages)) == [
        BlockRange(0, 0, 0, half),
        BlockRange(1, half, 0, half),
        BlockRange(0, HEAD, half, half),
        BlockRange(1, HEAD + half, half, half),
    ]
    assert plan_for(stages[1], meta_of(ours)) == [
        BlockRange(0, 0, half, half),
        BlockRange(0, half, HEAD + half, half),
    ]


def test_equal_blocks_of_several_groups_are_one_range_with_what_fills_them_up() -> None:
    both = of_groups(WIDE, NARROW)
    used = both.offsets[1] + 2 * both.head_bytes[1]
    assert used < both.block_bytes
    assert plan_for(both, meta_of(both)) == [BlockRange(0, 0, 0, both.block_bytes)]
    longer = meta_with(rank_memory(groups_of(both), both.block_bytes + 64))
    assert plan_for(both, longer) == [BlockRange(0, 0, 0, used)]


def test_a_peer_without_a_layer_or_with_other_rows_is_refused() -> None:
    ours = layout((0, 1))
    [group] = groups_of(ours)

    def plan(*groups: GroupMemory) -> list[BlockRange]:
        return plan_for(ours, meta_with(rank_memory(groups, ours.block_bytes)))

    later = msgspec.structs.replace(group, offset=96)
    assert plan(later) == [BlockRange(0, 0, 96, ours.block_bytes)]
    with pytest.raises(ValueError, match="KV head 0 of layer 0 is stored on no rank of the peer"):
        plan(msgspec.structs.replace(group, layers=(1, 2)))
    with pytest.raises(ValueError, match="KV head 1 of layer 0 is stored on no rank of the peer"):
        plan(msgspec.structs.replace(group, heads=(0, 2)))
    with pytest.raises(ValueError, match="is stored on no rank"):
        plan()
    wide = msgspec.structs.replace(group, head_bytes=group.head_bytes + 8)
    with pytest.raises(
        ValueError, match="KV head 0 of layer 0 takes 512 bytes of a block here, 516 there"
    ):
        plan(wide)


def shares(tp: int, pp: int, replicas: int) -> list[KVLayout]:
    """The ranks of an engine of 4 KV heads and 6 layers, every third of which has wide rows."""
    ranks = []
    for stage, rank in itertools.product(range(pp), range(tp)):
        layers = range(6 * stage // pp, 6 * (stage + 1) // pp)
        heads = tuple(range(rank * 4 // tp, (rank + 1) * 4 // tp))
        kinds = [tuple(i for i in layers if (i % 3 == 2) == wide) for wide in (False, True)]
        groups = [
            LayerGroup(layers=kind, heads=heads, row_width=width)
            for kind, width in zip(kinds, (8, 12), strict=True)
            if kind
        ]
        ranks += [of_groups(*groups)] * replicas
    return ranks


def filled(layout: KVLayout, num_blocks: int) -> np.ndarray:
    """A rank's KV cache, in which a head of a layer holds the same bytes in every layout."""
    blocks = np.zeros((num_blocks, layout.block_bytes), np.uint8)
    cache = KVCache(torch.from_numpy(blocks), layout)
    for group, rows in zip(layout.groups, cache.groups, strict=True):
        for (i, head), (j, layer) in itertools.product(
            enumerate(group.heads), enumerate(group.layers)
        ):
            cells = rows[:, i, j]
            seed = torch.Generator().manual_seed(10 * layer + head)
            cells.copy_(torch.rand(cells.shape, generator=seed))
    return blocks


@pytest.mark.parametrize(
    "theirs", [(1, 1, 1), (2, 1, 1), (4, 1, 2), (1, 2, 1), (2, 3, 1), (2, 4, 1)]
)
@pytest.mark.parametrize("ours", [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (1, 4, 1), (1, 6, 1)])
def test_a_plan_moves_every_head_of_every_layer_of_every_block(
    ours: tuple[int, int, int], theirs: tuple[int, int, int]
) -> None:
    """Applied to byte arrays: each of our ranks gets exactly its heads and layers, wherever a peer
    of other ranks has them."""
    num_blocks = 3
    sources = shares(*theirs)
    meta = meta_of(*sources)
    memories = [filled(source, num_blocks) for source in sources]
    for mine in shares(*ours):
        local = np.zeros((num_blocks, mine.block_bytes), np.uint8).reshape(-1)
        for span in plan_for(mine, meta):
            memory = memories[span.rank].reshape(-1)
            there = remote_descriptors(meta.ranks[span.rank], num_blocks, span)
            here = local_descriptors(0, mine.block_bytes, num_blocks, span, "DRAM", 0)
            assert here.num_bytes == there.num_bytes and here.count == num_blocks
            for block in range(num_blocks):
                start, target = (d.address + block * d.stride for d in (there, here))
                local[target : target + here.num_bytes] = memory[start : start + there.num_bytes]
        assert np.array_equal(local.reshape(num_blocks, -1), filled(mine, num_blocks))


def test_addresses_count_from_the_pool() -> None:
    span = BlockRange(0, 8, 16, 4)
    assert local_descriptors(1000, 64, 3, span, "VRAM", 2).address == 1008
    assert remote_descriptors(rank_memory((), 32, address=5000), 3, span).address == 5016


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
