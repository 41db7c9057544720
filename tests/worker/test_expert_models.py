"""Mixtures of experts, attention over latents, and families that attend or rotate otherwise, split:
the tokens of one engine."""

from pathlib import Path

import pytest
from support.pair import Pair, assert_split_is_whole
from support.tiny_models import make_tiny

from pdserve.engine.llm import LLM
from pdserve.protocol.sampling_params import SamplingParams

pytestmark = pytest.mark.lengthy

NEW = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NEW)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=NEW, seed=11, n=3)
LENGTHS = (1, 31, 64, 203)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "family",
    [
        "qwen2-moe",
        "deepseek-v2",
        "gpt-oss",
        *(
            pytest.param(family, marks=pytest.mark.slow)
            for family in ("olmo2", "phi3", "phi4-mini", "glm", "glm4", "gemma2", "gemma3")
        ),
        pytest.param("deepseek-v3", marks=pytest.mark.slow),
        pytest.param("mixtral", marks=pytest.mark.slow),
        pytest.param("qwen3-moe", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("d_block_size", [16, 64])
def test_split_equals_one_engine(family: str, d_block_size: int, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path, seed=3)
    engine = LLM(str(folder), tokenizer=False, num_kv_blocks=128, device="cpu")
    ring = 8 * 128 * engine.engine.layout.token_bytes
    pair = Pair(folder, d={"block_size": d_block_size}, staging_bytes=ring)
    try:
        assert_split_is_whole(pair, engine, (GREEDY, SAMPLED), LENGTHS)
    finally:
        pair.close()
