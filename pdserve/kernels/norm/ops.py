"""Norms and gates: shapes in reference.py, which implements them in plain torch; triton_ops.py does
in Triton."""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
SWIGLU_LIMIT = 7.0  # of clamped_swiglu: gate is at most this, up no further from 0
SWIGLU_ALPHA = 1.702  # by which its gate's sigmoid is steeper


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm. weight `[width]`; plus_one: it scales by 1 + weight, in float32, as
    Gemma's does."""

    weight: Tensor
    eps: float
    plus_one: bool = False


class NormOps(Protocol):
    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor: ...

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor: ...
