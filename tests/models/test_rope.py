"""Rope tables against transformers' own, bit for bit."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pdserve.models.facts.rope import RopeSpec, rope_of
from pdserve.models.hf_config import HfConfig, RopeParameters
from pdserve.models.rope import rope_tables

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
}
DEEPSEEK_YARN = {
    **YARN,
    "rope_theta": 1e4,
    "factor": 40.0,
    "beta_fast": 24,
    "beta_slow": 2,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
    "truncate": False,
}
LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"rope_type": "default", "rope_theta": 1e6}, RopeSpec(theta=1e6)),
        (
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
            RopeSpec(theta=1e4, kind="linear", factor=3.0),
        ),
        (
            {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "original_max_position_embeddings": 8192,
                **LLAMA31,
            },
            RopeSpec(theta=5e5, kind="llama3", original_max_position=8192, **LLAMA31),
        ),
        (YARN, rope_of(HfConfig(rope_parameters=RopeParameters(**YARN)))),
        (DEEPSEEK_YARN, rope_of(HfConfig(rope_parameters=RopeParameters(**DEEPSEEK_YARN)))),
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn of DeepSeek"],
)
def test_tables_equal_transformers(theirs: dict[str, Any], ours: RopeSpec) -> None:
    num_positions = 20000
    head_dim = 128
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=num_positions,
        rope_parameters=theirs,
    )
    positions = torch.arange(num_positions)[None]
    expected_cos, expected_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    cos, sin = rope_tables(ours, head_dim, num_positions, torch.device("cpu"))
    assert cos.shape == (num_positions, head_dim // 2) and cos.dtype == torch.float32
    for table, expected in ((cos, expected_cos), (sin, expected_sin)):
        assert torch.equal(torch.cat([table, table], dim=1), expected[0])
