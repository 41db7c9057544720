"""Stages on GPUs: the tokens of one. Where there is one GPU the ranks share it, which says nothing
of speed."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.served import DEMO

from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.engine import ranks as ranks_module
from pdserve.engine.llm import LLM, SamplingParams
from pdserve.engine.ranks import RankProcesses, RankTask

pytestmark = [pytest.mark.gpu, pytest.mark.processes, pytest.mark.lengthy]

TESTS = Path(__file__).parent.parent
PROMPTS = ["Hello there, what", "one two three", "A" * 50, "The owl " * 60]
LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0, logprobs=2, **LONG),
    SamplingParams(temperature=1, seed=3, n=2, **LONG),
    SamplingParams(temperature=0, prompt_logprobs=1, repetition_penalty=1.3, **LONG),
    SamplingParams(temperature=0.9, seed=5, top_p=0.9, **LONG),
]
made: list["SharedGpus"] = []


class SharedGpus(RankProcesses):
    """Ranks that take GPUs in turn (support/gpu_sharing.py)."""

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        super().__init__(model, config)
        made.append(self)

    def _start(
        self, model: ModelConfig, config: EngineConfig, rank: int
    ) -> "subprocess.Popen[bytes]":
        child = subprocess.Popen(
            [sys.executable, "-m", "support.gpu_sharing"],
            stdin=subprocess.PIPE,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ["PYTHONPATH"]])},
            process_group=0,
        )
        assert child.stdin is not None
        task = RankTask.of(model, config, rank, self.group)
        child.stdin.write(msgspec.json.encode(task) + b"\n")
        child.stdin.flush()
        return child


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "RankProcesses", SharedGpus)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", str(TESTS.parent)))
    made.clear()


def make(tp: int = 1, pp: int = 1, **engine: Any) -> LLM:
    given = {"num_kv_blocks": 200, "max_num_seqs": 16, **engine}
    return LLM(
        str(DEMO),
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        device="cuda",
        dtype="float32",
        **given,
    )


def tokens(llm: LLM) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def twice(*degrees: int, **engine: Any) -> list[list[list[list[int]]]]:
    """The second time prefixes are cached."""
    llm = make(*degrees, **engine)
    found = [tokens(llm), tokens(llm)]
    del llm
    gc.collect()
    return found


@pytest.mark.parametrize("degrees", [(1, 2), (1, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens_are_those_of_one_gpu(degrees: tuple[int, int], cuda_graphs: bool) -> None:
    expected = twice(cuda_graphs=cuda_graphs)
    assert twice(*degrees, cuda_graphs=cuda_graphs) == expected


def test_prompts_in_pieces_and_a_pool_of_what_is_left() -> None:
    """The KV cache is sized by what a step of the largest size leaves; graphs are larger than
    prompts' steps."""
    sized = {
        "num_kv_blocks": None,
        "kv_memory_fraction": 0.3,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 128,
    }
    expected = twice(**sized)
    assert twice(1, 2, **sized) == expected


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stage_that_dies_or_stands_still_is_found(how: signal.Signals) -> None:
    llm = make(pp=2, step_deadline_s=5.0)
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
    assert taken < (3.0 if how == signal.SIGKILL else 8.0), f"{caught.value} after {taken:.1f} s"
    del llm, caught
    gc.collect()
    child.kill()
    assert child.wait(10) is not None
    torch.cuda.synchronize()
