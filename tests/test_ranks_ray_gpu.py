"""Workers of two ranks with GPUs over Ray, whose ranks are killed and frozen under streams.

Two like workers share the GPUs: rank 0 of each has the first one, and rank 1 the second, if there
is one. Sums on GPUs depend on what shares a batch, in their last bits. So the model computes in
float32, where that hardly ever changes a token, and no request asks for log-probabilities.
"""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.rank_strikes import (
    APP,
    MODEL_NAME,
    PORT,
    STEP_DEADLINE_S,
    Calm,
    answers_of,
    assert_streams_survive,
)
from support.raylets import Nodes, serving
from support.served import DEMO
from support.streams import COMPLETIONS, GREEDY, SAMPLED, Ask, prompts
from support.tiny_models import make_speaking

pytestmark = [pytest.mark.gpu, pytest.mark.processes, pytest.mark.lengthy]

NUM_STREAMS = 16
KINDS: dict[str, dict[str, Any]] = {
    "tensors": {"tensor_parallel": 2},
    "stages": {"pipeline_parallel": 2},
    "experts": {"data_parallel": 2, "expert_parallel": True},
}


def config_of(model: Path, degrees: dict[str, Any]) -> dict[str, Any]:
    engine = {"num_kv_blocks": 1024, "step_deadline_s": STEP_DEADLINE_S, **degrees}
    return {
        "mode": "aggregated",
        "model": {"path": str(model), "name": MODEL_NAME, "dtype": "float32"},
        "engine": engine,
        "router": {"resources": {"ingress": 0.1}},
        "decode": {"replicas": 2, "num_gpus": 0.5, "resources": {"decode": 1}},
    }


@pytest.fixture(scope="module", params=KINDS)
def nodes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nodes]:
    model = DEMO
    if request.param == "experts":
        model = make_speaking("qwen3-moe", tmp_path_factory.mktemp("experts"))
    config = config_of(model, KINDS[request.param])
    node = {"decode": 2.0, "GPU": 1.0}  # each stage of a worker takes one
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
    nodes: Nodes, calm: Calm, how: signal.Signals, strike: int
) -> None:
    await assert_streams_survive(nodes, calm, how, strike)
