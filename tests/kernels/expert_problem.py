"""Routers, experts and rows that tests of mixtures compute with."""

from dataclasses import replace

import torch
from torch import Tensor

from pdserve.kernels.experts import triton_ops as triton
from pdserve.kernels.experts.ops import Experts, Router
from pdserve.kernels.experts.routing import Routing
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.schemes.scheme import Cut, Scheme

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def a_router(routing: Routing, width: int, seed: int = 0) -> Router:
    chance = torch.Generator().manual_seed(seed)
    weight = torch.randn(routing.num_experts, width, generator=chance) * width**-0.5
    bias = torch.randn(routing.num_experts, generator=chance) * 0.2
    has_bias = routing.scoring == "sigmoid"
    return Router(weight.to(DEVICE), routing, bias.to(DEVICE) if has_bias else None)


def some_experts(num_experts: int, width: int, size: int, dtype: torch.dtype) -> Experts:
    chance = torch.Generator().manual_seed(2)
    gate_up = torch.randn(num_experts, 2 * size, width, generator=chance) * width**-0.5
    down = torch.randn(num_experts, width, size, generator=chance) * size**-0.5
    return Experts(
        Matrix(gate_up.to(DEVICE, dtype)), Matrix(down.to(DEVICE, dtype)), activation="silu"
    )


def experts_stored(
    scheme: Scheme, num_experts: int, width: int, size: int, dtype: torch.dtype
) -> tuple[Experts, Experts]:
    """As kernels take them; and their twin in float32, for reference.py. What gate and up, and each
    expert, make is of another size."""
    dense = some_experts(num_experts, width, size, torch.float32)

    def stack(matrices: Tensor, pieces: int) -> tuple[Matrix, Matrix]:
        each = matrices.flatten(0, 1).chunk(num_experts * pieces)
        num_rows, columns = each[0].shape
        cut = Cut(slice(0, num_rows), num_rows, slice(0, columns), columns)
        whole = scheme.allocate([cut] * len(each), dtype, torch.device(DEVICE))
        for number, matrix in enumerate(each):
            scaled = matrix * (0.5 + number % 3 / 2)
            scheme.take(whole, number * num_rows, scheme.quantise(scaled))
        made = whole.stacked(num_experts)
        return made, scheme.twin(made, torch.float32)

    gate_up, twin_gate_up = stack(dense.gate_up.data, 2)
    down, twin_down = stack(dense.down.data, 1)
    twin = Experts(twin_gate_up, twin_down, "silu", scheme.ops(torch.device("cpu")))
    return replace(dense, gate_up=gate_up, down=down), twin


def rows(num: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    chance = torch.Generator().manual_seed(num)
    return torch.randn(num, width, generator=chance).to(DEVICE, dtype)


def load_of(router: Router) -> Tensor:
    return torch.zeros(router.routing.num_experts, dtype=torch.int64, device=DEVICE)


def assert_graph_follows_inputs(experts: Experts, routing: Routing, num_rows: int) -> None:
    """Nothing waits for the device, and other rows may choose otherwise."""
    width = experts.down.data.shape[1]
    x = rows(num_rows, width, torch.bfloat16)
    router = a_router(routing, width)
    router = replace(router, weight=router.weight.bfloat16())
    load = load_of(router)
    triton.mix(x, triton.route(x, router, None, load), experts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            made = triton.mix(x, triton.route(x, router, None, load), experts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seed in (1, 2):
        chance = torch.Generator(DEVICE).manual_seed(seed)
        x.copy_(torch.randn(x.shape, generator=chance, device=DEVICE))
        graph.replay()
        choice = triton.route(x, router, None, load)
        assert torch.equal(made, triton.mix(x, choice, experts))
