"""Rotary position embedding tables (RoPE, Su et al. 2021), with the numbers transformers computes,
bit for bit.

Knows the scaling rules "default", "linear" and "llama3" of a RopeSpec; not the rotation itself,
which is a kernel (`rope_write_kv`). Called by the models when they are built.
"""

import math

import torch

from pdserve.models.config import RopeSpec


def rope_tables(
    rope: RopeSpec, head_dim: int, max_position: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cos, sin`, each float32 `[max_position, head_dim // 2]`.

    Computed on the CPU and then moved: CUDA's cos of a large argument differs in the last bits, and
    P and D must agree.
    """
    angles = torch.arange(max_position).float()[:, None] * inverse_frequencies(rope, head_dim)
    return angles.cos().to(device), angles.sin().to(device)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """float32 `[head_dim // 2]`: radians per position of each rotated pair, after scaling."""
    freqs = 1.0 / (
        rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    )
    if rope.kind == "linear":
        return freqs / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, freqs)
    return freqs


def _llama3(rope: RopeSpec, freqs: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: keep short wavelengths, divide long ones by `factor`, blend those between the two
    limits."""
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_divided = rope.original_max_position / rope.low_freq_factor
    wavelengths = 2 * math.pi / freqs
    scaled = torch.where(wavelengths > shortest_divided, freqs / rope.factor, freqs)
    share = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share) * freqs / rope.factor + share * freqs
    between = ~(wavelengths < longest_kept) & ~(wavelengths > shortest_divided)
    return torch.where(between, blended, scaled)
