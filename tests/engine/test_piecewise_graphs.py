"""Steps with prompts by graphs that are cut at attention: the same answers as without, and which
numbers of rows are captured. (Real captures: test_gpu.py.)"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine.several_ranks import ROOMY, TIGHT, answers
from support.paper_graphs import PaperGraph, paper_graphs

from pdserve.engine.execution.local_executor import LocalExecutor
from pdserve.engine.execution.piecewise_graphs import (
    DENSE_ROWS,
    fast_sizes,
    nearest_size,
    piecewise_sizes,
)
from pdserve.engine.llm import LLM
from pdserve.engine.step_result import HomeSize
from pdserve.engine.stepping.executor import Padding
from pdserve.protocol.start_progress import StartProgress

__all__ = ["paper_graphs"]

SIZES = [32, 64]  # larger steps run without graphs


def told(llm: LLM) -> list[Any]:
    return [
        (choice.token_ids, choice.logprobs, output.prompt_logprobs)
        for output in answers(llm)
        for choice in output.outputs
    ]


def executor_of(llm: LLM) -> LocalExecutor:
    executor = llm.engine.executor
    assert isinstance(executor, LocalExecutor)
    return executor


def capture(llm: LLM, sizes: list[int]) -> None:
    executor_of(llm).runner.capture_graphs([], sizes, StartProgress().report)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("config", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("family", ["llama3", "gemma3", "qwen3"])
def test_answers_are_those_without_graphs(
    family: str,
    config: dict[str, Any],
    folder_of: Callable[..., Path],
    paper_graphs: type[PaperGraph],
) -> None:
    folder = str(folder_of(family))

    def make() -> LLM:
        return LLM(folder, tokenizer=False, device="cpu", **config)

    expected = told(make())
    llm = make()
    capture(llm, SIZES)
    assert paper_graphs.replays == 0
    assert told(llm) == expected
    num_layers = llm.engine.spec.num_layers
    steps, rest = divmod(paper_graphs.replays, num_layers + 1)
    assert steps > 3 and rest == 0, "each step with prompts replays a graph more than it has layers"


def test_a_step_takes_the_smallest_size_that_holds_it(
    folder_of: Callable[..., Path], paper_graphs: type[PaperGraph]
) -> None:
    llm = LLM(str(folder_of("llama3")), tokenizer=False, device="cpu", **ROOMY)
    capture(llm, SIZES)
    padding = executor_of(llm).padding
    assert padding([HomeSize(20, 3)]) == [Padding(0, 32, 3)]
    assert padding([HomeSize(32, 2)]) == [Padding(0, 32, 2)]
    assert padding([HomeSize(33, 2), HomeSize(0, 0)]) == [Padding(0, 64, 2), Padding(0, 64, 1)]
    assert padding([HomeSize(65, 2)]) == [Padding(0, 80, 2, is_eager=True)], (
        "too many rows, so without graphs"
    )


def test_sizes_grow_with_ranks_and_with_experts() -> None:
    dense, pair, experts, shared = (
        piecewise_sizes(8192, has_experts, ranks)
        for has_experts, ranks in ((False, 1), (False, 2), (True, 1), (True, 2))
    )
    assert dense[-1] == DENSE_ROWS
    assert pair == experts and set(dense) < set(pair) < set(shared)
    assert pair[-1] >= 2048 + 512, "two prompts of 1,024 tokens, or one of 2,048, beside decodes"
    assert shared[-1] == 8192, "a full step"
    assert all(size % 4 == 0 for size in shared), "arrays of a step begin at such places"
    pairs = zip([0, *shared], shared, strict=False)
    assert all(size - last <= max(64, last // 4) for last, size in pairs), "too much padding"


@pytest.mark.parametrize(
    ("max_rows", "last"), [(300, 300), (302, 300), (256, 256), (2, 0), (8000, 8000), (20000, 8192)]
)
def test_the_last_size_is_a_full_step_if_it_is_not_too_large(max_rows: int, last: int) -> None:
    sizes = piecewise_sizes(max_rows, True, 4)
    assert max(sizes, default=0) == last and sizes == sorted(set(sizes))
    assert all(size % 4 == 0 for size in sizes)


def test_a_step_takes_the_next_size() -> None:
    sizes = piecewise_sizes(8192, True, 2)
    rows = (1, 64, 65, 2561, 3072, 3073, 7168, 7169, 8192, 8193)
    found = [nearest_size(sizes, num) for num in rows]
    assert found == [64, 64, 128, 3072, 3072, 3584, 7168, 7680, 8192, 0]


def test_sizes_that_are_slower_than_a_larger_one_are_left_out() -> None:
    assert fast_sizes({64: 4.0, 128: 5.0, 448: 16.6, 512: 13.9, 640: 13.9}) == [64, 128, 640]
    assert fast_sizes({}) == []
