"""Mixtures of experts: the choice against its definition, rows against each expert alone, CPU bits
whatever the batch, and the Triton kernels beside their twin.

Without CUDA the kernels run in the interpreter.
"""

from dataclasses import replace

import pytest
import torch
from expert_problem import DEVICE, ON_GPU, a_router, load_of, rows, some_experts
from torch import Tensor

from pdserve.kernels.experts import reference
from pdserve.kernels.experts import triton_ops as triton
from pdserve.kernels.experts.ops import Choice, ExpertOps, Experts, Router
from pdserve.kernels.experts.products import few_rows
from pdserve.kernels.experts.routing import Routing

V2 = Routing(20, 3, scaling=16.0, num_groups=5, top_groups=2)
V3 = Routing(
    16,
    4,
    scoring="sigmoid",
    normalize=True,
    scaling=2.5,
    num_groups=4,
    top_groups=2,
    group_score="top2",
)
ROUTINGS = {
    "mixtral": Routing(8, 2, normalize=True),
    "qwen2": Routing(60, 4),
    "one": Routing(1, 1),
    "all": Routing(6, 6, normalize=True),
    "v2": V2,
    "v3": V3,
    "uneven groups": replace(V3, num_experts=12, top_k=3),
}
both = pytest.mark.parametrize("ops", [reference, triton], ids=["reference", "triton"])


def by_hand(logits: list[float], routing: Routing, bias: list[float]) -> dict[int, float]:
    """Expert -> weight, in Python's own arithmetic, in the order of the choice."""
    wide = torch.tensor(logits, dtype=torch.float64)
    scores = (wide.softmax(0) if routing.scoring == "softmax" else wide.sigmoid()).tolist()
    ranked = [score + more for score, more in zip(scores, bias, strict=True)]
    size = routing.group_size
    count = 2 if routing.group_score == "top2" else 1

    def group_score(group: int) -> float:
        return sum(sorted(ranked[group * size : (group + 1) * size])[-count:])

    groups = sorted(range(routing.num_groups), key=group_score)[-routing.top_groups :]
    open_experts = [e for e in range(routing.num_experts) if e // size in groups]
    best = sorted(open_experts, key=lambda e: -ranked[e])[: routing.top_k]
    total = sum(scores[e] for e in best) if routing.normalize else 1.0
    return {e: scores[e] / total * routing.scaling for e in best}


def answer(x: Tensor, choice: Choice, experts: Experts) -> Tensor:
    """Computes the answer in float64, one expert after the other."""
    gate_up, down = (m.data.double() for m in (experts.gate_up, experts.down))
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for row, (chosen, weights) in enumerate(zip(choice.experts, choice.weights, strict=True)):
        for expert, weight in zip(chosen.tolist(), weights.tolist(), strict=True):
            if expert >= 0:
                gate, up = (gate_up[expert] @ x[row].double()).chunk(2)
                total[row] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    return total


@pytest.mark.sampled(5)
@both
@pytest.mark.parametrize(
    ("name", "num_rows"), [*((name, n) for name in ROUTINGS for n in (1, 16)), ("v3", 70)]
)
def test_a_choice_is_what_its_definition_says(ops: ExpertOps, name: str, num_rows: int) -> None:
    routing = ROUTINGS[name]
    router = a_router(routing, 48)
    x = rows(num_rows, 48)
    load = load_of(router)
    choice = ops.route(x, router, None, load)
    logits = (x.double() @ router.weight.double().T).tolist()
    bias = [0.0] * routing.num_experts if router.bias is None else router.bias.tolist()
    for row, (experts, weights) in enumerate(zip(choice.experts, choice.weights, strict=True)):
        want = by_hand(logits[row], routing, bias)
        assert experts.tolist() == list(want)
        assert weights.tolist() == pytest.approx(list(want.values()), rel=1e-5)
    assert load.tolist() == choice.experts.flatten().bincount(minlength=len(load)).tolist()


@both
def test_of_equal_scores_the_lower_expert_is_chosen(ops: ExpertOps) -> None:
    router = Router(torch.zeros(6, 32, device=DEVICE), Routing(6, 3))
    choice = ops.route(rows(16, 32), router, None, load_of(router))
    assert choice.experts.tolist() == [[0, 1, 2]] * 16


@pytest.mark.sampled(3)
@both
@pytest.mark.parametrize("name", ["mixtral", "v2", "v3"])
def test_a_row_of_nan_harms_no_other(ops: ExpertOps, name: str) -> None:
    router = a_router(ROUTINGS[name], 32)
    num_experts = router.routing.num_experts
    experts = some_experts(num_experts, 32, 16, torch.float32)
    x = rows(20, 32)
    choice = ops.route(x, router, None, load_of(router))
    want = ops.mix(x, choice, experts)
    x[7] = float("nan")
    load = load_of(router)
    choice = ops.route(x, router, None, load)
    chosen = choice.experts[7].tolist()
    assert len(set(chosen)) == len(chosen) and 0 <= min(chosen) <= max(chosen) < num_experts
    assert load.sum() == 20 * router.routing.top_k
    mixed = ops.mix(x, choice, experts)
    assert mixed[7].isnan().all()
    others = torch.arange(20, device=DEVICE) != 7
    torch.testing.assert_close(mixed[others], want[others], atol=2e-6, rtol=0)


@both
@pytest.mark.parametrize("num_rows", [2, 3, 20])
def test_padding_goes_nowhere_and_counts_as_nothing(ops: ExpertOps, num_rows: int) -> None:
    router = a_router(Routing(8, 2), 32)
    experts = some_experts(8, 32, 16, torch.float32)
    x = rows(num_rows, 32)
    live = torch.arange(num_rows, device=DEVICE) % 3 != 1
    load = load_of(router)
    choice = ops.route(x, router, live, load)
    assert (choice.experts[~live] == -1).all() and (choice.experts[live] >= 0).all()
    assert load.sum() == 2 * live.sum()
    mixed = ops.mix(x, choice, experts)
    assert not mixed[~live].any() and mixed[live].any(1).all()
    onto = rows(num_rows, 32).clone()
    before = onto.clone()
    assert torch.equal(ops.mix(x, choice, experts, onto)[~live], before[~live])


@pytest.mark.sampled(5)
@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "top_k", "width", "size"),
    [
        (1, 8, 2, 64, 48),
        (3, 6, 2, 100, 40),
        (9, 16, 4, 64, 24),
        (40, 5, 3, 80, 70),
        (70, 2, 2, 64, 32),
    ],
)
def test_rows_are_what_each_expert_alone_makes_of_them(
    ops: ExpertOps,
    dtype: torch.dtype,
    num_rows: int,
    num_experts: int,
    top_k: int,
    width: int,
    size: int,
) -> None:
    router = a_router(Routing(num_experts, top_k, normalize=True), width)
    router = replace(router, weight=router.weight.to(dtype))
    experts = some_experts(num_experts, width, size, dtype)
    x = rows(num_rows, width, dtype)
    onto = rows(num_rows + 1, width, dtype)[1:]
    choice = ops.route(x, router, None, load_of(router))
    want = answer(x, choice, experts) + onto.double()
    error = (ops.mix(x, choice, experts, onto.clone()).double() - want).abs().max()
    assert error < (2e-6 if dtype == torch.float32 else 0.05)


@pytest.mark.sampled(5)
@both
@pytest.mark.parametrize("num_rows", [1, 3, 50])
@pytest.mark.parametrize("has_padding", [False, True])
def test_all_rows_go_to_the_shared_experts_too(
    ops: ExpertOps, has_padding: bool, num_rows: int
) -> None:
    """6 experts and 2 shared ones, which count in no load."""
    routing = Routing(6, 2, normalize=True, num_shared=2)
    router = a_router(routing, 32)
    experts = some_experts(8, 32, 24, torch.float32)
    x = rows(num_rows, 32)
    live = torch.arange(num_rows, device=DEVICE) % 4 != 1 if has_padding else None
    load = load_of(router)
    choice = ops.route(x, router, live, load)
    is_live = torch.ones(num_rows, dtype=torch.bool) if live is None else live.cpu()
    assert (choice.experts.cpu()[is_live, 2:] == torch.tensor([6, 7])).all()
    assert (choice.weights.cpu()[is_live, 2:] == 1).all() and load.sum() == 2 * is_live.sum()
    mixed = ops.mix(x, choice, experts).cpu()
    torch.testing.assert_close(mixed.double(), answer(x, choice, experts).cpu(), atol=2e-5, rtol=0)
    assert not mixed[~is_live].any()


@both
def test_a_row_of_padding_alone_goes_nowhere(ops: ExpertOps) -> None:
    router = a_router(Routing(8, 2, num_shared=1), 32)
    x = rows(1, 32)
    load = load_of(router)
    choice = ops.route(x, router, torch.zeros(1, dtype=torch.bool, device=DEVICE), load)
    assert choice.experts.tolist() == [[-1, -1, -1]] and not load.any()
    assert not ops.mix(x, choice, some_experts(9, 32, 16, torch.float32)).any()


@pytest.mark.sampled(5)
@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_experts_and_router_may_have_biases_and_a_clamped_gate(
    ops: ExpertOps, num_rows: int, dtype: torch.dtype
) -> None:
    """The activation is gpt-oss's. Some gates and ups reach the limit."""
    width, size = 72, 40
    plain = some_experts(6, width, size, dtype)
    chance = torch.Generator().manual_seed(1)
    biases = [torch.randn(6, n, generator=chance).to(DEVICE, dtype) for n in (2 * size, width)]
    experts = replace(
        plain,
        gate_up=replace(plain.gate_up, data=4 * plain.gate_up.data, bias=4 * biases[0]),
        down=replace(plain.down, bias=biases[1]),
        activation="clamped_swiglu",
    )
    router = a_router(Routing(6, 2, normalize=True), width)
    bias = torch.randn(6, generator=chance).to(DEVICE)
    router = replace(router, weight=router.weight.to(dtype), logit_bias=bias)
    x = rows(num_rows, width, dtype)
    choice = ops.route(x, router, None, load_of(router))
    logits = x.double() @ router.weight.double().T + bias
    best = logits.topk(2)
    assert choice.experts.tolist() == best.indices.tolist()
    torch.testing.assert_close(choice.weights.double(), best.values.softmax(-1), atol=1e-5, rtol=0)
    got = ops.mix(x, choice, experts)
    reached = 0
    for row, (places, weights) in enumerate(
        zip(choice.experts.tolist(), choice.weights.double(), strict=True)
    ):
        want = torch.zeros(width, dtype=torch.float64, device=DEVICE)
        for expert, weight in zip(places, weights, strict=True):
            made = experts.gate_up.data[expert].double() @ x[row].double() + 4 * biases[0][expert]
            gate, up = made.chunk(2)
            reached += int((gate > 7).sum() + (up.abs() > 7).sum())
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            want += weight * (experts.down.data[expert].double() @ hidden + biases[1][expert])
        scale = max(want.abs().max().item(), 1.0)
        error = (got[row].double() - want).abs().max() / scale
        assert error < (1e-5 if dtype == torch.float32 else 0.03)
    assert reached > 0


@both
@pytest.mark.parametrize("num_rows", [3, 20])
def test_experts_may_have_another_activation(ops: ExpertOps, num_rows: int) -> None:
    router = a_router(Routing(4, 1), 32)
    experts = replace(some_experts(4, 32, 16, torch.float32), activation="gelu_tanh")
    x = rows(num_rows, 32)
    choice = ops.route(x, router, None, load_of(router))
    got = ops.mix(x, choice, experts)
    for row, expert in enumerate(choice.experts[:, 0].tolist()):
        gate, up = (experts.gate_up.data[expert] @ x[row]).chunk(2)
        hidden = torch.nn.functional.gelu(gate, approximate="tanh") * up
        want = choice.weights[row, 0] * (experts.down.data[expert] @ hidden)
        torch.testing.assert_close(got[row], want, atol=2e-6, rtol=0)


@both
@pytest.mark.parametrize("num_rows", [few_rows.MAX_ROWS, 40])
def test_all_rows_may_go_to_one_expert_and_none_to_another(ops: ExpertOps, num_rows: int) -> None:
    """Every row goes to experts 1 and 3 of 5."""
    weight = torch.zeros(5, 32, device=DEVICE)
    weight[1], weight[3] = 2.0, 1.0
    x = rows(num_rows, 32).abs()
    router = Router(weight, Routing(5, 2))
    load = load_of(router)
    choice = ops.route(x, router, None, load)
    assert load.tolist() == [0, num_rows, 0, num_rows, 0]
    experts = some_experts(5, 32, 16, torch.float32)
    error = (ops.mix(x, choice, experts) - answer(x, choice, experts)).abs().max()
    assert error < 2e-5


@pytest.mark.skipif(ON_GPU, reason="the CPU's promise; the rows here lie on the GPU")
def test_on_cpu_a_row_gets_the_same_bits_in_every_batch() -> None:
    router = a_router(Routing(8, 3), 64)
    experts = some_experts(8, 64, 48, torch.float32)
    x = rows(96, 64)

    def mixed(part: Tensor) -> Tensor:
        choice = reference.route(part, router, None, load_of(router))
        return reference.mix(part, choice, experts)

    whole = mixed(x)
    for first, end in [(0, 16), (16, 48), (5, 6), (30, 33), (1, 90)]:
        assert torch.equal(mixed(x[first:end]), whole[first:end])


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"num_experts": 4, "top_k": 5}, "num_experts_per_tok=5 must be from 1 to the 4 experts"),
        ({"num_experts": 9, "top_k": 2, "num_groups": 2}, "n_group=2 must divide the 9 experts"),
        (
            {"num_experts": 8, "top_k": 2, "num_groups": 2, "top_groups": 3},
            "topk_group=3 must be from 1 to n_group=2",
        ),
        (
            {"num_experts": 8, "top_k": 5, "num_groups": 2},
            "must not be above the number of experts in topk_group=1 groups of 4",
        ),
        (
            {"num_experts": 4, "top_k": 1, "num_groups": 4, "group_score": "top2"},
            "groups of one expert have no best two",
        ),
    ],
)
def test_what_cannot_be_is_refused(facts: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Routing(**facts)  # type: ignore[arg-type]
