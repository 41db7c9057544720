"""Experts in int4 on a GPU, in Triton's interpreter where none is: against their twin in plain
torch."""

from dataclasses import replace

import pytest
import torch
from expert_problem import (
    DEVICE,
    ON_GPU,
    a_router,
    assert_graph_follows_inputs,
    experts_stored,
    load_of,
    rows,
)
from torch import Tensor

from pdserve.kernels.experts import reference
from pdserve.kernels.experts import triton_ops as triton
from pdserve.kernels.experts.ops import Choice, Experts, share_of
from pdserve.kernels.experts.placement import place_experts
from pdserve.kernels.experts.products.int4 import launch_int4
from pdserve.kernels.experts.products.tiles import FEW, MORE, SOME, Tile, int4_tile_for
from pdserve.kernels.experts.routing import Routing
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.schemes.int4 import Int4

pytestmark = pytest.mark.lengthy

# the interpreter cuts what it casts to bfloat16
CLOSE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2 if ON_GPU else 2e-2}
SHORT = (torch.bfloat16, torch.float16)


def chosen(x: Tensor, routing: Routing, live: Tensor | None = None) -> Choice:
    router = a_router(routing, x.shape[1])
    router = replace(router, weight=router.weight.to(x.dtype))
    return triton.route(x, router, live, load_of(router))


def twins(x: Tensor, choice: Choice, twin: Experts) -> Tensor:
    """In float32, whatever x is in."""
    return reference.mix(x.float(), choice, twin)


def assert_near(made: Tensor, want: Tensor) -> None:
    assert made.isfinite().all() and want.abs().max() > 0.1
    close = CLOSE[made.dtype]
    gap = made.float() - want
    assert gap.norm() <= close * want.norm()
    assert (gap.norm(dim=1) <= 3 * close * want.norm(dim=1)).all()


# columns of a group; rows, experts and places for each tile; width and size, whole blocks of 128
# and others
SHAPES = [
    (128, 1, 8, 2, 256, 128),
    (0, 3, 6, 2, 200, 40),
    (64, 9, 4, 3, 320, 64),
    (32, 30, 3, 2, 160, 96),
    (128, 60, 2, 1, 128, 256),
    (128, 150, 2, 1, 256, 128),
    (32, 150, 2, 1, 384, 32),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("group,num_rows,num_experts,top_k,width,size", SHAPES)
def test_experts_are_those_of_the_twin(
    group: int, num_rows: int, num_experts: int, top_k: int, width: int, size: int
) -> None:
    dtype = SHORT[num_rows % 2]
    experts, twin = experts_stored(Int4(group), num_experts, width, size, dtype)
    assert experts.down.kind == "int4" and experts.down.group == (1, group)
    x = rows(num_rows, width, dtype)
    choice = chosen(x, Routing(num_experts, top_k, normalize=True))
    want = twins(x, choice, twin)
    assert_near(triton.mix(x, choice, experts), want)
    onto = rows(num_rows + 1, width, dtype)[1:]
    made = triton.mix(x, choice, experts, onto.clone())
    assert_near(made, want + onto.float())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize("group,dtype", [(128, torch.float32), (192, torch.bfloat16)])
def test_what_has_no_kernel_is_dequantised(group: int, dtype: torch.dtype, num_rows: int) -> None:
    width = group if group > 128 else 256
    experts, twin = experts_stored(Int4(group), 2, width, width, dtype)
    x = rows(num_rows, width, dtype)
    choice = chosen(x, Routing(2, 1, normalize=True))
    assert_near(triton.mix(x, choice, experts), twins(x, choice, twin))


def test_another_activation() -> None:
    experts, twin = (
        replace(each, activation="gelu_tanh")
        for each in experts_stored(Int4(128), 2, 256, 128, torch.bfloat16)
    )
    x = rows(20, 256, torch.bfloat16)
    choice = chosen(x, Routing(2, 1))
    assert_near(triton.mix(x, choice, experts), twins(x, choice, twin))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_rows", [12, 150])
def test_rows_do_not_depend_on_others_and_nan_stays(num_rows: int) -> None:
    experts, _ = experts_stored(Int4(128), 2, 256, 128, torch.bfloat16)
    x = rows(num_rows, 256, torch.bfloat16)
    choice = chosen(x, Routing(2, 2))
    alone = triton.mix(x, choice, experts)
    changed = x.clone()
    changed[3, 7] = float("nan")
    changed[4] = 0
    changed[5] *= 1000
    made = triton.mix(changed, choice, experts)
    assert made[3].isnan().all() and not made[4].any()
    others = [row for row in range(num_rows) if row not in (3, 4, 5)]
    assert torch.equal(made[others], alone[others])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_rows", [1, 2, 50])
def test_shared_experts_and_padding(num_rows: int) -> None:
    """4 experts and 2 shared ones; padding goes nowhere, and adds nothing."""
    dtype = torch.float16
    experts, twin = experts_stored(Int4(32), 6, 160, 64, dtype)
    x = rows(num_rows, 160, dtype)
    live = torch.arange(num_rows, device=DEVICE) % 4 != 1
    for padding in (None, live):
        choice = chosen(x, Routing(4, 2, normalize=True, num_shared=2), padding)
        assert_near(triton.mix(x, choice, experts), twins(x, choice, twin))
    onto = rows(num_rows, 160, dtype).clone()
    before = onto.clone()
    assert torch.equal(triton.mix(x, choice, experts, onto)[~live], before[~live])
    nowhere = chosen(x[:1], Routing(4, 2, num_shared=2), ~live[:1])
    assert not triton.mix(x[:1], nowhere, experts).any()
    assert triton.mix(x[:0], chosen(x[:0], Routing(4, 2, num_shared=2)), experts).shape == (0, 160)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_rows", [1, 40])
def test_what_ranks_make_adds_up(num_rows: int) -> None:
    """6 experts on 2 ranks, which hold 4 each: two have a copy."""
    dtype = torch.float16
    experts, twin = experts_stored(Int4(64), 6, 192, 64, dtype)
    x = rows(num_rows, 192, dtype)
    choice = chosen(x, Routing(6, 3, normalize=True))
    placement = place_experts(6, 2, 2)
    total = torch.zeros_like(x, dtype=torch.float32)
    for rank in range(2):
        held = torch.tensor(placement.experts[rank], device=DEVICE)

        def of_rank(m: Matrix, held: Tensor = held) -> Matrix:
            assert m.scales is not None and m.zeros is not None
            scales, zeros = (tensor[held].mT.contiguous().mT for tensor in (m.scales, m.zeros))
            return replace(m, data=m.data[held], scales=scales, zeros=zeros)

        share = share_of(placement, rank, 1, 0, torch.device(DEVICE))
        part = triton.place(choice, share, range(num_rows))
        own = replace(experts, gate_up=of_rank(experts.gate_up), down=of_rank(experts.down))
        total += triton.mix(x, part, own).float()
    assert_near(total.to(dtype), twins(x, choice, twin))


def test_tiles_follow_the_rows_an_expert_gets() -> None:
    for share, num_rows in ((1, 16), (FEW, 16), (SOME, 32), (MORE, 64), (MORE + 1, 128)):
        tile = int4_tile_for(share)
        assert tile.rows == num_rows and tile.inputs == 128


QWEN = Routing(128, 8, normalize=True)
HIDDEN, SIZE = 2048, 768


@pytest.fixture(scope="module", params=[128, 32])
def qwen(request: pytest.FixtureRequest) -> tuple[Experts, Experts]:
    return experts_stored(Int4(request.param), 128, HIDDEN, SIZE, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 16, 64, 512, 4096])
@pytest.mark.parametrize("dtype", SHORT)
def test_experts_of_a_model(
    qwen: tuple[Experts, Experts], dtype: torch.dtype, num_rows: int
) -> None:
    experts, twin = qwen
    x = rows(num_rows, HIDDEN, dtype)
    choice = chosen(x, QWEN)
    made = triton.mix(x, choice, experts)
    assert_near(made, twins(x, choice, twin))
    assert torch.equal(triton.mix(x, choice, experts), made)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [512, 4096])
def test_all_tiles_make_the_same(qwen: tuple[Experts, Experts], num_rows: int) -> None:
    experts, _ = qwen
    x = rows(num_rows, HIDDEN, torch.bfloat16)
    choice = chosen(x, QWEN)
    want = launch_int4(x, choice, experts, None).float()
    for tile in (Tile(16, 64, 128, 4, 5), Tile(64, 64, 128, 4, 4), Tile(128, 128, 128, 8, 3)):
        assert_near(launch_int4(x, choice, experts, None, tile), want)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 512])
def test_graphs_follow_their_inputs(qwen: tuple[Experts, Experts], num_rows: int) -> None:
    assert_graph_follows_inputs(qwen[0], QWEN, num_rows)
