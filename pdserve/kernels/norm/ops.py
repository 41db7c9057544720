"""The interface of norms and gates. reference.py says the shapes and implements it in plain torch;
triton_ops.py implements it in Triton."""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
SWIGLU_LIMIT = 7.0  # in clamped_swiglu, gate is at most this, and up is within +- this
SWIGLU_ALPHA = 1.702  # factor by which the sigmoid of its gate is steeper


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm.

    weight: `[width]`.
    plus_one: the norm scales by 1 + weight, in float32, as Gemma's does.
    """

    weight: Tensor
    eps: float
    plus_one: bool = False


class NormOps(Protocol):
    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor: ...

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor: ...
