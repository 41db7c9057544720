"""Stages with GPUs that share no node: the tokens of one GPU. Here the nodes are one machine, whose
stages are told that they cannot reach each other's memory, so rows go over sockets. Where there is
one GPU the ranks share it."""

import gc
import signal
from typing import Any

import pytest
from support.gpu_llms import far_stages, make_llm, seconds_to_find, twice

__all__ = ["far_stages"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.lengthy,
    pytest.mark.usefixtures("far_stages"),
]


def degrees(tp: int, pp: int) -> dict[str, Any]:
    return {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens_are_those_of_one_gpu(tp: int, pp: int, cuda_graphs: bool) -> None:
    expected = twice(cuda_graphs=cuda_graphs)
    assert twice(**degrees(tp, pp), cuda_graphs=cuda_graphs) == expected


def test_prompts_in_pieces_and_a_pool_of_what_is_left() -> None:
    """The rows of prompts and of decodes take turns, and connections take memory first."""
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
