"""Two steps in flight on the real model runner: the same tokens, to the bit on CPU, as one step at
a time."""

import random
from pathlib import Path
from typing import Any

import pytest
from engine.harness import local

from pdserve.engine.llm import LLM, RequestOutput, SamplingParams


def workload(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 70))] for _ in range(9)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            n=rng.choice([1, 1, 3]),
            seed=rng.randrange(1000),
            max_tokens=rng.randint(1, 30),
            stop_token_ids=[1, 2, 3, 4, 5, 6],
            min_tokens=rng.choice([0, 1]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.7]),
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, None, 1]),
        )
        for _ in prompts
    ]
    return prompts, params


def answers(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (
            choice.token_ids,
            choice.finish_reason,
            choice.stop_reason,
            choice.logprobs,
            output.prompt_logprobs,
        )
        for output in outputs
        for choice in output.outputs
    ]


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "engine", [{}, {"num_kv_blocks": 22, "max_num_batched_tokens": 40}], ids=["roomy", "tight"]
)
def test_asynchrony_changes_nothing(tiny_llama: Path, engine: dict[str, Any]) -> None:
    for seed in range(3):
        prompts, params = workload(seed)
        outputs = []
        for is_async in (False, True):
            config = {"device": "cpu", "num_kv_blocks": 64, "async_scheduling": is_async, **engine}
            llm = LLM(str(tiny_llama), tokenizer=False, **config)
            outputs.append(answers(llm.generate(prompts, params, use_tqdm=False)))
            assert llm.engine.blocks.num_free == llm.engine.blocks.num_usable
        assert outputs[0] == outputs[1]


def test_the_test_above_sees_a_token_that_is_not_fed_back(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = workload(0)
    outputs = []
    for is_async in (False, True):
        llm = LLM(
            str(tiny_llama),
            tokenizer=False,
            device="cpu",
            num_kv_blocks=64,
            async_scheduling=is_async,
        )
        monkeypatch.setattr(local(llm.engine).runner, "share_tokens", lambda *_: None)
        outputs.append(answers(llm.generate(prompts, params, use_tqdm=False)))
    assert outputs[0] != outputs[1]
