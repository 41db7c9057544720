"""Operations of a mixture of experts: reference.py implements them in plain torch, triton_ops.py in
Triton."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdserve.kernels.experts.routing import Routing
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.norm.ops import Activation


@dataclass(frozen=True, slots=True)
class Router:
    """weight `[num_experts, hidden]`, without shared ones. bias: float32 `[num_experts]`, added to
    the scores by which experts are chosen, not to those that weigh them."""

    weight: Tensor
    routing: Routing
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Lists:
    """The rows of each expert, E with the shared ones, to which padding may go, too. counts: int32
    `[E]`. slots: int32 `[E, T]`, of which the first counts[e] are filled, in any order: row *
    num_places + place in the row's choice."""

    counts: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class Choice:
    """experts: int32 `[T, num_places]`, in falling order of what they were chosen by, then the
    shared ones; -1 in rows that go to none. weights: float32 `[T, num_places]`. lists: for a `mix`
    that wants them."""

    experts: Tensor
    weights: Tensor
    lists: Lists | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """Gated MLPs side by side, the shared ones last, as matrices with data of three dims: gate_up
    `[E, 2 * I, hidden]`, gate first; down `[E, hidden, I]`."""

    gate_up: Matrix
    down: Matrix
    activation: Activation


class ExpertOps(Protocol):
    def route(self, x: Tensor, router: Router, live: Tensor | None, load: Tensor) -> Choice:
        """Where the rows x `[T, hidden]` go. live: bool `[T]`, false for rows that are padding and
        go to no expert; None: none is. load: int64 `[num_experts]`, to which the number of rows
        that choose each is added."""
        ...

    def mix(
        self, x: Tensor, choice: Choice, experts: Experts, onto: Tensor | None = None
    ) -> Tensor:
        """`[T, hidden]`: what the experts of each row make of it, weighted and added up in the
        order of the choice. onto `[T, hidden]`, contiguous: it is added to this, which may be
        overwritten."""
        ...
