"""Rope tables against transformers' own, bit for bit."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

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
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1 + i / 40 for i in range(48)],
    "long_factor": [1 + i for i in range(48)],
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
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


@pytest.mark.parametrize("length", [4096, 4097])
def test_long_tables_equal_transformers(length: int) -> None:
    """The module of transformers chooses by the longest position it is given, pdserve by the
    engine's."""
    facts: dict[str, Any] = {
        "hidden_size": 256,
        "num_attention_heads": 2,
        "max_position_embeddings": 131072,
    }
    config = Phi3Config(**facts, pad_token_id=0, rope_parameters=dict(LONG))
    theirs = Phi3RotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    ours = rope_of(HfConfig(**facts, rope_parameters=RopeParameters(**LONG)))
    assert ours.long is not None and ours.long.is_long and ours.rotated == 96
    tables = rope_tables(ours.for_length(length), 128, length, torch.device("cpu"))
    for table, expected, unrotated in zip(tables, theirs, (1.0, 0.0), strict=True):
        assert torch.equal(torch.cat([table[:, :48]] * 2, dim=1), expected[0])
        assert table.shape == (length, 64) and (table[:, 48:] == unrotated).all()


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("rotated", [None, 4, 12])
def test_columns_are_held_so_that_halves_are_pairs(
    is_interleaved: bool, rotated: int | None
) -> None:
    rope = RopeSpec(theta=1e4, rotated=rotated, is_interleaved=is_interleaved)
    order = rope.head_order(16) or tuple(range(16))
    width = rotated or 16
    step = 1 if is_interleaved else width // 2
    assert sorted(order) == list(range(16))
    for first, second in zip(order[: width // 2], order[8 : 8 + width // 2], strict=True):
        assert second == first + step < width
    assert rope.head_order(16) == () or is_interleaved or rotated


@pytest.mark.parametrize("name", ["short_factor", "long_factor"])
def test_long_factors_must_be_there_for_each_pair(name: str) -> None:
    facts = RopeParameters(**{**LONG, name: [1.0] * 47})
    with pytest.raises(ValueError, match=f"{name} must be 48 numbers above 0"):
        rope_of(HfConfig(hidden_size=256, num_attention_heads=2, rope_parameters=facts))
