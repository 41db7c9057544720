"""Quantised weights and a KV cache in fp8, split: the tokens of one engine."""

from pathlib import Path
from typing import Any

import pytest
from support.pair import Pair, expected, prompt_of
from support.quantised import write_kv_scales
from support.tiny_models import make_tiny

from demo.storing import WAYS, write_quantised
from pdserve.engine.llm import LLM
from pdserve.protocol.events import Arrived
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
        for sampling in (GREEDY, SAMPLED):
            for length in (1, 31, 203):
                prompt = prompt_of(length, seed=sampling.n)
                assert pair.split(prompt, sampling) == expected(engine, prompt, sampling)
        arrived = [event for event in pair.d.events if isinstance(event, Arrived)]
        assert {event.source for event in arrived} == {"p2p"}
        pair.assert_empty()
    finally:
        pair.close()
