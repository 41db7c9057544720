"""Tests read_spec: facts of real configurations in old and new form, refusals by name, and the
fingerprint."""

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import FAMILIES, make_tiny

from pdserve.models import checkpoint, families
from pdserve.models.config import ModelSpec, read_spec
from pdserve.models.facts.rope import RopeSpec
from pdserve.models.families import Family
from pdserve.models.hf_config import HfConfig, read_hf_config
from pdserve.models.registry import builder_of

LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
QWEN2_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 21,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
DEEPSEEK_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts_per_tok": 6,
    "n_routed_experts": 64,
    "moe_intermediate_size": 1408,
    "dtype": "bfloat16",
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": None,
    "rope_theta": 1e6,
    "dtype": "bfloat16",
}


# fields that transformers' configurations of other families do not have
OF_SOME = {
    "qkv_bias",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "n_shared_experts",
    "first_k_dense_replace",
    "moe_layer_freq",
    "scoring_func",
    "topk_method",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_interleave",
    "num_nextn_predict_layers",
    "sliding_window_pattern",
    "max_window_layers",
    "swiglu_alpha",
    "swiglu_limit",
    "use_bidirectional_attention",
}


def spec_of(
    folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None
) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_spec(str(folder), load_format="dummy")


def test_llama_31_as_published(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LLAMA_31_8B)
    assert (spec.architecture, spec.family, spec.dtype) == ("LlamaForCausalLM", "llama", "bfloat16")
    assert (spec.num_layers, spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (
        32,
        4096,
        14336,
        128256,
    )
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (32, 8, 128)
    assert (spec.max_position, spec.rms_eps, spec.tie_embeddings) == (131072, 1e-5, False)
    assert spec.rope == RopeSpec(
        theta=500000.0,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )
    assert not (spec.qkv_bias or spec.o_bias or spec.mlp_bias or spec.qk_norm)
    assert spec.eos_token_ids == (128001, 128008, 128009)


def test_qwen2_as_published(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, QWEN2_05B, {"eos_token_id": [151645, 151643]})
    assert (spec.qkv_bias, spec.o_bias, spec.qk_norm, spec.tie_embeddings) == (
        True,
        False,
        False,
        True,
    )
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (14, 2, 64)
    assert spec.rope == RopeSpec(theta=1000000.0)
    assert spec.eos_token_ids == (151645, 151643)


def test_qwen3_head_dim_and_norms(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path,
        {
            **QWEN2_05B,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "head_dim": 128,
        },
    )
    assert (spec.head_dim, spec.qk_norm, spec.qkv_bias) == (128, True, False)


@pytest.mark.parametrize(
    "scaling", [{"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}]
)
def test_old_and_new_rope_keys_mean_the_same(scaling: dict[str, Any], tmp_path: Path) -> None:
    old = spec_of(tmp_path, {**LLAMA_31_8B, "rope_theta": 5e4, "rope_scaling": scaling})
    new = {key: value for key, value in LLAMA_31_8B.items() if not key.startswith("rope_")}
    new["rope_parameters"] = {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0}
    assert old.rope == spec_of(tmp_path, new).rope == RopeSpec(theta=5e4, kind="linear", factor=4.0)


def test_a_length_above_the_models_is_refused_with_its_number(tmp_path: Path) -> None:
    plain = spec_of(tmp_path, LLAMA_31_8B)
    assert (plain.max_len(None), plain.max_len(131072), plain.max_len(7)) == (131072, 131072, 7)
    with pytest.raises(
        ValueError, match=r"engine.max_model_len \(131073\) must not .* 131072 \(max_posit"
    ) as own:
        plain.max_len(131073)
    assert "stretch" not in str(own.value), "llama3's length is the stretched one"
    linear = {
        **LLAMA_31_8B,
        "max_position_embeddings": 4096,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    with pytest.raises(
        ValueError, match=r"4096 .* scaling by 4 is not in it yet, write the stretched length"
    ):
        spec_of(tmp_path, linear).max_len(16384)


def test_defaults_are_the_family_s(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, {"model_type": "llama"})
    assert (spec.architecture, spec.num_kv_heads, spec.head_dim) == ("LlamaForCausalLM", 32, 128)
    assert (spec.dtype, spec.rope) == ("float32", RopeSpec(theta=10000.0))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_is_read(family: str, tmp_path: Path) -> None:
    spec = read_spec(str(make_tiny(family, tmp_path, eos_token_id=[2, 5])))
    assert (spec.num_layers, spec.hidden_size, spec.dtype, spec.eos_token_ids) == (
        FAMILIES[family][1].get("num_hidden_layers", 3),
        64,
        "float32",
        (2, 5),
    )
    kinds = {"llama3": "llama3", "deepseek-v2": "yarn", "phi4-mini": "longrope"}
    kinds["gpt-oss"] = "yarn"
    assert spec.rope.kind == kinds.get(family, "default")


@pytest.mark.parametrize("row", families.FAMILIES.values(), ids=lambda row: row.model_type)
def test_configurations_mean_what_transformers_says(row: Family) -> None:
    """Every field pdserve reads, for random subsets of what a config.json may hold."""
    from transformers import AutoConfig

    family = row.model_type
    rng = random.Random(family)
    whole = {
        **QWEN2_05B,
        **LLAMA_31_8B,
        "head_dim": 96,
        "attention_bias": True,
        "sliding_window": 77,
        "use_sliding_window": True,
        "max_window_layers": 32,
        "dtype": "float16",
        "qkv_bias": False,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 99,
        "shared_expert_intermediate_size": 98,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "n_shared_experts": 3,
        "first_k_dense_replace": 2,
        "moe_layer_freq": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "q_lora_rank": 7,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 9,
        "qk_rope_head_dim": 10,
        "v_head_dim": 11,
    }
    del whole["architectures"], whole["model_type"]
    if family == "phi3":
        del whole["rope_scaling"]  # llama3's, which transformers refuses
    for _ in range(40):
        raw = {key: whole[key] for key in rng.sample(sorted(whole), rng.randrange(len(whole)))}
        raw |= {key: None for key in ("sliding_window", "eos_token_id") if rng.random() < 0.3}
        ours = read_hf_config(raw, family, row.defaults)
        theirs = AutoConfig.for_model(family, **deepcopy(raw))  # it writes into what it is given
        for name in HfConfig.model_fields:
            want: Any = getattr(theirs, name, None)
            got = getattr(ours, name)
            if name in OF_SOME and not hasattr(theirs, name):
                continue
            if name in ("rope_parameters", "local_rope_parameters"):
                if family == "gemma3_text":
                    kind = "full_attention" if name == "rope_parameters" else "sliding_attention"
                    want = theirs.rope_parameters[kind]
                got = got and got.model_dump(exclude_none=True)
                want = want and {"partial_rotary_factor": 1.0, "truncate": True, **want}
            elif name == "hidden_act" and family.startswith("gemma"):
                want = raw.get("hidden_act", theirs.hidden_activation)
            elif name == "use_bidirectional_attention":
                got, want = bool(got), bool(want)
            elif name == "dtype":
                want = want and str(want).removeprefix("torch.")
            elif name == "num_key_value_heads":
                got = ours.num_kv_heads
            elif name in ("attention_bias", "mlp_bias"):
                got = got if hasattr(theirs, name) else False
                want = bool(want)
            elif name == "head_dim" and family.startswith("deepseek"):
                continue  # nobody reads it
            elif name == "head_dim":
                got = got or ours.hidden_size // ours.num_attention_heads
                want = want or theirs.hidden_size // (theirs.num_attention_heads)
            elif name == "mlp_only_layers":
                got = got or []
            elif name == "sliding_window":
                want = want or None  # Qwen2-MoE says 0
            elif name in ("layer_types", "use_sliding_window"):
                continue  # filled in by transformers from the window, which is compared
            assert got == want, f"{name} of {raw}"


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen2_moe"])
@pytest.mark.parametrize("uses", [True, False])
def test_windows_are_on_the_layers_that_transformers_gives_them(family: str, uses: bool) -> None:
    from transformers import AutoConfig

    asked = {"use_sliding_window": uses, "sliding_window": 99, "max_window_layers": 5}
    raw = {**QWEN2_05B, **asked, "num_hidden_layers": 8}
    del raw["architectures"], raw["model_type"]
    [row] = [row for row in families.FAMILIES.values() if row.model_type == family]
    windows = row.facts(read_hf_config(raw, family, row.defaults))["windows"]
    kinds = AutoConfig.for_model(family, **raw).layer_types
    assert list(windows or [None] * 8) == [99 if "sliding" in kind else None for kind in kinds]
    assert any(windows) == uses


def test_mistral_has_its_window_on_all_layers(tmp_path: Path) -> None:
    unsaid = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    for config, window in ((MISTRAL, None), ({**MISTRAL, "sliding_window": 9}, 9), (unsaid, 4096)):
        assert spec_of(tmp_path, config).longest_window == window


@pytest.mark.parametrize("architecture", families.FAMILIES)
def test_every_known_architecture_has_a_builder(architecture: str, tmp_path: Path) -> None:
    config = {**LLAMA_31_8B, "architectures": [architecture], "sliding_window": None}
    config["num_experts_per_tok"] = 2
    row = families.FAMILIES[architecture]
    config["hidden_act"] = row.activations[0]
    if row.is_nested:
        config = {"architectures": [architecture], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert callable(builder_of(read_spec(str(tmp_path), "dummy")))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {**LLAMA_31_8B, "architectures": ["GPT2LMHeadModel"]},
            r"'GPT2LMHeadModel' is not known; known: Deepseek.*Qwen3",
        ),
        ({"model_type": "bert"}, "'bert' is not known"),
        ({}, "architecture None is not known"),
        ({**LLAMA_31_8B, "sliding_window": 4096}, "sliding_window=4096 is not supported yet"),
        (
            {**LLAMA_31_8B, "layer_types": ["full_attention", "sliding_attention"] * 16},
            "only full_attention is supported",
        ),
        (
            {**LLAMA_31_8B, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "rope_type='dynamic' is not supported",
        ),
        ({**DEEPSEEK_V2, "norm_topk_prob": True}, "norm_topk_prob=true is not supported"),
        ({**DEEPSEEK_V2, "topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported"),
        ({**DEEPSEEK_V2, "scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not supported"),
        ({**DEEPSEEK_V2, "moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        ({**DEEPSEEK_V2, "num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({**DEEPSEEK_V2, "mlp_bias": True}, "mlp_bias=true is not supported"),
        ({**DEEPSEEK_V2, "qk_rope_head_dim": 7}, "qk_rope_head_dim=7 is odd"),
        (
            {**DEEPSEEK_V2, "q_lora_rank": None, "attention_bias": True},
            "attention_bias=true with q_lora_rank null",
        ),
        ({**DEEPSEEK_V2, "topk_method": "group_limited_greedy"}, "n_group=None and topk_group="),
        (
            {**DEEPSEEK_V2, "architectures": ["DeepseekV3ForCausalLM"], "n_group": 5},
            "n_group=5 must divide the 64 experts",
        ),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step=0 must be"),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
            r"'mxfp4' is not supported .*: load the model with .*dequantize=True",
        ),
        (
            {
                "model_type": "gpt_oss",
                "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"},
            },
            "experts with biases are computed in 16 bits alone: use the model's 16-bit weights",
        ),
        ({"model_type": "gpt_oss", "swiglu_limit": 5.0}, "swiglu_limit=5.0 is not supported"),
        ({"model_type": "gpt_oss", "swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported"),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "use_bidirectional_attention=true is not supported",
        ),
        (
            {
                "model_type": "gemma3_text",
                "sliding_window": None,
                "layer_types": ["sliding_attention"] * 26,
            },
            "sliding_window=null with layers of sliding_attention",
        ),
        (
            {"model_type": "glm4", "partial_rotary_factor": 0.01},
            "partial_rotary_factor=0.01 would rotate 1 of a head's 128 columns",
        ),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "must be from 1 to the 8 experts"),
        (
            {**LLAMA_31_8B, "rope_scaling": {"type": "banana", "factor": 4.0}},
            "rope_type='banana' is not supported",
        ),
        (
            {**LLAMA_31_8B, "rope_scaling": {"rope_type": "linear"}},
            "not a valid linear rope: factor is missing",
        ),
        (
            {**LLAMA_31_8B, "partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5 is not supported",
        ),
        ({**LLAMA_31_8B, "hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        (
            {**LLAMA_31_8B, "quantization_config": {"quant_method": "awq", "bits": 4}},
            "quantization_config",
        ),
        ({**LLAMA_31_8B, "torch_dtype": "float64"}, "dtype='float64' is not supported"),
        (
            {**LLAMA_31_8B, "num_key_value_heads": 5},
            "num_attention_heads=32 is not a multiple of num_key_value_heads=5",
        ),
        (
            {**LLAMA_31_8B, "architectures": ["MyLM"], "auto_map": {"AutoModel": "my.MyLM"}},
            r"'MyLM' is not known, and the code that its repository brings \(auto_map\) is not run",
        ),
        ({**LLAMA_31_8B, "head_dim": 127}, "(?s)even rotary dimension|head_dim=127 is odd"),
        (
            {**LLAMA_31_8B, "hidden_size": "wide"},
            "(?s)not a valid llama configuration.*hidden_size",
        ),
    ],
)
def test_refused_by_name(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        spec_of(tmp_path, config)


def test_no_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        read_spec(str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'no-such/model' is not a local folder"):
        read_spec("no-such/model")
    with pytest.raises(ValueError, match=r"'./no/such/folder' is not a local folder, nor"):
        read_spec("./no/such/folder")


def test_fingerprint_follows_content_and_not_files(tmp_path: Path) -> None:
    first = read_spec(str(make_tiny("qwen3", tmp_path / "a", seed=1))).fingerprint()
    resharded = read_spec(
        str(make_tiny("qwen3", tmp_path / "b", seed=1, max_shard_size="50KB"))
    ).fingerprint()
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 2
    assert first == resharded and len(first) == 32
    assert read_spec(str(make_tiny("qwen3", tmp_path / "c", seed=2))).fingerprint() != first
    assert (
        read_spec(str(make_tiny("qwen3", tmp_path / "d", seed=1, rms_norm_eps=1e-5))).fingerprint()
        != first
    )


def test_fingerprint_sees_one_changed_small_tensor(tmp_path: Path) -> None:
    folder = make_tiny("llama2", tmp_path)
    first = read_spec(str(folder)).fingerprint()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][50, 30] += 1
    save_file(tensors, folder / "model.safetensors")
    assert read_spec(str(folder)).fingerprint() != first


@pytest.mark.parametrize("row", [0, 1023])
@pytest.mark.parametrize("budget", [checkpoint.MAX_READ_BYTES, 1 << 14])
def test_fingerprint_samples_both_ends_of_a_large_tensor(
    row: int, budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tensors share what is read of all."""
    monkeypatch.setattr(checkpoint, "MAX_READ_BYTES", budget)
    folder = make_tiny("llama2", tmp_path, vocab_size=1024)  # an embedding of 256 KiB
    first = read_spec(str(folder)).fingerprint()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][row] += torch.ones(64)
    save_file(tensors, folder / "model.safetensors")
    assert read_spec(str(folder)).fingerprint() != first


def test_fingerprint_of_dummy_weights_is_the_seed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
    prints = [read_spec(str(tmp_path), "dummy", seed).fingerprint() for seed in (0, 0, 1)]
    assert prints[0] == prints[1] != prints[2]


def test_experts_with_biases_are_not_quantised_online(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    with pytest.raises(ValueError, match=r"model\.quantization='fp8' is not supported for this"):
        read_spec(str(tmp_path), "dummy", quantization="fp8")


def test_the_length_of_requests_chooses_the_rope(tmp_path: Path) -> None:
    """Engines that rotate in two ways do not take each other's rows."""
    spec = read_spec(str(make_tiny("phi4-mini", tmp_path)))
    short, long = spec.for_length(4), spec.for_length(5)
    assert short.rope.long and not short.rope.long.is_long
    assert long.fingerprint() == spec.fingerprint() != short.fingerprint()
