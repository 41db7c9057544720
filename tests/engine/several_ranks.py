"""Tests of engines with several ranks share this: a workload of all that a sampler does, and
whether two engines give the same answers."""

import random
from typing import Any

import pytest
import torch
from support.tiny_models import FAMILIES

from pdserve.engine.llm import LLM, RequestOutput, SamplingParams

TOLERANCE = 1e-4
NEW = 24
# 10 blocks of 16 tokens: preemptions and copies of blocks
TIGHT: dict[str, Any] = {"num_kv_blocks": 12, "max_num_batched_tokens": 48, "max_num_seqs": 6}
ROOMY: dict[str, Any] = {"num_kv_blocks": 80}


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Everything that a sampler does, and prompts of several lengths, two with a beginning in
    common."""
    chance = random.Random(5)
    common = [chance.randrange(250) for _ in range(32)]
    prompts = [[chance.randrange(250) for _ in range(length)] for length in (5, 70, 16, 33, 40)]
    prompts += [[*common, 7, 9], [*common, 8]]
    params = [
        SamplingParams(temperature=0, logprobs=3, max_tokens=NEW, ignore_eos=True),
        SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=NEW, ignore_eos=True),
        SamplingParams(temperature=1, seed=1, n=3, max_tokens=NEW, ignore_eos=True),
        SamplingParams(
            temperature=0.8,
            seed=2,
            top_p=0.9,
            top_k=40,
            repetition_penalty=1.2,
            max_tokens=NEW,
            ignore_eos=True,
        ),
        SamplingParams(
            temperature=1,
            seed=3,
            frequency_penalty=0.5,
            logit_bias={7: 3.0},
            min_tokens=4,
            stop_token_ids=[7, 8, 9],
            max_tokens=NEW,
        ),
        SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True),
        SamplingParams(temperature=1, seed=4, min_p=0.05, max_tokens=NEW, ignore_eos=True),
    ]
    return prompts, params


def answers(llm: LLM) -> list[RequestOutput]:
    return llm.generate(*workload(), use_tqdm=False)


def assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for mine, other in zip(found, expected, strict=True):
        for choice, want in zip(mine.outputs, other.outputs, strict=True):
            assert choice.token_ids == want.token_ids
            assert (choice.finish_reason, choice.stop_reason) == (
                want.finish_reason,
                want.stop_reason,
            )
            for entry, wanted in zip(choice.logprobs or [], want.logprobs or [], strict=True):
                assert entry.logprob == pytest.approx(wanted.logprob, abs=TOLERANCE)
                assert [i for i, _ in entry.top] == [i for i, _ in wanted.top]
        scored = zip(mine.prompt_logprobs or [], other.prompt_logprobs or [], strict=True)
        for score, wanted_score in scored:
            assert (score is None) == (wanted_score is None)
            if score is not None and wanted_score is not None:
                assert score.logprob == pytest.approx(wanted_score.logprob, abs=TOLERANCE)


def prompt_logprobs(llm: LLM) -> torch.Tensor:
    """Logprobs of the tokens of three prompts, each after those before it."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = [[(7 * n + start) % 250 for n in range(90)] for start in range(3)]
    found = llm.generate(prompts, params, use_tqdm=False)
    said = [each.prompt_logprobs or [] for each in found]
    logprobs = torch.tensor([p.logprob for row in said for p in row if p is not None])
    assert len(logprobs) == 3 * 89
    return logprobs


def assert_nearer(found: torch.Tensor, other: torch.Tensor, want: torch.Tensor) -> None:
    """Asserts that `found` is what `want` is but for last bits, as `other` is not."""
    gaps = [(each - want).abs().mean().item() for each in (found, other)]
    assert gaps[0] < gaps[1] / 4, gaps


# 250 tokens: ranks have unequal parts of the vocabulary
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "tied": ("llama3", {"tie_word_embeddings": True, "vocab_size": 250}),
    "biases": ("llama2", {"attention_bias": True, "mlp_bias": True}),
    "few tokens": ("qwen3", {"vocab_size": 250}),
}
