"""Tiny random models of every supported family, as transformers saves them; shared by the tests of
several rooms.

Weights are drawn wide (std 0.2 at width 64, against transformers' 0.02), and norms and biases too.
So greedy output depends on every weight, on positions and on the mask: a model that drops one of
them gives other tokens.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

DEMO = Path(__file__).parents[2] / "demo" / "pdserve-demo"

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # at head_dim 16 some wavelengths are kept, some blended, some divided
    "original_max_position_embeddings": 64,
}
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.9,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
# at head_dim 16, of which 12 columns are rotated
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.5, 2.0, 3.0, 5.0, 8.0, 12.0],
    "partial_rotary_factor": 0.75,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {"sliding_window": 24}),
    "phi4-mini": (
        "phi3",
        {
            "rope_parameters": {**LONG_ROPE, "original_max_position_embeddings": 4},
            "original_max_position_embeddings": 4,
        },
    ),
    "glm": ("glm", {"head_dim": 16, "eos_token_id": [99]}),
    "glm4": ("glm4", {"head_dim": 32, "eos_token_id": [99]}),
    "gemma2": (
        "gemma2",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 20.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 8.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
            "rope_parameters": YARN_ROPE,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **LATENT,
            "q_lora_rank": 24,
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_group": 3,
            "topk_group": 2,
            "num_nextn_predict_layers": 0,
        },
    ),
}


def make_tiny(
    family: str, path: Path | str, seed: int = 0, *, max_shard_size: str = "1GB", **overrides: Any
) -> Path:
    """Write a tiny model of `family` (a key of FAMILIES) into folder `path`; `overrides` are
    config.json fields."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, facts = FAMILIES[family]
    fields = {**SHAPE, **facts, **overrides}
    if "layer_types" in facts and "layer_types" not in overrides:  # one for each layer
        pattern = facts["layer_types"]
        layers = range(fields["num_hidden_layers"])
        fields["layer_types"] = [pattern[layer % len(pattern)] for layer in layers]
    config = AutoConfig.for_model(model_type, **fields)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_around_one = name.endswith("norm.weight") and not model_type.startswith("gemma")
            mean = 1.0 if is_around_one else 0.0
            parameter.normal_(mean, 0.2, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2, generator=generator)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return Path(path)


def make_speaking(family: str, path: Path | str) -> Path:
    """A tiny model that takes and gives the demo's tokens, and has its tokenizer and chat
    template."""
    folder = make_tiny(family, path, vocab_size=1792, max_position_embeddings=4096)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / file, folder)
    return folder


def make_embedding(path: Path | str, **overrides: Any) -> Path:
    """A tiny model in the form of Qwen3-Embedding: a bare Qwen3 decoder without an output matrix,
    with sentence-transformers' files, and the demo's tokenizer, which appends <|eos|> here."""
    facts = {"vocab_size": 1792, "max_position_embeddings": 512, "tie_word_embeddings": False}
    folder = make_tiny("qwen3", path, **facts | overrides)
    _drop_head(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"]["single"] = [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "<|eos|>", "type_id": 0}},
    ]
    tokenizer["post_processor"]["special_tokens"]["<|eos|>"] = {
        "id": "<|eos|>",
        "ids": [1],
        "tokens": ["<|eos|>"],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{kind}" if number else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False}
    pooling |= {"pooling_mode_lasttoken": True, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def _drop_head(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    bare = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(file).items()
        if name != "lm_head.weight"
    }
    save_file(bare, file, metadata={"format": "pt"})
