"""Steps with prompts by graphs that are cut at attention: the same answers as without, and to how
many rows steps are padded. (Real captures: test_gpu.py.)"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine.several_ranks import ROOMY, TIGHT, answers
from support.paper_graphs import PaperGraph, paper_graphs

from pdserve.engine.execution.local_executor import LocalExecutor
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
