"""On CPU a token's logits depend, to the last bit, only on its prefix.

They do not depend on the batch, the chunks, the cache, a preemption, a fork, the block size, or on
what else the engine did before.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.harness import Driver, make_engine
from support.quantised import write_kv_scales
from support.tiny_models import make_tiny

from demo.storing import WAYS as STORED
from demo.storing import write_quantised
from pdserve.engine.engine import Engine
from pdserve.engine.execution import model_runner
from pdserve.engine.sampling.row_staging import RowStaging
from pdserve.engine.sampling.sample_row import SampleRow
from pdserve.engine.sampling.sampled_tokens import SampledTokens
from pdserve.engine.sampling.sampler import Sampler
from pdserve.engine.sampling.staged_rows import StagedRows
from pdserve.protocol.commands import Start
from pdserve.protocol.sampling_params import SamplingParams

pytestmark = pytest.mark.lengthy

Logits = dict[tuple[int, ...], torch.Tensor]  # prefix (prompt and output) -> the logits behind it


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Logits:
    """Everything that is sampled from; the same prefix must come with the same bits."""
    logits_of: Logits = {}

    rows_of: dict[int, list[tuple[int, ...]]] = {}  # what the message is about
    stage = RowStaging.stage
    sample = Sampler.sample

    def note(staging: RowStaging, rows: list[SampleRow], positions: list[int]) -> StagedRows:
        staged = stage(staging, rows, positions)
        rows_of[id(staged)] = [tuple(row.token_ids) for row in rows]
        return staged

    def spy(sampler: Sampler, logits: torch.Tensor, staged: StagedRows) -> SampledTokens:
        for prefix, values in zip(rows_of.pop(id(staged)), logits, strict=True):
            before = logits_of.setdefault(prefix, values.clone())
            assert torch.equal(values, before), (
                f"another {(values - before).abs().max():.1e} after {len(prefix)}"
            )
        return sample(sampler, logits, staged)

    monkeypatch.setattr(RowStaging, "stage", note)
    monkeypatch.setattr(Sampler, "sample", spy)
    return logits_of


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(250) for _ in range(length)]


PROMPTS = [prompt_of(length, length) for length in (1, 15, 16, 17, 130, 200, 40, 129)]
NEW = 12
MORE = ("mixtral", "qwen3-moe", "deepseek-v2")
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, seed=0)


def run(
    engine: Engine,
    prompts: list[list[int]] = PROMPTS,
    sampling: SamplingParams = GREEDY,
    **more: Any,
) -> Driver:
    driver = Driver(engine)
    for prompt in prompts:
        driver.add(prompt, sampling, **more)
    driver.run(check=False)
    driver.assert_empty()
    return driver


def run_alone(folder: Path, seen: Logits, **config: Any) -> int:
    """The reference: each prompt by itself, whole, in a fresh engine. Returns how many logits are
    known then."""
    engine = make_engine(folder, enable_prefix_caching=False, **config)
    for prompt in PROMPTS:
        run(engine, [prompt])
    assert len(seen) == len(PROMPTS) * NEW
    return len(seen)


WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "chunks of 17": {"max_num_batched_tokens": 17},
    "chunks of 100": {"max_num_batched_tokens": 100},
    "block size 32": {"block_size": 32},
    "block size 64": {"block_size": 64, "max_num_batched_tokens": 50},
    "block size 128": {"block_size": 128},
    "preempted": {"num_kv_blocks": 18, "max_num_batched_tokens": 64},
}


def check_way(way: str, folder: Path, seen: Logits, **config: Any) -> None:
    known = run_alone(folder, seen, **config)
    engine = make_engine(folder, **WAYS[way], **config)
    run(engine)
    run(engine)  # now with cached prefixes
    assert len(seen) == known, "the tokens differ"
    assert engine.scheduler.prefix_hits > 0 or way == "preempted"  # there, little stays cached
    assert (engine.scheduler.num_preemptions > 0) == (way == "preempted")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_the_way_does_not_matter(way: str, tiny_llama: Path, seen: Logits) -> None:
    check_way(way, tiny_llama, seen)


@pytest.mark.parametrize("way", ["chunks of 17", "block size 64", "preempted"])
def test_rows_in_fp8(way: str, tmp_path: Path, seen: Logits) -> None:
    """Fresh rows are rounded as those of the cache are."""
    folder = make_tiny("llama3", tmp_path)
    write_kv_scales(folder)
    check_way(way, folder, seen, kv_cache_dtype="fp8")


@pytest.mark.parametrize("stored", ["fp8", "fp8-blocks", "awq", "ct-int4-fp8"])
def test_quantised_weights(stored: str, tmp_path: Path, seen: Logits) -> None:
    """Activations are scaled by row."""
    plain = make_tiny("llama3", tmp_path / "plain", intermediate_size=160)
    folder = write_quantised(plain, tmp_path / "quantised", STORED[stored])
    check_way("chunks of 17", folder, seen)


ODD_SHAPES: dict[str, dict[str, Any]] = {
    "narrow": {
        "hidden_size": 60,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 12,
    },
    "odd widths": {"intermediate_size": 101, "vocab_size": 251, "hidden_size": 52, "head_dim": 26},
    "wide heads": {
        "head_dim": 80,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "hidden_size": 90,
    },
    "many heads": {
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "hidden_size": 120,
        "head_dim": 10,
    },
}


@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_odd_shapes(shape: str, tmp_path: Path, seen: Logits) -> None:
    folder = make_tiny("qwen3", tmp_path, num_hidden_layers=2, **ODD_SHAPES[shape])
    known = run_alone(folder, seen)
    for way in ("batched", "chunks of 17", "preempted", "block size 64"):
        run(make_engine(folder, **WAYS[way]))
    assert len(seen) == known


@pytest.mark.parametrize(
    "family",
    ["qwen2-moe", "deepseek-v3", *(pytest.param(f, marks=pytest.mark.slow) for f in MORE)],
)
def test_experts_and_latents_keep_rows_apart(family: str, tmp_path: Path, seen: Logits) -> None:
    """The output of an expert for a row does not depend on the other rows that it gets."""
    folder = make_tiny(family, tmp_path, num_hidden_layers=2)
    known = run_alone(folder, seen)
    for way in ("batched", "chunks of 17", "preempted"):
        run(make_engine(folder, **WAYS[way]))
    assert len(seen) == known


def test_forks_and_their_copies(tiny_llama: Path, seen: Logits) -> None:
    sampling = SamplingParams(temperature=1.0, n=4, seed=9, max_tokens=12)
    run(make_engine(tiny_llama, max_num_batched_tokens=64), sampling=sampling)
    known = len(seen)
    for choice in range(4):  # each choice by itself: same draws, same logits
        run(make_engine(tiny_llama), sampling=sampling, starts=(Start(choice),))
    assert len(seen) == known


def test_forced_tokens(tiny_llama: Path, seen: Logits) -> None:
    """A resumed request sees the logits it would have seen."""
    driver = run(make_engine(tiny_llama), PROMPTS[5:6])
    [tokens] = driver.tokens.values()
    for count in (1, 7, 11):
        run(make_engine(tiny_llama), PROMPTS[5:6], starts=(Start(0, tuple(tokens[:count])),))
    assert len(seen) == NEW


def test_a_large_batch(tiny_llama: Path, seen: Logits) -> None:
    """Row counts far from those of a single request: matrix products may choose another way for
    them."""
    prompts = [prompt_of(3 + i % 50, i) for i in range(100)]
    one_by_one = make_engine(tiny_llama, enable_prefix_caching=False)
    sampling = SamplingParams(temperature=0, max_tokens=4, seed=0)
    for prompt in prompts[::9]:
        run(one_by_one, [prompt], sampling)
    known = set(seen)
    run(make_engine(tiny_llama, num_kv_blocks=512), prompts, sampling)
    assert known < set(seen)


def test_prompt_logprobs_too(tiny_llama: Path) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=2, seed=0, prompt_logprobs=1)
    results = []
    for way in ("batched", "chunks of 17", "preempted", "block size 64"):
        driver = run(make_engine(tiny_llama, **WAYS[way]), sampling=sampling)
        scored = [
            [entry for event in events for entry in event.logprobs or ()]
            for events in driver.scored.values()
        ]
        results.append(sorted(scored, key=len))
    assert all(result == results[0] for result in results) and len(results[0]) == len(PROMPTS)


def test_a_spy_that_sees_a_difference_fails(
    tiny_llama: Path, seen: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without padded rows the matrix products' bits depend on how many rows there are: the check
    must notice."""
    run_alone(tiny_llama, seen)
    monkeypatch.setattr(model_runner, "ROW_MULTIPLE", 1)
    with pytest.raises(AssertionError, match="another"):
        run(make_engine(tiny_llama))
        run(make_engine(tiny_llama, max_num_batched_tokens=17))
