"""The model families that pdserve serves: a row for each architecture of config.json.

Torch-free: the class that computes a family is imported when a model of it is loaded. A new family
is a row here and the file of its class (CONTRIBUTING.md walks through one).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdserve.models.hf_config import HfConfig

Facts = Callable[[HfConfig], dict[str, Any]]
"""Fields of ModelSpec that config.json does not say in one of its own."""


def no_facts(config: HfConfig) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """model_type: transformers' name, in config.json. builder: "module:class" under pdserve.models.
    defaults: what config.json may leave out, where it differs from Llama's. facts: what the code of
    the family does and config.json does not say. activations: values of hidden_act that it
    computes. has_windows: whether its layers take windows; a config.json that asks for one is
    refused where they do not.
    """

    model_type: str
    builder: str = "llama:Llama"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    facts: Facts = no_facts
    activations: tuple[str, ...] = ("silu",)
    has_windows: bool = False


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
        facts=lambda config: {"qkv_bias": True},
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
        facts=lambda config: {"qk_norm": True},
    ),
}
