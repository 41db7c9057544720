"""Makes LLMs of several ranks on GPUs, for tests.

Ranks take GPUs in turn (gpu_sharing.py). There is a workload whose tokens two LLMs must agree on,
and a strike at one of the ranks.
"""

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
from support.far_stages import name_of_stage
from support.served import DEMO

from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.engine import ranks as ranks_module
from pdserve.engine.execution.piecewise_graphs import Cut, PiecewiseGraphs
from pdserve.engine.llm import LLM, SamplingParams
from pdserve.engine.ranks import RankProcesses, RankTask
from pdserve.parallel import nodes

TESTS = Path(__file__).parent.parent
# token ids, for models without a tokenizer too
PROMPTS = [
    [7 + 3 * i for i in range(17)],
    [101, 5, 9],
    [65] * 50,
    [(i * 37) % 250 for i in range(240)],
]
LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0, logprobs=2, **LONG),
    SamplingParams(temperature=1, seed=3, n=2, **LONG),
    SamplingParams(temperature=0, prompt_logprobs=1, repetition_penalty=1.3, **LONG),
    SamplingParams(temperature=0.9, seed=5, top_p=0.9, **LONG),
]


class SharedGpus(RankProcesses):
    """Ranks that take GPUs in turn. `newest`: those that were started last. `program`: a module."""

    newest: "SharedGpus | None" = None
    program = "support.gpu_sharing"

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        super().__init__(model, config)
        SharedGpus.newest = self

    def _start(
        self, model: ModelConfig, config: EngineConfig, rank: int
    ) -> "subprocess.Popen[bytes]":
        paths = [str(TESTS), os.environ.get("PYTHONPATH", str(TESTS.parent))]
        child = subprocess.Popen(
            [sys.executable, "-m", self.program],
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            process_group=0,
        )
        assert child.stdin is not None
        task = RankTask.of(model, config, rank, self.group)
        child.stdin.write(msgspec.json.encode(task) + b"\n")
        child.stdin.flush()
        return child


class FarStages(SharedGpus):
    """Ranks whose stages seem to be on nodes of their own."""

    program = "support.far_stages"


@pytest.fixture
def far_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages of an LLM know nothing of each other's memory, so their rows go over sockets."""
    monkeypatch.setattr(ranks_module, "RankProcesses", FarStages)
    monkeypatch.setattr(nodes, "node_name", name_of_stage)
    monkeypatch.setenv("NCCL_HOSTID", "stage 0")


@pytest.fixture
def shared_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "RankProcesses", SharedGpus)


@pytest.fixture
def replayed_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes the rows of each step with prompts that this process replays from graphs."""
    replay = PiecewiseGraphs.replay
    sizes: list[int] = []

    def noted(graphs: PiecewiseGraphs, rows: torch.Tensor, attend: Cut) -> torch.Tensor:
        sizes.append(rows.shape[1])
        return replay(graphs, rows, attend)

    monkeypatch.setattr(PiecewiseGraphs, "replay", noted)
    return sizes


def make_llm(folder: Path | str = DEMO, **engine: Any) -> LLM:
    given = {"num_kv_blocks": 200, "max_num_seqs": 16, **engine}
    return LLM(str(folder), tokenizer=False, device="cuda", dtype="float32", **given)


def tokens_of(llm: LLM) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def twice(folder: Path | str = DEMO, **engine: Any) -> list[list[list[list[int]]]]:
    """The tokens of a new LLM. The second time prefixes are cached."""
    llm = make_llm(folder, **engine)
    found = [tokens_of(llm), tokens_of(llm)]
    del llm
    gc.collect()
    return found


def seconds_to_find(llm: LLM, rank: int, how: signal.Signals) -> float:
    """Strike a rank of an LLM that is busy; how long it takes until the LLM says so."""
    assert SharedGpus.newest is not None
    child = SharedGpus.newest.children[rank]
    struck: list[float] = []

    def strike() -> None:
        struck.append(time.monotonic())
        os.kill(child.pid, how)

    tokens_of(llm)
    threading.Timer(0.1, strike).start()
    with pytest.raises(RuntimeError):
        while True:
            tokens_of(llm)
    return time.monotonic() - struck[0]
