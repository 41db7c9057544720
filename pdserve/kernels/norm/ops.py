"""Norms and gates: shapes in reference.py, which implements them in plain torch; triton_ops.py does
in Triton."""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


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
