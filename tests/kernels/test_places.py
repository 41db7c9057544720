"""Experts over ranks: each row's experts are computed once, by a rank that has them, and all ranks
together make what one with all experts makes. The Triton kernel beside its twin, to the bit.

Without CUDA the kernel runs in the interpreter.
"""

import struct
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from expert_problem import DEVICE, a_router, load_of, rows, some_experts

from pdserve.kernels.experts import reference
from pdserve.kernels.experts import triton_ops as triton
from pdserve.kernels.experts.ops import Choice, ExpertOps, Experts, Share, share_of
from pdserve.kernels.experts.placement import Placement, place_experts
from pdserve.kernels.experts.products.tiles import e4m3_tile_for, rows_to_warm, tile_for
from pdserve.kernels.experts.routing import Routing
from pdserve.kernels.linear.matrix import Matrix

both = pytest.mark.parametrize("ops", [reference, triton], ids=["reference", "triton"])
RANKS = [(2, 1), (1, 2), (2, 2)]  # tp and dp
SHARED = 2
ROUTING = Routing(6, 3, normalize=True, num_shared=SHARED)
WIDTH = 32


def key_of(weight: float) -> int:
    """Computes reference.row_key in Python's own numbers."""
    (key,) = struct.unpack("<I", struct.pack("<f", weight))
    key = (key ^ key >> 16) * 0x7FEB352D % 2**32
    key = (key ^ key >> 15) * 0x31848BAB % 2**32
    return (key ^ key >> 16) // 2


def homes_of(num_rows: int, dp: int) -> list[range]:
    """The rows of each home, which are not equally many."""
    ends = [num_rows * (home + 1) ** 2 // dp**2 for home in range(dp)]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def a_choice(num_rows: int, has_padding: bool = False, busy: int | None = None) -> Choice:
    """Made by the reference. busy: the expert of the first place in every row."""
    router = a_router(ROUTING, WIDTH, seed=num_rows)
    if busy is not None:
        router.weight[busy] = router.weight.abs().sum(0) * 9
    live = torch.arange(num_rows, device=DEVICE) % 4 != 1 if has_padding else None
    x = rows(num_rows, WIDTH).abs() if busy is not None else rows(num_rows, WIDTH)
    choice = reference.route(x, router, live, load_of(router))
    assert busy is None or (choice.experts[:, 0] == busy).all()
    return choice


def shares(placement: Placement, tp: int, num_shared: int = SHARED) -> list[Share]:
    ranks = range(placement.num_ranks)
    return [share_of(placement, rank, tp, num_shared, torch.device(DEVICE)) for rank in ranks]


def held(experts: Experts, placement: Placement, rank: int) -> Experts:
    """Returns what the rank has of all experts: its own and the shared ones."""
    num_experts = len(placement.copies)
    shared = range(num_experts, len(experts.down.data))
    index = torch.tensor([*placement.experts[rank], *shared], device=DEVICE)
    return replace(
        experts,
        gate_up=Matrix(experts.gate_up.data[index]),
        down=Matrix(experts.down.data[index]),
    )


def by_hand(
    chosen: Sequence[int], weights: Sequence[float], row: int, share: Share, own: range
) -> list[int]:
    """A row of `place`, without tensors; share's map is read from Placement's numbers."""
    key = key_of(weights[0])
    num_routed = len(chosen) - share.num_shared
    first, num, copies = (t.tolist() for t in (share.first, share.num_copies, share.copies))
    found = []
    for expert in chosen[:num_routed]:
        copy = copies[first[expert] : first[expert] + num[expert]][key % num[expert]]
        local = copy - share.first_local
        found.append(local if expert >= 0 and 0 <= local < share.num_local else -1)
    is_ours = row in own and key % share.tp == share.tp_rank and chosen[0] >= 0
    numbers = range(share.num_local, share.num_local + share.num_shared)
    return found + [number if is_ours else -1 for number in numbers]


@both
@pytest.mark.parametrize("num_redundant", [0, 2, 6])
@pytest.mark.parametrize(("tp", "dp"), RANKS)
def test_a_rank_s_part_is_what_its_definition_says(
    ops: ExpertOps, tp: int, dp: int, num_redundant: int
) -> None:
    placement = place_experts(6, tp * dp, num_redundant, [9, 1, 1, 5, 3, 0])
    choice = a_choice(21, has_padding=True)
    homes = homes_of(21, dp)
    for rank, share in enumerate(shares(placement, tp)):
        own = homes[rank // tp]
        placed = ops.place(choice, share, own)
        assert placed.experts.dtype == torch.int32
        each = zip(choice.experts.tolist(), choice.weights.tolist(), strict=True)
        want = [by_hand(*row, number, share, own) for number, row in enumerate(each)]
        assert placed.experts.tolist() == want
        assert torch.equal(placed.weights, choice.weights * (placed.experts >= 0))


@pytest.mark.parametrize("num_rows", [2, 7, 40])
@pytest.mark.parametrize("num_shared", [0, SHARED])
def test_the_kernel_lists_the_rows_of_each_expert_once(num_shared: int, num_rows: int) -> None:
    """Padding is in no list."""
    choice = a_choice(num_rows, has_padding=True)
    if not num_shared:
        choice = Choice(choice.experts[:, :3].contiguous(), choice.weights[:, :3].contiguous())
    placement = place_experts(6, 2, 2)
    for share in shares(placement, 2, num_shared):
        placed = triton.place(choice, share, range(num_rows))
        lists = placed.lists
        assert lists is not None and lists.num_everywhere == 2 * (4 + num_shared)
        assert lists.slots.shape == (4 + num_shared, num_rows)
        flat = placed.experts.flatten()
        for expert, count in enumerate(lists.counts.tolist()):
            slots = lists.slots[expert, :count].sort().values
            assert slots.tolist() == (flat == expert).nonzero()[:, 0].tolist()


def test_a_key_is_the_same_in_all_arithmetics_and_spreads_rows() -> None:
    """Weights as routers make them, whose low bits are often 0."""
    chance = torch.Generator().manual_seed(1)
    weights = torch.rand(6000, generator=chance).bfloat16().float() * 0.3 + 0.1
    odd = torch.tensor([0.0, -0.0, 1.0, -1.5, 3e38, 1e-45, float("inf")])
    weights = torch.cat((odd, weights))
    keys = reference.row_key(weights)
    assert keys.tolist() == [key_of(weight) for weight in weights.tolist()]
    for count in (2, 3, 4, 8):
        distinct = reference.row_key(torch.unique(weights)) % count
        rows_each = distinct.bincount(minlength=count) / len(distinct)
        assert (rows_each - 1 / count).abs().max() < 0.06


@both
def test_a_row_s_part_does_not_depend_on_the_others(ops: ExpertOps) -> None:
    choice = a_choice(33)
    [share, _] = shares(place_experts(6, 2, 4), 2)
    whole = ops.place(choice, share, range(33))
    for begin, end in [(0, 1), (5, 6), (3, 20)]:
        part = Choice(choice.experts[begin:end], choice.weights[begin:end])
        placed = ops.place(part, share, range(end - begin))
        assert torch.equal(placed.experts, whole.experts[begin:end])
        assert torch.equal(placed.weights, whole.weights[begin:end])


@pytest.mark.parametrize(
    ("num_rows", "has_padding", "busy"),
    [(1, False, None), (24, True, None), (24, False, 4)],
    ids=["one row", "padding", "all to one"],
)
@pytest.mark.parametrize(
    ("ops", "tp", "dp", "num_redundant"),
    [
        (reference, 2, 1, 4),
        (reference, 1, 2, 0),
        (reference, 2, 2, 4),
        (triton, 2, 2, 4),
    ],
)
def test_all_ranks_together_make_what_one_makes(
    ops: ExpertOps,
    tp: int,
    dp: int,
    num_redundant: int,
    num_rows: int,
    has_padding: bool,
    busy: int | None,
) -> None:
    placement = place_experts(6, tp * dp, num_redundant)
    experts = some_experts(6 + SHARED, WIDTH, 16, torch.float32)
    choice = a_choice(num_rows, has_padding, busy)
    x = rows(num_rows, WIDTH)
    want = reference.mix(x, choice, experts)
    homes = homes_of(num_rows, dp)
    total = torch.zeros_like(want)
    num_computed = 0
    for rank, share in enumerate(shares(placement, tp)):
        placed = ops.place(choice, share, homes[rank // tp])
        mixed = ops.mix(x, placed, held(experts, placement, rank))
        assert not mixed[(placed.experts < 0).all(1)].any()
        total += mixed
        num_computed += int((placed.experts >= 0).sum())
    assert num_computed == (choice.experts >= 0).sum(), "a row went to an expert twice or never"
    torch.testing.assert_close(total, want, atol=2e-6, rtol=1e-6)


@both
@pytest.mark.parametrize("num_rows", [1, 2, 19])
def test_rows_of_which_a_rank_computes_nothing_stay(ops: ExpertOps, num_rows: int) -> None:
    """Even where the weights that came with them are no numbers."""
    choice = a_choice(num_rows)
    choice = Choice(torch.full_like(choice.experts, -1), choice.weights * float("nan"))
    placement = place_experts(6, 2)
    placed = ops.place(choice, shares(placement, 2)[1], range(num_rows))
    experts = held(some_experts(6 + SHARED, WIDTH, 16, torch.float32), placement, 1)
    x, onto = rows(num_rows, WIDTH), rows(num_rows, WIDTH) + 1
    assert not ops.mix(x, placed, experts).any()
    assert torch.equal(ops.mix(x, placed, experts, onto.clone()), onto)


@both
@pytest.mark.parametrize("num_rows", [2, 19])
def test_a_choice_that_nobody_made_reads_and_writes_nothing_else(
    ops: ExpertOps, num_rows: int
) -> None:
    """As it stands in memory when another rank did not answer: numbers that no expert has, and the
    same expert many times in a row."""
    choice = a_choice(num_rows)
    share = shares(place_experts(6, 2), 2)[0]
    nobody = torch.full_like(choice.experts, 1 << 30)
    nobody[::2] = 6
    placed = ops.place(Choice(nobody, choice.weights), share, range(0))
    assert (placed.experts == -1).all() and not placed.weights.any()
    last = torch.full_like(choice.experts, share.num_local - 1)
    placed = ops.place(Choice(last, choice.weights), share, range(0))
    if placed.lists is not None:
        before = placed.lists.slots[: share.num_local - 1]
        assert not placed.lists.counts[: share.num_local - 1].any() and len(before)
        listed = placed.lists.slots[share.num_local - 1].tolist()
        assert len(set(listed)) == num_rows and max(listed) < choice.experts.numel()
    experts = held(some_experts(6 + SHARED, WIDTH, 16, torch.float32), place_experts(6, 2), 0)
    assert ops.mix(rows(num_rows, WIDTH), placed, experts).shape == (num_rows, WIDTH)


@both
def test_no_rows_go_nowhere(ops: ExpertOps) -> None:
    empty = torch.empty(0, ROUTING.num_places, device=DEVICE)
    share = shares(place_experts(6, 2), 2)[0]
    assert ops.place(Choice(empty.int(), empty), share, range(0)).experts.shape == empty.shape


@pytest.mark.parametrize("num_everywhere", [None, 256 + 8, 320])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_warm_rows_meet_every_tile(itemsize: int, num_everywhere: int | None) -> None:
    routing = Routing(256, 8, num_shared=1)
    num_experts = num_everywhere or 257

    def tiles(numbers: Sequence[int]) -> set[object]:
        shares = [number * routing.num_places / num_experts for number in numbers]
        in_e4m3 = {
            e4m3_tile_for(share, num_inputs) for share in shares for num_inputs in (512, 2048)
        }
        return in_e4m3 | {
            tile_for(share, num_inputs, is_gated, itemsize)
            for share in shares
            for num_inputs, is_gated in ((7168, True), (512, False), (2048, False))
        }

    assert tiles(rows_to_warm(routing, num_everywhere)) == tiles(range(2, 16384, 7))
