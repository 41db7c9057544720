"""The interface of a mixture of experts. It is written in plain torch by reference.py, and in
Triton by triton_ops.py."""

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

# Kinds of stacks of experts that triton_ops.py computes; reference.py computes all kinds.
KINDS_ON_GPU = ("dense", "fp8", "fp8_block", "int4")


@dataclass(frozen=True, slots=True)
class Router:
    """The router of one layer.

    weight: `[num_experts, hidden]`, without shared experts.
    bias: float32 `[num_experts]`, added to the scores that choose experts, not to the scores that
        weigh them.
    logit_bias: float32 `[num_experts]`, added to the logits.
    """

    weight: Tensor
    routing: Routing
    bias: Tensor | None = None
    logit_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Lists:
    """The rows of each of E experts, including the shared ones. `route` also lists padding for
    shared experts; `place` lists no padding.

    counts: int32 `[E]`.
    slots: int32 `[E, T]`. The first counts[e] entries are filled, in any order, with row *
        num_places + place in the row's choice.
    num_everywhere: number of experts to which the rows were dealt, on all ranks; None: E.
    """

    counts: Tensor
    slots: Tensor
    num_everywhere: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The experts that each row goes to.

    experts: int32 `[T, num_places]`, in falling order of the scores that chose them, then the
        shared experts; -1 in rows that go to none.
    weights: float32 `[T, num_places]`.
    lists: the same by expert, for a `mix` that needs it.
    """

    experts: Tensor
    weights: Tensor
    lists: Lists | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """The experts that one rank of a stage holds, where ranks hold experts whole.

    num_copies: int32 `[num_experts]`, number of copies of each expert.
    first: int32 `[num_experts]`, where an expert's copies begin in `copies`.
    copies: int32, the numbers of the copies, see Placement.
    first_local, num_local: number of the rank's first own copy, and how many it has. The rank's
        shared experts come after them.
    num_shared: number of shared experts; every rank has all of them.
    tp_rank, tp: the rank's place among the ranks that have the same rows at home, and their number.
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
        """Number of experts on all ranks, where each copy and each rank's shared ones count."""
        return self.copies.numel() // self.num_local * (self.num_local + self.num_shared)


def share_of(
    placement: Placement, rank: int, tp: int, num_shared: int, device: torch.device
) -> Share:
    """Returns what `rank` of the placement's ranks holds. rank is tp_rank + tp * home."""

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
    """Gated MLPs side by side, the shared ones last, as stacks of matrices of one kind.

    gate_up: `[E, 2 * I, hidden]`, gate first.
    down: `[E, hidden, I]`.
    ops: products with one of the matrices, for an implementation that has no kernel for all at
        once.
    """

    gate_up: Matrix
    down: Matrix
    activation: Activation
    ops: LinearOps = reference


class ExpertOps(Protocol):
    def route(self, x: Tensor, router: Router, live: Tensor | None, load: Tensor) -> Choice:
        """Chooses experts for the rows x `[T, hidden]`.

        live: bool `[T]`, false for rows that are padding and go to no expert; None: all are live.
        load: int64 `[num_experts]`; the number of rows that choose each expert is added to it.
        """
        ...

    def place(self, choice: Choice, share: Share, own: range) -> Choice:
        """Returns the part of a choice that this rank computes. It has the rank's own numbers of
        experts, shared ones last. It has -1 and weight 0 where another rank has the expert. All
        ranks' parts together are the choice.

        The bits of a row's first weight decide which copy of an expert the row goes to, and which
        rank computes its shared ones. So this does not depend on the other rows.
        own: the rows of the rank's home. Only these go to its shared experts.
        """
        ...

    def mix(
        self, x: Tensor, choice: Choice, experts: Experts, onto: Tensor | None = None
    ) -> Tensor:
        """Returns `[T, hidden]`: the results of the experts of each row, weighted and added up in
        the order of the choice.

        onto: `[T, hidden]`, contiguous. The result is added to it, and it may be overwritten.
        """
        ...
