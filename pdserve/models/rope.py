"""Rotary position embedding tables (RoPE, Su et al. 2021), with the numbers that transformers
computes, bit for bit.

This file knows the scaling rules of a RopeSpec. It does not know the rotation itself, which is a
kernel (`rope_write_kv`, `latents.rope_write`). Models call it when they are built.
"""

import math

import torch
from torch.nn import functional

from pdserve.models.facts.rope import RopeSpec, YarnSpec


def rope_tables(
    rope: RopeSpec, head_dim: int, max_position: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `cos, sin`, each float32 `[max_position, head_dim // 2]`, for heads whose columns are
    ordered as `RopeSpec.head_order` says. Pairs that are not rotated come last, with 1 and 0.

    The tables are computed on the CPU and then moved: CUDA's cos of a large argument differs in the
    last bits, and P and D must agree.
    """
    rotated = rope.rotated or head_dim
    angles = torch.arange(max_position).float()[:, None] * inverse_frequencies(rope, rotated)
    cos, sin = angles.cos(), angles.sin()
    for scaled in (rope.yarn, rope.long):
        if scaled is not None:
            cos, sin = cos * scaled.table_scale, sin * scaled.table_scale
    more = (0, (head_dim - rotated) // 2)
    cos, sin = functional.pad(cos, more, value=1.0), functional.pad(sin, more)
    return cos.to(device), sin.to(device)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Returns float32 `[head_dim // 2]`: the radians per position of each rotated pair, scaled."""
    freqs = 1.0 / (
        rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    )
    if rope.kind == "linear":
        return freqs / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, freqs)
    if rope.yarn is not None:
        return _yarn(rope, rope.yarn, head_dim)
    if rope.long is not None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return 1.0 / (torch.tensor(rope.long.factors) * rope.theta**exponents)
    return freqs


def _yarn(rope: RopeSpec, yarn: YarnSpec, dim: int) -> torch.Tensor:
    """Scales by YaRN: pairs that turn often keep their frequency, those that turn little are
    divided, and a ramp blends the pairs between."""

    def pair_of(rotations: float) -> float:
        """Returns the pair that makes this many rotations over the original length."""
        length = rope.original_max_position
        return (dim * math.log(length / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    bases = rope.theta ** (torch.arange(0, dim, 2).float() / dim)
    kept = 1 - ramp
    return 1.0 / (rope.factor * bases) * (1 - kept) + 1.0 / bases * kept


def _llama3(rope: RopeSpec, freqs: torch.Tensor) -> torch.Tensor:
    """Scales as in Llama 3.1: short wavelengths are kept, long ones are divided by `factor`, and
    those between the two limits are blended."""
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
