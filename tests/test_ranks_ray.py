"""Workers of several ranks over Ray: answers of one engine, and ranks killed and frozen under
streams.

Two ranks share every layer, on one node; or they are stages, each on a node of its own; or they are
homes that share the experts of a mixture. Four ranks share every layer. A rank that dies takes its
replica along at once, and one that stands still within `engine.step_deadline_s`. Streams go on
elsewhere, and Serve makes a new replica with all ranks. What happens at which moment of a request:
test_failover.py. On GPUs: test_ranks_ray_gpu.py.
"""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.rank_strikes import (
    APP,
    MODEL_NAME,
    NUM_RANKS,
    PORT,
    STEP_DEADLINE_S,
    Calm,
    answers_of,
    assert_streams_survive,
)
from support.raylets import Nodes, connected, serving
from support.served import DEMO
from support.streams import drafted, prompts
from support.tiny_models import make_speaking

from pdserve.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

NUM_KILLS = 20
NUM_FREEZES = 3
# What is computed again elsewhere must have the same bits: P and D are of one degree of tensor
# parallelism. Stages change none, and so may differ.
TENSORS = {"engine": {"tensor_parallel": 2}}, {"engine": {"tensor_parallel": 2}}, 2
STAGES: tuple[dict[str, Any], dict[str, Any], int] = (
    {},
    {"engine": {"pipeline_parallel": 2}},
    NUM_RANKS,
)
HOMES = {"engine": {"data_parallel": 2, "expert_parallel": True}}
EXPERTS = HOMES, HOMES, 2
FOUR = {"engine": {"tensor_parallel": 4}}
TENSORS_OF_FOUR = FOUR, FOUR, 2
PAIRS = {"tensors": TENSORS, "stages": STAGES, "experts": EXPERTS}
KINDS = {**PAIRS, "tensors-of-four": TENSORS_OF_FOUR}


def config_of(model: Path, prefill: dict[str, Any], decode: dict[str, Any]) -> dict[str, Any]:
    engine = {"device": "cpu", "num_kv_blocks": 1024, "step_deadline_s": STEP_DEADLINE_S}
    return {
        "model": {"path": str(model), "name": MODEL_NAME},
        "engine": engine,
        "router": {"resources": {"ingress": 0.1}, "split": "always"},
        "prefill": {"replicas": 1, "resources": {"prefill": 1}, **prefill},
        "decode": {"replicas": 2, "resources": {"decode": 1}, **decode},
    }


@pytest.fixture(scope="module", params=PAIRS)
def nodes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nodes]:
    prefill, decode, num_nodes = KINDS[request.param]
    model = DEMO
    if request.param == "experts":
        model = make_speaking("qwen3-moe", tmp_path_factory.mktemp("experts"))
    resources = [{"prefill": 1.0}] + [{"decode": 1.0}] * num_nodes
    with serving(APP, PORT, config_of(model, prefill, decode), *resources) as nodes:
        yield nodes


@pytest.fixture(scope="module")
async def calm(nodes: Nodes) -> Calm:
    async with connected(PORT) as client:
        make = await drafted(client, prompts((160, 500)), Tokenizer.load(DEMO).decode)
    return make, await answers_of(make)


@pytest.mark.parametrize(
    ("how", "strike"),
    [(signal.SIGKILL, strike) for strike in range(NUM_KILLS)]
    + [(signal.SIGSTOP, strike) for strike in range(NUM_FREEZES)],
)
async def test_streams_survive_a_rank(
    nodes: Nodes, calm: Calm, how: signal.Signals, strike: int
) -> None:
    await assert_streams_survive(nodes, calm, how, strike % NUM_RANKS)


@pytest.mark.parametrize("nodes", ["tensors-of-four"], indirect=True)
@pytest.mark.parametrize(
    ("how", "strike"), [(signal.SIGKILL, 1), (signal.SIGKILL, 6), (signal.SIGSTOP, 3)]
)
async def test_streams_survive_a_rank_of_four(
    nodes: Nodes, calm: Calm, how: signal.Signals, strike: int
) -> None:
    await assert_streams_survive(nodes, calm, how, strike, worker_ranks=4)
