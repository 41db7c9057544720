"""Operations of a mixture of experts: reference.py implements them in plain torch, triton_ops.py in
Triton."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdserve.kernels.experts.placement import Placement
from pdserve.kernels.experts.routing import Routing
from pdserve.kernels.linear import reference
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.ops import LinearOps
from pdserve.kernels.norm.ops import Activation

# of stacks of experts that triton_ops.py computes; reference.py computes all
KINDS_ON_GPU = ("dense", "fp8", "fp8_block", "int4")


@dataclass(frozen=True, slots=True)
class Router:
    """weight `[num_experts, hidden]`, without shared ones. bias: float32 `[num_experts]`, added to
    the scores by which experts are chosen, not to those that weigh them. logit_bias: float32
    `[num_experts]`, added to the logits."""

    weight: Tensor
    routing: Routing
    bias: Tensor | None = None
    logit_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Lists:
    """The rows of each expert, E with the shared ones. `route` lists padding for shared experts,
    too; `place` lists none. counts: int32 `[E]`. slots: int32 `[E, T]`, of which the first
    counts[e] are filled, in any order: row * num_places + place in the row's choice.
    num_everywhere: number of experts among which the rows were dealt, those of other ranks too;
    None: E."""

    counts: Tensor
    slots: Tensor
    num_everywhere: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """experts: int32 `[T, num_places]`, in falling order of what they were chosen by, then the
    shared ones; -1 in rows that go to none. weights: float32 `[T, num_places]`. lists: for a `mix`
    that wants them."""

    experts: Tensor
    weights: Tensor
    lists: Lists | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """The experts that one rank of a stage holds, where ranks hold experts whole.

    num_copies: int32 `[num_experts]`, how many copies each has. first: int32 `[num_experts]`, where
    an expert's copies begin in `copies`: int32, the copies' numbers, see Placement. The rank's own
    are num_local from number first_local on; behind them it has all shared experts. tp_rank, tp:
    its place among the ranks that have the same rows at home, and their number.
    """

    num_copies: Tensor
    first: Tensor
    copies: Tensor
    first_local: int
    num_local: int
    num_shared: int
    tp_rank: int
    tp: int

    @property
    def num_everywhere(self) -> int:
        """Number of experts on all ranks, each copy and each rank's shared ones counted."""
        return self.copies.numel() // self.num_local * (self.num_local + self.num_shared)


def share_of(
    placement: Placement, rank: int, tp: int, num_shared: int, device: torch.device
) -> Share:
    """What `rank` of the placement's ranks holds: rank = tp_rank + tp * home."""

    def on_device(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    num_copies = [len(copies) for copies in placement.copies]
    return Share(
        num_copies=on_device(num_copies),
        first=on_device([sum(num_copies[:expert]) for expert in range(len(num_copies))]),
        copies=on_device([copy for copies in placement.copies for copy in copies]),
        first_local=rank * placement.num_local,
        num_local=placement.num_local,
        num_shared=num_shared,
        tp_rank=rank % tp,
        tp=tp,
    )


@dataclass(frozen=True, slots=True)
class Experts:
    """Gated MLPs side by side, the shared ones last, as stacks of matrices of one kind: gate_up
    `[E, 2 * I, hidden]`, gate first; down `[E, hidden, I]`. ops: products with one of them, where
    an implementation has no kernel for all."""

    gate_up: Matrix
    down: Matrix
    activation: Activation
    ops: LinearOps = reference


class ExpertOps(Protocol):
    def route(self, x: Tensor, router: Router, live: Tensor | None, load: Tensor) -> Choice:
        """Where the rows x `[T, hidden]` go. live: bool `[T]`, false for rows that are padding and
        go to no expert; None: none is. load: int64 `[num_experts]`, to which the number of rows
        that choose each is added."""
        ...

    def place(self, choice: Choice, share: Share, own: range) -> Choice:
        """The part of a choice that this rank computes: numbers of its own experts, shared ones
        last, -1 and weight 0 where another rank has the expert. All ranks' parts together are the
        choice. own: the rows of the rank's home, which alone go to its shared experts. Which copy
        of an expert a row goes to, and which rank does its shared ones, depends on the bits of its
        first weight alone, so not on the other rows."""
        ...

    def mix(
        self, x: Tensor, choice: Choice, experts: Experts, onto: Tensor | None = None
    ) -> Tensor:
        """`[T, hidden]`: what the experts of each row make of it, weighted and added up in the
        order of the choice. onto `[T, hidden]`, contiguous: it is added to this, which may be
        overwritten."""
        ...
