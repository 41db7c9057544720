"""Stages of the layers in processes of their own: the tokens of one rank, whatever is asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine.several_ranks import CASES, TIGHT, answers, assert_same

from pdserve.engine.llm import LLM

pytestmark = [pytest.mark.lengthy, pytest.mark.processes]

DEGREES = [(1, 2), (2, 2), (1, 4)]  # tp, pp
SAMPLE = {("qwen2", 1, 2), ("tied", 2, 2), ("deepseek-v3", 1, 2), ("qwen2-moe", 1, 4)}
LAYERS = {"num_hidden_layers": 5}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "tp", "pp"),
    [
        pytest.param(case, tp, pp, marks=[] if (case, tp, pp) in SAMPLE else [pytest.mark.slow])
        for case in CASES
        for tp, pp in DEGREES
    ],
)
def test_stages_answer_as_one_rank_does(
    case: str,
    tp: int,
    pp: int,
    folder_of: Callable[..., Path],
    make_llm: Callable[..., LLM],
) -> None:
    """Stages of 5 layers are unequal."""
    family, overrides = CASES[case]
    folder = folder_of(family, **LAYERS, **overrides)
    whole = make_llm(folder, 1)
    expected = answers(whole)
    llm = make_llm(folder, tp, pp)
    assert llm.engine.rows_digest == whole.engine.rows_digest, "rows do not depend on stages"
    assert_same(answers(llm), expected)
    loads = {layer: load.sum() for layer, load in whole.expert_load().items()}
    assert {layer: load.sum() for layer, load in llm.expert_load().items()} == loads
    llm.engine.executor.clear_expert_load()
    assert not any(load.any() for load in llm.expert_load().values())
    assert_same(answers(llm), expected)  # from the prefix cache


@pytest.mark.parametrize("engine", [TIGHT, {"max_num_batched_tokens": 16, "num_kv_blocks": 80}])
def test_preemptions_and_prompts_in_pieces(
    engine: dict[str, Any], folder_of: Callable[..., Path], make_llm: Callable[..., LLM]
) -> None:
    folder = folder_of("llama3", **LAYERS)
    expected = answers(make_llm(folder, 1))
    llm = make_llm(folder, 1, 2, **engine)
    assert_same(answers(llm), expected)
    assert (llm.engine.scheduler.num_preemptions > 0) == (engine is TIGHT)


@pytest.mark.parametrize("case", ["qwen2", "deepseek-v3"])
def test_blocks_laid_out_for_peers_with_stages_hold_the_same_rows(
    case: str, folder_of: Callable[..., Path], make_llm: Callable[..., LLM]
) -> None:
    family, overrides = CASES[case]
    folder = folder_of(family, **LAYERS, **overrides)
    whole, grouped = make_llm(folder, 1), make_llm(folder, 1, peer_stages=2)
    assert len(grouped.engine.kv_cache.layout.groups) > len(whole.engine.kv_cache.layout.groups)
    assert grouped.engine.rows_digest == whole.engine.rows_digest
    assert_same(answers(grouped), answers(whole))


def test_more_stages_than_layers_are_refused(folder_of: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"engine.pipeline_parallel \(6\).*has 5 layers"):
        LLM(str(folder_of("llama3", **LAYERS)), tokenizer=False, pipeline_parallel_size=6)
