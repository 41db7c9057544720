"""ExpertOps in plain torch.

On CPU it is batch-invariant bit for bit. Every product has a number of rows that is a multiple of
ROW_MULTIPLE, so an expert's result for a row does not depend on the other rows. The results of a
row's experts are added up in the order of the row's own choice.
"""

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.experts.ops import Choice, Experts, Router, Share
from pdserve.kernels.experts.routing import Routing
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.reference import ROW_MULTIPLE, linear
from pdserve.kernels.norm.reference import gate, sigmoid

LOW_BITS = 0xFFFFFFFF
KEY_FACTORS = (0x7FEB352D, 0x31848BAB)  # below 2**31: their product with 32 bits fits int64


def route(x: Tensor, router: Router, live: Tensor | None, load: Tensor) -> Choice:
    logits = linear(_padded(x.float()), Matrix(router.weight.float(), router.logit_bias))[: len(x)]
    routing = router.routing
    choice = choose(logits, routing, router.bias)
    shared = choice.experts.new_empty(len(x), routing.num_shared)
    shared.copy_(torch.arange(routing.num_shared) + routing.num_experts)
    experts = torch.cat((choice.experts, shared), 1)
    if live is not None:
        experts = experts.masked_fill(~live[:, None], -1)
    chosen = experts[:, : routing.top_k]
    load += torch.bincount(chosen[chosen >= 0], minlength=len(load))
    ones = choice.weights.new_ones(shared.shape)
    return Choice(experts, torch.cat((choice.weights, ones), 1))


def choose(logits: Tensor, routing: Routing, bias: Tensor | None) -> Choice:
    """Chooses by the router's logits, float32 `[T, num_experts]`, without the shared experts."""
    scores = logits.softmax(-1) if routing.scoring == "softmax" else sigmoid(logits)
    ranked = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        ranked = ranked.masked_fill(~_in_best_groups(ranked, routing), float("-inf"))
    experts = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, experts)
    if routing.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Choice(experts.int(), weights * routing.scaling)


def place(choice: Choice, share: Share, own: range) -> Choice:
    top_k = choice.experts.shape[1] - share.num_shared
    chosen, shared = choice.experts[:, :top_k].long(), choice.experts[:, top_k:]
    key = row_key(choice.weights[:, :1])
    is_expert = (chosen >= 0) & (chosen < len(share.num_copies))
    expert = chosen.where(is_expert, 0)
    copy = share.copies[share.first[expert] + key % share.num_copies[expert]] - share.first_local
    is_here = is_expert & (copy >= 0) & (copy < share.num_local)
    row = torch.arange(len(chosen), device=chosen.device)[:, None]
    is_own = (row >= own.start) & (row < own.stop) & (key % share.tp == share.tp_rank)
    number = torch.arange(share.num_shared, dtype=torch.int32, device=chosen.device)
    experts = torch.cat(
        (
            torch.where(is_here, copy, -1),
            torch.where(is_own & (shared >= 0), number + share.num_local, -1),
        ),
        1,
    )
    return Choice(experts, choice.weights.masked_fill(experts < 0, 0.0))


def row_key(weights: Tensor) -> Tensor:
    """Returns a hash of each float32's bits, int32 >= 0. The bits are multiplied and shifted (after
    Wellons' triple32). This happens in int64, of which the low 32 bits count, so that no product
    overflows. places.py computes the same."""
    key = weights.contiguous().view(torch.int32).long() & LOW_BITS
    key = ((key ^ (key >> 16)) * KEY_FACTORS[0]) & LOW_BITS
    key = ((key ^ (key >> 15)) * KEY_FACTORS[1]) & LOW_BITS
    return ((key ^ (key >> 16)) >> 1).int()


def mix(x: Tensor, choice: Choice, experts: Experts, onto: Tensor | None = None) -> Tensor:
    num_rows, num_places = choice.experts.shape
    product = experts.ops.linear
    flat = choice.experts.flatten()
    made = x.new_zeros(num_rows * num_places, x.shape[1])
    for expert in torch.unique(flat[flat >= 0]).tolist():
        places = (flat == expert).nonzero()[:, 0]
        rows = _padded(x[places // num_places])
        hidden = gate(product(rows, experts.gate_up.expert(expert)), experts.activation)
        made[places] = product(hidden, experts.down.expert(expert))[: len(places)]
    total = x.new_zeros(x.shape, dtype=torch.float32)
    for slot, part in enumerate(made.unflatten(0, (num_rows, num_places)).unbind(1)):
        total = total + part * choice.weights[:, slot, None]
    mixed = total.to(x.dtype)
    return mixed if onto is None else onto + mixed


def _in_best_groups(ranked: Tensor, routing: Routing) -> Tensor:
    """Returns bool `[T, num_experts]`: true for the experts of a row's best groups."""
    groups = ranked.unflatten(1, (routing.num_groups, routing.group_size))
    size = 1 if routing.group_score == "max" else 2
    scores = groups.topk(size, dim=-1).values.sum(-1)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
    return chosen.repeat_interleave(routing.group_size, 1)


def _padded(rows: Tensor) -> Tensor:
    return functional.pad(rows, (0, 0, 0, -len(rows) % ROW_MULTIPLE))
