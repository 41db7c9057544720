"""Quantised weights and a KV cache in fp8, split: the tokens of one engine."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pair import Pair, assert_split_is_whole
from support.quantised import write_kv_scales
from support.tiny_models import make_tiny

from demo.storing import WAYS, write_quantised
from pdserve.engine.llm import LLM
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.kernels.e4m3 import to_codes
from pdserve.kvtransfer.p2p.staging import Staging
from pdserve.protocol.sampling_params import SamplingParams

NEW = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NEW)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=NEW, seed=11, n=3)
FEW = {
    ("fp8", "fp8"),
    ("fp8-blocks", "auto"),
    ("awq", "fp8"),
    ("ct-int4-fp8", "auto"),
    ("online", "auto"),
}
CASES = [
    pytest.param(way, kv, marks=[] if (way, kv) in FEW else [pytest.mark.slow])
    for way in ("16 bits", *WAYS, "online")
    for kv in ("auto", "fp8")
    if (way, kv) != ("16 bits", "auto")
]


def rows_of(cache: KVCache, blocks: Iterable[int], count: int) -> torch.Tensor:
    """Reads `[heads, layers, planes, count, row_width]` of the one group."""
    [group] = cache.groups
    return torch.cat([group[block] for block in blocks], 3)[:, :, :, :count]


@pytest.mark.parametrize("d_size", [16, 64])
def test_rows_are_rounded_on_their_way_to_fp8(
    d_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P's KV cache is in the model's dtype, D's in fp8, whatever the size of its blocks: D has the
    codes of P's rows."""
    folder = make_tiny("llama3", tmp_path / "plain", seed=3, intermediate_size=160)
    write_kv_scales(folder)
    d = {"kv_cache_dtype": "fp8", "block_size": d_size, "enable_prefix_caching": False}
    filled: dict[int, None] = {}

    def repack(staging: Staging, ring: Any, skip: int, num_rows: int, blocks: Any) -> Any:
        filled.update(dict.fromkeys(blocks))
        return move(staging, ring, skip, num_rows, blocks)

    move = Staging.repack
    monkeypatch.setattr(Staging, "repack", repack)
    pair = Pair(folder, d=d, staging_bytes=1 << 22)
    try:
        prompt = [(7 * n) % 250 for n in range(203)]
        handoff, first = pair.prefill(prompt, GREEDY)
        assert handoff is not None
        pair.finish(pair.decode(handoff, prompt, GREEDY, first))
        ours, theirs = pair.d.engine.kv_cache, pair.p.engine.kv_cache
        assert ours.layout.groups[0].dtype == "fp8_e4m3" != theirs.layout.groups[0].dtype
        rows, codes = (
            rows_of(cache, blocks, 203)
            for cache, blocks in ((theirs, handoff.ticket.block_ids), (ours, filled))
        )
        [scales] = ours.scales
        wanted = rows if scales is None else rows / scales[..., None, None]
        assert torch.equal(to_codes(wanted).view(torch.uint8), codes.view(torch.uint8))
    finally:
        pair.close()


@pytest.mark.sampled(3)
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
