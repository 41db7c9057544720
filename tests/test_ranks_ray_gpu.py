"""Workers with GPUs over Ray, of one, two and four ranks, whose ranks are killed and frozen under
streams.

Two like workers of several ranks share the GPUs: rank 0 of each has the first one, rank 1 the
second, and so on, in turn if there are fewer. Four ranks are tested where there are four GPUs. Two
prefill and two decode workers of one rank have a GPU each, or a GPU for each role. Sums on GPUs
depend on what shares a batch, in their last bits. So the model computes in float32, where that
hardly ever changes a token, and no request asks for log-probabilities.
"""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_strikes import (
    APP,
    MODEL_NAME,
    PORT,
    STEP_DEADLINE_S,
    WORKER_RANKS,
    Calm,
    answers_of,
    assert_streams_survive,
)
from support.raylets import Nodes, serving
from support.served import DEMO
from support.streams import COMPLETIONS, GREEDY, SAMPLED, Ask, prompts
from support.tiny_models import make_speaking

from pdserve.configs.engine import EngineConfig

pytestmark = [pytest.mark.gpu, pytest.mark.processes, pytest.mark.lengthy]

NUM_STREAMS = 16
KINDS: dict[str, dict[str, Any]] = {
    "tensors": {"tensor_parallel": 2},
    "stages": {"pipeline_parallel": 2},
    "experts": {"data_parallel": 2, "expert_parallel": True},
    "tensors-of-four": {"tensor_parallel": 4},
    "stages-of-pairs": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "experts-of-four": {"data_parallel": 4, "expert_parallel": True},
    "experts-of-four-in-one-home": {"tensor_parallel": 4, "expert_parallel": True},
}
TWO_AND_TWO = "two-and-two"  # prefill and decode workers


def worker_ranks_of(kind: str) -> int:
    return EngineConfig(**KINDS[kind]).num_ranks


def config_of(model: Path, degrees: dict[str, Any], **workers: dict[str, Any]) -> dict[str, Any]:
    """Two workers of each of these roles. What is left out is not there."""
    engine = {"num_kv_blocks": 1024, "step_deadline_s": STEP_DEADLINE_S, **degrees}
    roles = {role: {"replicas": 2, "resources": {role: 1}, **own} for role, own in workers.items()}
    return {
        "mode": "disaggregated" if "prefill" in roles else "aggregated",
        "model": {"path": str(model), "name": MODEL_NAME, "dtype": "float32"},
        "engine": engine,
        "router": {"resources": {"ingress": 0.1}, "split": "always"},
        **roles,
    }


def two_and_two() -> Iterator[Nodes]:
    gpus = min(torch.cuda.device_count(), 4) // 2  # of each role
    if not gpus:
        pytest.skip("needs 2 GPUs")
    config = config_of(DEMO, {}, prefill={"num_gpus": gpus / 2}, decode={"num_gpus": gpus / 2})
    prefill = {"prefill": 2.0, "GPU": gpus}
    decode = {"decode": 2.0, "GPU": gpus, "first GPU": gpus}
    with serving(APP, PORT, config, prefill, decode) as nodes:
        yield nodes


@pytest.fixture(scope="module", params=KINDS)
def nodes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nodes]:
    if request.param == TWO_AND_TWO:
        yield from two_and_two()
        return
    worker_ranks = worker_ranks_of(request.param)
    if worker_ranks > WORKER_RANKS and torch.cuda.device_count() < worker_ranks:
        pytest.skip(f"needs {worker_ranks} GPUs")
    model = DEMO
    if request.param.startswith("experts"):
        model = make_speaking("qwen3-moe", tmp_path_factory.mktemp("experts"))
    config = config_of(model, KINDS[request.param], decode={"num_gpus": 0.5})
    # each stage of a worker takes one "decode", and each rank half a GPU
    node = {"decode": 2.0, "GPU": worker_ranks / 2}
    with serving(APP, PORT, config, node, node) as nodes:
        yield nodes


@pytest.fixture(scope="module")
async def calm(nodes: Nodes) -> Calm:
    texts = prompts([100 + 20 * number for number in range(NUM_STREAMS)])

    def make() -> list[Ask]:
        return [
            Ask(
                f"stream {seed}",
                COMPLETIONS,
                (SAMPLED if seed % 2 else GREEDY) | {"prompt": text, "seed": seed},
            )
            for seed, text in enumerate(texts)
        ]

    return make, await answers_of(make)


@pytest.mark.parametrize(
    ("how", "strike"),
    [(how, strike) for how in (signal.SIGKILL, signal.SIGSTOP) for strike in range(3)],
    ids=lambda value: getattr(value, "name", str(value)),
)
async def test_streams_survive_a_rank(
    request: pytest.FixtureRequest, nodes: Nodes, calm: Calm, how: signal.Signals, strike: int
) -> None:
    worker_ranks = worker_ranks_of(request.node.callspec.params["nodes"])
    await assert_streams_survive(nodes, calm, how, strike, worker_ranks)


@pytest.mark.parametrize("nodes", [TWO_AND_TWO], indirect=True)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("strike", [0, 1, 0])
async def test_streams_survive_a_worker_of_four(
    nodes: Nodes, calm: Calm, role: str, strike: int
) -> None:
    await assert_streams_survive(nodes, calm, signal.SIGKILL, strike, worker_ranks=1, role=role)
