"""Two GPUs that share a model: the tokens of one, what is said when a rank dies, and the memory
back in the end."""

import gc
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from support.served import DEMO

from pdserve.engine import ranks as ranks_module
from pdserve.engine.llm import LLM, SamplingParams
from pdserve.engine.ranks import RankProcesses

pytestmark = [pytest.mark.multigpu, pytest.mark.processes, pytest.mark.lengthy]

PROMPTS = ["Hello there, what", "one two three", "A" * 50, "The owl " * 60]
LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0, logprobs=2, **LONG),
    SamplingParams(temperature=1, seed=3, n=2, **LONG),
    SamplingParams(temperature=0, prompt_logprobs=1, repetition_penalty=1.3, **LONG),
    SamplingParams(temperature=0.9, seed=5, top_p=0.9, **LONG),
]
GIB = 1 << 30


def make(ranks: int, **engine: Any) -> LLM:
    given = {"num_kv_blocks": 200, "max_num_seqs": 16, **engine}
    return LLM(str(DEMO), tensor_parallel_size=ranks, device="cuda", dtype="float32", **given)


def tokens(llm: LLM) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens_are_those_of_one_gpu(cuda_graphs: bool) -> None:
    """Twice: the second time prefixes are cached."""
    found = []
    for ranks in (1, 2):
        llm = make(ranks, cuda_graphs=cuda_graphs)
        found.append([tokens(llm), tokens(llm)])
        del llm
        gc.collect()
    assert found[0] == found[1]


def test_memory_of_all_ranks_comes_back() -> None:
    torch.cuda.init()
    free = [torch.cuda.mem_get_info(index)[0] for index in range(2)]
    llm = make(2, num_kv_blocks=20_000)
    assert torch.cuda.mem_get_info(1)[0] < free[1]
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    left = [torch.cuda.mem_get_info(index)[0] for index in range(2)]
    assert left[1] > free[1] - GIB // 8 and left[0] > free[0] - GIB


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stands_still_is_found(
    how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RankProcesses] = []

    class Kept(RankProcesses):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(ranks_module, "RankProcesses", Kept)
    llm = make(2, step_deadline_s=3.0)
    tokens(llm)
    child = made[0].children[1]
    struck: list[float] = []

    def strike() -> None:
        struck.append(time.monotonic())
        os.kill(child.pid, how)

    threading.Timer(0.1, strike).start()
    with pytest.raises(RuntimeError) as caught:
        while True:
            tokens(llm)
    taken = time.monotonic() - struck[0]
    assert taken < (1.0 if how == signal.SIGKILL else 5.0), f"{caught.value} after {taken:.1f} s"
    del llm, caught
    gc.collect()
    assert child.wait(10) is not None
