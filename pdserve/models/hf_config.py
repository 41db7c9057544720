"""Reads config.json as transformers would: the family's defaults are filled in, and old and new
names become one.

transformers' own classes would do, but importing them takes seconds at every start. A test compares
the two. This file knows what a configuration says, not what can be served (models/config.py does).
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pdserve.configs.base import sentences_of

# The name in pdserve <- other names of the same field; these lose if both are present.
RENAMED = {
    "dtype": ("torch_dtype",),
    "rope_parameters": ("rope_scaling",),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_nextn_predict_layers": ("num_mtp_layers",),
}


GLOBAL, LOCAL = "full_attention", "sliding_attention"
ORIGINAL_LENGTH = "original_max_position_embeddings"
OLD_NAMES_OF_LONGROPE = ("su", "yarn")  # older configurations of Phi-3 have these names for it
# Fields where null is not the same as a missing field: null switches a family's default off.
NULLABLE = (
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "eos_token_id",
    "q_lora_rank",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)


class RopeParameters(BaseModel):
    """The fields that transformers 5 has in `rope_parameters`, and older ones in `rope_scaling`."""

    model_config = ConfigDict(frozen=True)

    rope_type: str = "default"
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: list[float] | None = None
    long_factor: list[float] | None = None


class HfConfig(BaseModel):
    """The fields that pdserve reads; others are ignored. Defaults are Llama's."""

    model_config = ConfigDict(frozen=True)

    num_hidden_layers: int = 32
    hidden_size: int = 4096
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int = 11008
    vocab_size: int = 32000
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_parameters: RopeParameters = RopeParameters()
    local_rope_parameters: RopeParameters | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    sliding_window_pattern: int = 6
    use_bidirectional_attention: bool | None = None
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    n_shared_experts: int | None = None
    first_k_dense_replace: int = 0
    moe_layer_freq: int | None = None
    scoring_func: str | None = None
    topk_method: str | None = None
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    rope_interleave: bool = True
    num_nextn_predict_layers: int = 0
    dtype: str | None = None
    eos_token_id: int | list[int] | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def any_head_dim(self) -> int:
        """Columns of a head, whether or not config.json has head_dim."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def even_head_dim(self) -> int:
        """Columns of a head. Raises ValueError for an odd number, which cannot be rotated."""
        if self.any_head_dim % 2:
            raise ValueError(
                f"head_dim={self.any_head_dim} is odd: the rotary embedding needs an even one"
            )
        return self.any_head_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window that each layer has, as in ModelSpec."""
        if self.sliding_window is None:
            return ()
        kinds = self.layer_types or ["sliding_attention"] * self.num_hidden_layers
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in kinds)


def text_config_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the text model's fields of a configuration that has them under text_config. Fields
    beside text_config take precedence."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(
            "not a valid configuration: text_config is missing; restore the file from the model's "
            "source"
        )
    beside = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
    return {**text, **{name: raw[name] for name in beside if raw.get(name) is not None}}


def read_hf_config(raw: Mapping[str, Any], family: str, defaults: Mapping[str, Any]) -> HfConfig:
    """Makes the configuration of a `family` with these defaults (models/families.py) from
    config.json's content. ValueError names a bad field."""
    values = {key: value for key, value in raw.items() if value is not None or key in NULLABLE}
    for name, others in RENAMED.items():
        for other in others:
            if other in values:
                values.setdefault(name, values[other])
    if "hidden_activation" in values:
        values["hidden_act"] = values["hidden_activation"]
    values["local_rope_parameters"] = _local_rope_parameters({**defaults, **values})
    values["rope_parameters"] = _rope_parameters({**defaults, **values}, family)
    if family.startswith("glm") and values.get("eos_token_id") is None:
        values.pop("eos_token_id", None)
    if family.startswith("qwen") and not values.get("use_sliding_window"):
        values["sliding_window"] = None
    try:
        return HfConfig(**{**defaults, **values})
    except ValidationError as error:
        raise ValueError(f"not a valid {family} configuration: {sentences_of(error)}") from error


def _local_rope_parameters(values: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the rope parameters of layers with a window, in families where these rotate by a base
    of their own."""
    if "rope_local_base_freq" not in values:
        return None
    facts = dict((values.get("rope_parameters") or {}).get(LOCAL) or {})
    return {"rope_theta": values["rope_local_base_freq"], **facts}


def _rope_parameters(values: dict[str, Any], family: str) -> dict[str, Any]:
    facts = dict(values.get("rope_parameters") or {})
    if GLOBAL in facts or LOCAL in facts:
        facts = dict(facts.get(GLOBAL) or {})
    if "type" in facts:
        facts.setdefault("rope_type", facts["type"])
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in values:
            facts.setdefault(name, values[name])
    if family == "phi3" and facts.get("rope_type") in OLD_NAMES_OF_LONGROPE:
        facts["rope_type"] = "longrope"
    if facts.get("rope_type") in ("llama3", "yarn", "longrope") and ORIGINAL_LENGTH in values:
        facts[ORIGINAL_LENGTH] = values[ORIGINAL_LENGTH]
    return facts
