"""Stages on GPUs: the tokens of one GPU. Where there is one GPU the ranks share it, which says
nothing of speed. Nodes are one machine here: stages on several nodes are told that they cannot
reach each other's memory, so their rows go over sockets."""

import gc
import signal
from typing import Any

import pytest
from support.gpu_llms import far_stages, make_llm, seconds_to_find, shared_gpus, twice

__all__ = ["far_stages", "shared_gpus"]
pytestmark = [pytest.mark.gpu, pytest.mark.processes, pytest.mark.lengthy]


@pytest.fixture(autouse=True, params=["shared_gpus", "far_stages"], ids=["one node", "several"])
def nodes(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(request.param)


def degrees(tp: int, pp: int) -> dict[str, Any]:
    return {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens_are_those_of_one_gpu(tp: int, pp: int, cuda_graphs: bool) -> None:
    expected = twice(cuda_graphs=cuda_graphs)
    assert twice(**degrees(tp, pp), cuda_graphs=cuda_graphs) == expected


def test_prompts_in_pieces_and_a_pool_of_what_is_left() -> None:
    """The KV cache is sized by what a step of the largest size leaves; graphs are larger than
    prompts' steps."""
    sized: dict[str, Any] = {
        "num_kv_blocks": None,
        "kv_memory_fraction": 0.3,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 128,
    }
    expected = twice(**sized)
    assert twice(**degrees(1, 2), **sized) == expected


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stage_that_dies_or_stands_still_is_found(how: signal.Signals) -> None:
    llm = make_llm(**degrees(1, 2), step_deadline_s=5.0)
    assert seconds_to_find(llm, 1, how) < (3.0 if how == signal.SIGKILL else 8.0)
    del llm
    gc.collect()
