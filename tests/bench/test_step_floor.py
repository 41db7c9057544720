"""Floors of steps against numbers counted by hand, and against the figures of the targets' page."""

import pytest

from benchmarks.engine.step_floor import (
    PARTS,
    Ceilings,
    Chunk,
    Stored,
    expected_experts,
    prompt_chunks,
    step_floor,
)
from benchmarks.support.places import BENCHMARKS, SHAPES
from benchmarks.targets.table import OfflineRow, read_rows
from pdserve.models.config import ModelSpec, read_spec

LLAMA, QWEN, DEEPSEEK = (
    read_spec(str(SHAPES / name), "dummy")
    for name in ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v2-lite")
)
H200 = Ceilings(4.45e12, 696e12)
BF16 = Stored()
LIGHT = ("inputs", "norm", "rope + KV write", "activation", "sampling")
HEAVY = tuple(part for part in PARTS if part not in LIGHT)  # products and attention


def test_the_floor_of_a_decode_step() -> None:
    """The page's 3.37 ms at batch 1; at 256 x 1k the cache of 256 contexts is read once."""
    assert sum(step_floor(LLAMA, BF16, H200, [Chunk(128, 1)]).values()) == pytest.approx(
        3.37e-3, rel=0.01
    )
    large = step_floor(LLAMA, BF16, H200, [Chunk(1023, 1)] * 256)
    cache = 256 * 1024 * 32 * 2 * 8 * 128 * 2 / 4.45e12
    assert large["attention"] == pytest.approx(cache, rel=0.01)
    assert large["head"] == pytest.approx(2 * 256 * 128256 * 4096 / 696e12)  # bound by arithmetic
    small = step_floor(LLAMA, BF16, H200, [Chunk(1023, 1)] * 64)
    # bound by its weights
    assert small["head"] == pytest.approx(128256 * 4096 * 2 / 4.45e12, rel=0.02)
    assert set(large) == set(PARTS)


def test_the_floor_of_a_mixtures_decode_step() -> None:
    """Counts the page's 1.37 ms at batch 1 by hand. Each of 48 layers reads 8 of 128 experts of
    3 x 2,048 x 768 numbers. It also reads 2,048 x 5,120 + 4,096 x 2,048 for attention and
    128 x 2,048 for the router. The head has 151,936 x 2,048."""
    one = step_floor(QWEN, BF16, H200, [Chunk(255, 1)])
    experts, attention, router, head = 37_748_736, 18_874_368, 262_144, 311_164_928
    numbers = 48 * (experts + attention + router) + head
    cache = 48 * 2 * 256 * 4 * 128
    assert sum(one.values()) == pytest.approx(2 * (numbers + cache) / 4.45e12, rel=0.002)
    assert sum(one.values()) == pytest.approx(1.37e-3, rel=0.005)
    assert one["experts"] == pytest.approx(48 * 2 * experts / 4.45e12, rel=0.001)
    assert one["gate-up"] == one["activation"] == one["down"] == one["latents"] == 0
    many = step_floor(QWEN, BF16, H200, [Chunk(1023, 1)] * 256)
    # all 128 are read, and the rows
    read = 48 * 2 * (128 * 3 * 2048 * 768 + 2 * 256 * 2048)
    assert many["experts"] == pytest.approx(read / 4.45e12, rel=1e-4)


def test_the_experts_that_rows_are_expected_to_choose() -> None:
    assert expected_experts(1, 128, 8) == pytest.approx(8)
    assert expected_experts(2, 4, 2) == pytest.approx(3)  # 2 + 2, less the one in common
    assert expected_experts(3, 4, 4) == 4
    assert 127.9 < expected_experts(128, 128, 8) < 128


def test_the_floor_of_a_decode_step_over_latents() -> None:
    """Counts 27 layers by hand: queries 2,048 x 3,072, latents 2,048 x 576, heads 512 x 4,096,
    o 2,048 x 2,048. The first layer has an MLP of 10,944. The other 26 have 6 experts of 1,408 and
    two shared ones."""
    one = step_floor(DEEPSEEK, BF16, H200, [Chunk(255, 1)])
    attention = 6_291_456 + 1_179_648 + 2_097_152 + 4_194_304
    dense, expert, router, head = 67_239_936, 8_650_752, 131_072, 209_715_200
    numbers = 27 * attention + dense + 26 * (8 * expert + router) + head
    cache = 27 * 256 * 576
    assert sum(one.values()) == pytest.approx(2 * (numbers + cache) / 4.45e12, rel=0.005)
    assert sum(one.values()) == pytest.approx(1.105e-3, rel=0.002)
    assert one["experts"] == pytest.approx(26 * 8 * expert * 2 / 4.45e12, rel=0.001)
    mlp = one["gate-up"] + one["down"]
    assert mlp == pytest.approx(dense * 2 / 4.45e12, rel=0.002)
    assert one["latents"] == pytest.approx(27 * 2_097_152 * 2 / 4.45e12, rel=0.02)
    many = step_floor(DEEPSEEK, BF16, H200, [Chunk(1023, 1)] * 256)
    # a row of 512 + 64 for each token, and of each head a query of as many and an output of 512
    read = 27 * 256 * (1024 * 576 + 16 * 1088) * 2
    assert many["attention"] == pytest.approx(read / 4.45e12)
    slow = step_floor(DEEPSEEK, BF16, Ceilings(1e30, 1e12), [Chunk(1023, 1)] * 256)
    assert slow["attention"] == pytest.approx(27 * 256 * 1024 * 2 * 16 * 1088 / 1e12)
    assert slow["latents"] == pytest.approx(27 * 256 * 2 * 2_097_152 / 1e12)


def test_prompts_have_keys_and_values_of_their_own() -> None:
    """2 x 16 x (128 + 64 + 128) operations a pair, and all latents expanded. A few rows after a
    long context are cheaper in the latent's space."""
    arithmetic = Ceilings(1e30, 1e12)
    prompt = step_floor(DEEPSEEK, BF16, arithmetic, [Chunk(0, 8192)])
    pairs = 8192 * 8193 / 2
    assert prompt["attention"] == pytest.approx(27 * 2 * 16 * 320 * pairs / 1e12)
    assert prompt["latents"] == pytest.approx(27 * 2 * 8192 * 2_097_152 / 1e12)
    experts = 26 * 6 * 8192 * 8 * 2048 * 1408
    assert prompt["experts"] == pytest.approx(experts / 1e12)
    second = step_floor(DEEPSEEK, BF16, arithmetic, [Chunk(8192, 8192)])
    assert second["latents"] == pytest.approx(2 * prompt["latents"])
    few = step_floor(DEEPSEEK, BF16, arithmetic, [Chunk(8190, 4)])
    assert few["latents"] == pytest.approx(27 * 2 * 4 * 2_097_152 / 1e12)


def test_queries_with_latents_of_their_own() -> None:
    assert DEEPSEEK.latent is not None
    latent = DEEPSEEK.latent.model_copy(update={"q_rank": 1536})
    spec = DEEPSEEK.model_copy(update={"latent": latent})
    numbers = 2048 * (1536 + 576) + 1536 * 16 * 192
    qkv = step_floor(spec, BF16, H200, [Chunk(255, 1)])["qkv"]
    assert qkv == pytest.approx(27 * numbers * 2 / 4.45e12, rel=0.005)


@pytest.mark.parametrize(
    ("name", "spec"), [("targets", LLAMA), ("qwen3-30b-a3b", QWEN), ("deepseek-v2-lite", DEEPSEEK)]
)
def test_the_floors_of_the_tables_of_targets(name: str, spec: ModelSpec) -> None:
    """The floors of the tables count only products and attention."""
    rows = read_rows(BENCHMARKS / "targets" / f"{name}.toml")
    floors = {row.id: row.floor for row in rows if isinstance(row, OfflineRow) and row.floor}
    [decode] = [floor for id, floor in floors.items() if id.endswith("decode-1")]
    [prefill] = [floor for id, floor in floors.items() if id.endswith("prefill-8k")]
    for floor, chunk in ((decode, Chunk(255, 1)), (prefill, Chunk(0, 8192))):
        parts = step_floor(spec, BF16, H200, [chunk])
        assert sum(parts[part] for part in HEAVY) * 1e3 == pytest.approx(floor, rel=0.01)


@pytest.mark.parametrize(("num_tokens", "milliseconds"), [(2048, 43), (8192, 190), (16000, 417)])
def test_the_floor_of_a_prompt(num_tokens: int, milliseconds: float) -> None:
    """The page counts products and attention alone; ours adds what norms and copies must move."""
    floors = [step_floor(LLAMA, BF16, H200, [chunk]) for chunk in prompt_chunks(num_tokens, 8192)]
    heavy = sum(floor[part] for floor in floors for part in HEAVY)
    assert heavy * 1e3 == pytest.approx(milliseconds, rel=0.05)
    assert heavy < sum(sum(floor.values()) for floor in floors) < 1.15 * heavy


def test_a_prompts_chunks() -> None:
    assert prompt_chunks(16000, 8192) == [Chunk(0, 8192, False), Chunk(8192, 7808, True)]
    assert prompt_chunks(8192, 8192) == [Chunk(0, 8192, True)]
    quarter, half = (
        step_floor(LLAMA, BF16, Ceilings(1e30, 1e12), [c])["attention"]
        for c in (Chunk(0, 64), Chunk(64, 64))
    )
    whole = step_floor(LLAMA, BF16, Ceilings(1e30, 1e12), [Chunk(0, 128)])["attention"]
    assert quarter + half == pytest.approx(whole)
