"""Quantised weights and a KV cache in fp8, split: the tokens of one engine."""

from pathlib import Path
from typing import Any

import pytest
from support.pair import Pair, assert_split_is_whole
from support.quantised import write_kv_scales
from support.tiny_models import make_tiny

from demo.storing import WAYS, write_quantised
from pdserve.engine.llm import LLM
from pdserve.protocol.sampling_params import SamplingParams

NEW = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NEW)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=NEW, seed=11, n=3)
FEW = {("fp8", "fp8"), ("fp8-blocks", "auto"), ("awq", "fp8"), ("online", "auto")}
CASES = [
    pytest.param(way, kv, marks=[] if (way, kv) in FEW else [pytest.mark.slow])
    for way in ("16 bits", *WAYS, "online")
    for kv in ("auto", "fp8")
    if (way, kv) != ("16 bits", "auto")
]


@pytest.mark.parametrize(("way", "kv"), CASES)
def test_split_equals_one_engine(way: str, kv: str, tmp_path: Path) -> None:
    folder = make_tiny("llama3", tmp_path / "plain", seed=3, intermediate_size=160)
    if way in WAYS:
        folder = write_quantised(folder, tmp_path / "quantised", WAYS[way])
    if kv == "fp8":
        write_kv_scales(folder)
    common: dict[str, Any] = {
        "kv_cache_dtype": kv,
        "quantization": "fp8" if way == "online" else None,
    }
    engine = LLM(
        str(folder),
        tokenizer=False,
        num_kv_blocks=128,
        device="cpu",
        **common,
    )
    ring = 8 * 128 * engine.engine.layout.token_bytes
    pair = Pair(
        folder,
        p=common,
        d={**common, "block_size": 64},
        staging_bytes=ring,
    )
    try:
        assert_split_is_whole(pair, engine, (GREEDY, SAMPLED), (1, 31, 203))
    finally:
        pair.close()
