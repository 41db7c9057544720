"""The model families that pdserve serves: one row for each architecture of config.json.

This file needs no torch: the class that computes a family is imported when a model of it is loaded.
A new family is a row here and the file of its class (CONTRIBUTING.md walks through one).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pdserve.models.facts.experts import mixtral_experts, qwen_experts
from pdserve.models.facts.gemma import gemma2_facts, gemma3_facts
from pdserve.models.facts.gpt_oss import gpt_oss_facts
from pdserve.models.facts.latent import deepseek_v2_facts, deepseek_v3_facts
from pdserve.models.facts.rope import rope_of
from pdserve.models.facts.windows import even_windows, late_windows
from pdserve.models.hf_config import HfConfig

Facts = Callable[[HfConfig], dict[str, Any]]
"""Returns fields of ModelSpec that config.json does not have as fields of its own."""


def no_facts(config: HfConfig) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """One model family.

    model_type: transformers' name, in config.json.
    builder: "module:class" of models/architectures.
    defaults: values of fields that config.json may leave out, where they differ from Llama's.
    facts: what the code of the family does and config.json does not say.
    activations: values of hidden_act that it computes.
    has_windows: its layers take windows. Without it, a config.json that asks for one is refused.
    is_nested: config.json has the text model's fields under text_config.
    rotates_parts: it takes a partial_rotary_factor.
    prefix: prefix of all module names in the checkpoint.
    unused: prefixes of tensors that texts alone do not need.
    """

    model_type: str
    builder: str = "llama:Llama"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    facts: Facts = no_facts
    activations: tuple[str, ...] = ("silu",)
    has_windows: bool = False
    is_nested: bool = False
    rotates_parts: bool = False
    prefix: str = ""
    unused: tuple[str, ...] = ()


GELU = "gelu_pytorch_tanh"
GLM: dict[str, Any] = {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151329, 151336, 151338],
}


def _glm(config: HfConfig) -> dict[str, Any]:
    rope = rope_of(config).model_copy(update={"is_interleaved": True})
    return {"rope": rope, "o_bias": False, "mlp_bias": False}


def _qwen2_moe(config: HfConfig) -> dict[str, Any]:
    return {
        "qkv_bias": config.qkv_bias,
        "experts": qwen_experts(config),
        "windows": even_windows(config),
    }


GEMMA: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": GELU,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA2: dict[str, Any] = {
    **GEMMA,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3: dict[str, Any] = {
    **GEMMA,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_GEMMA3 = Family(
    "gemma3_text",
    "gemma:Gemma",
    defaults=GEMMA3,
    facts=gemma3_facts,
    activations=(GELU,),
    has_windows=True,
)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", defaults={"eos_token_id": 2}),
    "MistralForCausalLM": Family(
        "mistral",
        defaults={
            "eos_token_id": 2,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "max_position_embeddings": 4096 * 32,
            "sliding_window": 4096,
        },
        has_windows=True,
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        defaults={
            "num_key_value_heads": 32,
            "intermediate_size": 22016,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
        },
        facts=lambda config: {"qkv_bias": True, "windows": late_windows(config)},
        has_windows=True,
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "intermediate_size": 22016,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
        },
        facts=lambda config: {"qk_norm": True, "windows": late_windows(config)},
        has_windows=True,
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        "olmo2:Olmo2",
        defaults={"vocab_size": 50304, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
        facts=lambda config: {"qk_norm_of_all": True},
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        "phi3:Phi3",
        defaults={
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32000,
        },
        facts=lambda config: {"qkv_bias": False, "o_bias": False, "mlp_bias": False},
        has_windows=True,
        rotates_parts=True,
    ),
    "GlmForCausalLM": Family("glm", "glm:Glm", defaults=GLM, facts=_glm, rotates_parts=True),
    "Glm4ForCausalLM": Family("glm4", "glm:Glm4", defaults=GLM, facts=_glm, rotates_parts=True),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        "gemma:Gemma",
        defaults=GEMMA2,
        facts=gemma2_facts,
        activations=(GELU,),
        has_windows=True,
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3,
        is_nested=True,
        prefix="language_model.",
        unused=("vision_tower.", "multi_modal_projector."),
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        "mixture:Mixtral",
        defaults={
            "eos_token_id": 2,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "max_position_embeddings": 4096 * 32,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        facts=lambda config: {"experts": mixtral_experts(config)},
        has_windows=True,
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        "gpt_oss:GptOss",
        defaults={
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "sliding_window": 128,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        facts=gpt_oss_facts,
        has_windows=True,
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        "mixture:QwenMoe",
        defaults={
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        facts=_qwen2_moe,
        has_windows=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        "mixture:QwenMoe",
        defaults={
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        facts=lambda config: {"qk_norm": True, "experts": qwen_experts(config)},
        has_windows=True,
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2",
        "deepseek:DeepSeek",
        defaults={
            "vocab_size": 102400,
            "eos_token_id": 2,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "topk_method": "greedy",
        },
        facts=deepseek_v2_facts,
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3",
        "deepseek:DeepSeek",
        defaults={
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "max_position_embeddings": 4096,
            "eos_token_id": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "norm_topk_prob": True,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 1,
        },
        facts=deepseek_v3_facts,
    ),
}
