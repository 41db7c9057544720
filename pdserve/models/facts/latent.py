"""LatentSpec: the sizes of attention over a latent (DeepSeek's MLA). This file also reads the other
facts of DeepSeek's config.json."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from pdserve.models.facts.experts import deepseek_v2_experts, deepseek_v3_experts
from pdserve.models.facts.rope import rope_of, yarn_mscale
from pdserve.models.hf_config import HfConfig


class LatentSpec(BaseModel):
    """The sizes of attention over latents.

    kv_rank: columns of the one latent of a token, from which the keys and values of all heads are
        made.
    q_rank: columns of the queries' own latent; None: they have none.
    nope_dim: unrotated columns of a head's keys, made of the latent.
    rope_dim: rotated columns, which all heads share.
    v_dim: columns of a head's values, made of the latent.
    is_interleaved: neighbours are rotated together, not halves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kv_rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    v_dim: int
    is_interleaved: bool


def deepseek_v2_facts(config: HfConfig) -> dict[str, Any]:
    return _facts(config, is_interleaved=True) | {"experts": deepseek_v2_experts(config)}


def deepseek_v3_facts(config: HfConfig) -> dict[str, Any]:
    facts = _facts(config, is_interleaved=config.rope_interleave)
    return facts | {"experts": deepseek_v3_experts(config)}


def _facts(config: HfConfig, is_interleaved: bool) -> dict[str, Any]:
    if config.mlp_bias:
        raise ValueError("mlp_bias=true is not supported: no such model of DeepSeek's is known")
    if config.attention_bias and config.q_lora_rank is None:
        raise ValueError(
            "attention_bias=true with q_lora_rank null is not supported: no such model is known"
        )
    sizes = {
        "kv_rank": ("kv_lora_rank", config.kv_lora_rank),
        "nope_dim": ("qk_nope_head_dim", config.qk_nope_head_dim),
        "rope_dim": ("qk_rope_head_dim", config.qk_rope_head_dim),
        "v_dim": ("v_head_dim", config.v_head_dim),
    }
    for name, size in sizes.values():
        if size is None or size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    if config.q_lora_rank is not None and config.q_lora_rank < 1:
        raise ValueError(f"q_lora_rank={config.q_lora_rank} must be at least 1, or null")
    latent = LatentSpec(
        **{field: size for field, (_, size) in sizes.items()},
        q_rank=config.q_lora_rank,
        is_interleaved=is_interleaved,
    )
    if latent.rope_dim % 2:
        raise ValueError(f"qk_rope_head_dim={latent.rope_dim} is odd: pairs are rotated")
    return {
        "latent": latent,
        "num_kv_heads": 1,
        "head_dim": latent.rope_dim,
        "attention_scale": _scale(config, latent),
        "qkv_bias": config.attention_bias,
        "o_bias": config.attention_bias,
    }


def _scale(config: HfConfig, latent: LatentSpec) -> float:
    scale = float((latent.nope_dim + latent.rope_dim) ** -0.5)
    said = config.rope_parameters
    if said.rope_type != "default" and said.mscale_all_dim:
        scale *= yarn_mscale(rope_of(config).factor, said.mscale_all_dim) ** 2
    return scale
