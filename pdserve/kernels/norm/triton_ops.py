"""NormOps in Triton: checks the inputs of the kernels and launches them."""

import torch
from torch import Tensor

from pdserve.kernels.launching.checks import check_rows
from pdserve.kernels.norm.elementwise import launch_gate, launch_rms_norm
from pdserve.kernels.norm.ops import Activation, Norm


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Does what reference.rms_norm does."""
    if x.numel() == 0:
        return torch.empty_like(x)
    rows = x if x.ndim in (2, 3) and x.stride(-1) == 1 else x.reshape(-1, x.shape[-1])
    return launch_rms_norm(rows, norm).view(x.shape)


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """Does what reference.gate does."""
    check_rows(gate_up=gate_up)
    if gate_up.numel() == 0:
        return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    return launch_gate(gate_up, activation)
