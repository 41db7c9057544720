"""ExpertOps in Triton: checks the kernels' inputs, and chooses a kernel by the number of rows."""

import torch
from torch import Tensor

from pdserve.kernels.experts.ops import KINDS_ON_GPU, Choice, Experts, Router, Share
from pdserve.kernels.experts.places import launch_place
from pdserve.kernels.experts.products.e4m3 import launch_e4m3
from pdserve.kernels.experts.products.few_rows import MAX_ROWS, launch_few_rows
from pdserve.kernels.experts.products.int4 import launch_int4
from pdserve.kernels.experts.products.many_rows import launch_many_rows
from pdserve.kernels.experts.routes import launch_choose, launch_router_product
from pdserve.kernels.experts.row_route import launch_route_row
from pdserve.kernels.launching.checks import check_ids, check_rows


def route(x: Tensor, router: Router, live: Tensor | None, load: Tensor) -> Choice:
    """Does what reference.route does."""
    check_rows(x=x, weight=router.weight)
    check_ids(load=load)
    if len(x) == 0:
        shape = (0, router.routing.num_places)
        return Choice(x.new_empty(shape, dtype=torch.int32), x.new_empty(shape).float())
    if len(x) <= MAX_ROWS:
        return Choice(*launch_route_row(x, router, live, load))
    parts, counts = launch_router_product(x, router)
    experts, weights, lists = launch_choose(parts, counts, router, live, load)
    return Choice(experts, weights, lists)


def place(choice: Choice, share: Share, own: range) -> Choice:
    """Does what reference.place does."""
    check_ids(experts=choice.experts, weights=choice.weights)
    num_rows = len(choice.experts)
    if num_rows == 0:
        return Choice(choice.experts, choice.weights)
    return launch_place(choice, share, own, has_lists=num_rows > MAX_ROWS)


def mix(x: Tensor, choice: Choice, experts: Experts, onto: Tensor | None = None) -> Tensor:
    """Does what reference.mix does, for experts in KINDS_ON_GPU. Other kinds have no kernels."""
    kind = experts.gate_up.kind
    assert experts.down.kind == kind and kind in KINDS_ON_GPU, "no kernel reads these experts"
    check_rows(x=x)
    check_ids(gate_up=experts.gate_up.data, down=experts.down.data)
    if onto is not None:
        check_ids(onto=onto)
    if len(x) == 0:
        return torch.empty_like(x) if onto is None else onto
    if kind == "int4":
        return launch_int4(x, choice, experts, onto)
    if kind != "dense":
        assert experts.gate_up.scales is not None and experts.down.scales is not None
        check_ids(scales=experts.gate_up.scales, down_scales=experts.down.scales)
        return launch_e4m3(x, choice, experts, onto)
    if len(x) <= MAX_ROWS:
        return launch_few_rows(x, choice, experts, onto)
    return launch_many_rows(x, choice, experts, onto)
