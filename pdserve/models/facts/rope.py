"""RopeSpec: how a model rotates q and k, as config.json says it."""

import math
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from pdserve.models.hf_config import HfConfig, RopeParameters

RopeKind = Literal["default", "linear", "llama3", "yarn"]


class YarnSpec(BaseModel):
    """YaRN's part of a RopeSpec (Peng et al. 2023): the numbers of rotations over the original
    length between which frequencies are blended; whether the limits are whole pairs; and what cos
    and sin are multiplied by."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    table_scale: float = 1.0


class RopeSpec(BaseModel):
    """Rotary embedding: base `theta` and scaling rule `kind`; the other fields belong to "linear",
    "llama3" and "yarn"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    yarn: YarnSpec | None = None


def rope_of(hf: HfConfig) -> RopeSpec:
    """ValueError for a rule that is not known, or that lacks a number."""
    facts = hf.rope_parameters
    if facts.rope_type not in get_args(RopeKind):
        raise ValueError(
            f"rope_type={facts.rope_type!r} is not supported; supported: "
            f"{', '.join(get_args(RopeKind))}"
        )
    if facts.partial_rotary_factor != 1.0:
        raise ValueError(
            f"partial_rotary_factor={facts.partial_rotary_factor} is not supported: only 1.0 is"
        )
    if facts.rope_type == "default":
        return RopeSpec(theta=facts.rope_theta)
    if facts.rope_theta <= 1:
        raise ValueError(f"rope_theta={facts.rope_theta} must be above 1")
    original = facts.original_max_position_embeddings or hf.max_position_embeddings
    factor = facts.factor
    if factor is None and facts.rope_type == "yarn":
        factor = hf.max_position_embeddings / original
    if factor is None:
        raise ValueError(f"not a valid {facts.rope_type} rope: factor is missing in rope_scaling")
    if factor <= 0:
        raise ValueError(f"not a valid {facts.rope_type} rope: factor={factor} must be above 0")
    scaled: dict[str, Any] = {"theta": facts.rope_theta, "factor": factor}
    if facts.rope_type == "linear":
        return RopeSpec(kind="linear", **scaled)
    scaled["original_max_position"] = original
    if facts.rope_type == "yarn":
        return RopeSpec(kind="yarn", yarn=_yarn(facts, factor), **scaled)
    if facts.low_freq_factor is None or facts.high_freq_factor is None:
        raise ValueError(
            "not a valid llama3 rope: low_freq_factor or high_freq_factor is missing in "
            "rope_scaling"
        )
    return RopeSpec(
        kind="llama3",
        low_freq_factor=facts.low_freq_factor,
        high_freq_factor=facts.high_freq_factor,
        **scaled,
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """The factor by which attention is sharpened over a context `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(facts: RopeParameters, factor: float) -> YarnSpec:
    for name in ("beta_fast", "beta_slow"):
        if (getattr(facts, name) or 1) < 0:
            raise ValueError(f"not a valid yarn rope: {name} must be above 0")
    scale = facts.attention_factor
    if scale is None and facts.mscale and facts.mscale_all_dim:
        scale = yarn_mscale(factor, facts.mscale) / yarn_mscale(factor, facts.mscale_all_dim)
    if scale is None:
        scale = yarn_mscale(factor)
    return YarnSpec(
        beta_fast=facts.beta_fast or 32.0,
        beta_slow=facts.beta_slow or 1.0,
        truncate=facts.truncate,
        table_scale=scale,
    )
