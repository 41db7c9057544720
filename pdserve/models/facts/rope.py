"""RopeSpec: how a model rotates q and k, as config.json says."""

import math
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from pdserve.models.hf_config import HfConfig, RopeParameters

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]


class YarnSpec(BaseModel):
    """YaRN's part of a RopeSpec (Peng et al. 2023).

    beta_fast, beta_slow: the numbers of rotations over the original length between which
        frequencies are blended.
    truncate: the limits are whole pairs.
    table_scale: factor of cos and sin.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    table_scale: float = 1.0


class LongRopeSpec(BaseModel):
    """LongRoPE's part of a RopeSpec (Ding et al. 2024).

    short_factors, long_factors: factors of the wavelength of each rotated pair. The first ones hold
        in engines where no request is longer than the original length, the others elsewhere.
    table_scale: factor of cos and sin.
    is_long: which of the two factors hold.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    table_scale: float
    is_long: bool

    @property
    def factors(self) -> tuple[float, ...]:
        return self.long_factors if self.is_long else self.short_factors


class RopeSpec(BaseModel):
    """Rotary embedding: base `theta` and scaling rule `kind`. The other fields belong to "linear",
    "llama3", "yarn" and "longrope".

    rotated: number of a head's first columns that are rotated; None: all.
    is_interleaved: neighbours are rotated together, not halves of the rotated columns.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    yarn: YarnSpec | None = None
    long: LongRopeSpec | None = None
    rotated: int | None = None
    is_interleaved: bool = False

    @property
    def unused(self) -> set[str]:
        """Names of the fields that later rules brought and that are not set here."""
        later = ("yarn", "long", "rotated", "is_interleaved")
        return {name for name in later if not getattr(self, name)}

    def for_length(self, length: int) -> "RopeSpec":
        """Returns the spec for an engine whose longest request has this many tokens."""
        if self.long is None:
            return self
        long = self.long.model_copy(update={"is_long": length > self.original_max_position})
        return self.model_copy(update={"long": long})

    def head_order(self, head_dim: int) -> tuple[int, ...]:
        """Returns the order in which the columns of q's and k's heads are held, so that columns i
        and head_dim / 2 + i are rotated together. Returns () if they already are. Columns that are
        not rotated come after those of their half. Scores do not depend on the order."""
        rotated = self.rotated or head_dim
        half, more = rotated // 2, (head_dim - rotated) // 2
        pairs = [(2 * i, 2 * i + 1) if self.is_interleaved else (i, half + i) for i in range(half)]
        pairs += [(rotated + i, rotated + more + i) for i in range(more)]
        order = (*(first for first, _ in pairs), *(second for _, second in pairs))
        return () if order == tuple(range(head_dim)) else order


def rope_of(hf: HfConfig, facts: RopeParameters | None = None) -> RopeSpec:
    """Returns the RopeSpec of a model. facts: those of some of the layers; None: the model's.
    Raises ValueError for a rule that is not known or that lacks a number."""
    facts = facts or hf.rope_parameters
    rope = _scaled_rope(hf, facts)
    rotated = int(hf.any_head_dim * facts.partial_rotary_factor)
    if rotated == hf.any_head_dim:
        return rope
    if not 0 < rotated < hf.any_head_dim or rotated % 2:
        raise ValueError(
            f"partial_rotary_factor={facts.partial_rotary_factor} would rotate {rotated} of a "
            f"head's {hf.any_head_dim} columns: it must leave an even number above 0"
        )
    return rope.model_copy(update={"rotated": rotated})


def _scaled_rope(hf: HfConfig, facts: RopeParameters) -> RopeSpec:
    if facts.rope_type not in get_args(RopeKind):
        raise ValueError(
            f"rope_type={facts.rope_type!r} is not supported; supported: "
            f"{', '.join(get_args(RopeKind))}"
        )
    if facts.rope_type == "default":
        return RopeSpec(theta=facts.rope_theta)
    if facts.rope_theta <= 1:
        raise ValueError(f"rope_theta={facts.rope_theta} must be above 1")
    original = facts.original_max_position_embeddings or hf.max_position_embeddings
    if facts.rope_type == "longrope":
        return _longrope(hf, facts, original)
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


def _longrope(hf: HfConfig, facts: RopeParameters, original: int) -> RopeSpec:
    pairs = int(hf.any_head_dim * facts.partial_rotary_factor) // 2
    factors = {"short_factor": facts.short_factor, "long_factor": facts.long_factor}
    for name, each in factors.items():
        if each is None or len(each) != pairs or min(each) <= 0:
            raise ValueError(
                f"not a valid longrope: {name} must be {pairs} numbers above 0, one for each pair "
                "of columns that is rotated; restore rope_scaling from the model's source"
            )
    stretch = facts.factor or hf.max_position_embeddings / original
    scale = facts.attention_factor
    if scale is None:
        scale = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    long = LongRopeSpec(
        short_factors=tuple(facts.short_factor or ()),
        long_factors=tuple(facts.long_factor or ()),
        table_scale=scale,
        is_long=hf.max_position_embeddings > original,
    )
    return RopeSpec(
        theta=facts.rope_theta, kind="longrope", original_max_position=original, long=long
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Returns the factor by which attention is sharpened over a context `factor` times as long."""
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
