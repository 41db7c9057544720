"""Experts on several ranks, and several homes, on GPUs: the tokens of one. Where there is one GPU
the ranks share it, which says nothing of speed."""

import gc
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu_llms import make_llm, seconds_to_find, shared_gpus, twice

__all__ = ["shared_gpus"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.lengthy,
    pytest.mark.usefixtures("shared_gpus"),
]

on_four_gpus = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")


def degrees(tp: int, dp: int, pp: int) -> dict[str, Any]:
    return {
        "tensor_parallel_size": tp,
        "data_parallel_size": dp,
        "pipeline_parallel_size": pp,
        "enable_expert_parallel": True,
    }


@pytest.mark.parametrize(
    ("family", "tp", "dp", "pp"),
    [
        ("qwen3-moe", 2, 1, 1),
        ("qwen3-moe", 1, 2, 1),
        ("deepseek-v3", 1, 2, 1),
        ("qwen2-moe", 2, 2, 1),
        ("mixtral", 1, 2, 2),
        pytest.param("qwen3-moe", 4, 1, 1, marks=on_four_gpus),
        pytest.param("qwen3-moe", 1, 4, 1, marks=on_four_gpus),
    ],
)
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens_are_those_of_one_gpu(
    family: str,
    tp: int,
    dp: int,
    pp: int,
    cuda_graphs: bool,
    folder_of: Callable[..., Path],
) -> None:
    folder = folder_of(family)
    expected = twice(folder, cuda_graphs=cuda_graphs)
    assert twice(folder, **degrees(tp, dp, pp), cuda_graphs=cuda_graphs) == expected


def test_prompts_in_pieces_and_a_pool_of_what_is_left(folder_of: Callable[..., Path]) -> None:
    """The KV cache is sized by what a step of the largest size leaves, with the rows of all
    homes."""
    folder = folder_of("qwen3-moe")
    sized: dict[str, Any] = {
        "num_kv_blocks": None,
        "kv_memory_fraction": 0.3,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 128,
    }
    expected = twice(folder, **sized)
    assert twice(folder, **degrees(1, 2, 1), **sized) == expected


def test_copies_of_busy_experts(folder_of: Callable[..., Path]) -> None:
    folder = folder_of("qwen3-moe")
    expected = twice(folder)
    assert twice(folder, **degrees(1, 2, 1), redundant_experts=4) == expected


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_home_that_dies_or_stands_still_is_found(
    how: signal.Signals, folder_of: Callable[..., Path]
) -> None:
    llm = make_llm(folder_of("qwen3-moe"), **degrees(1, 2, 1), step_deadline_s=5.0)
    assert seconds_to_find(llm, 1, how) < (3.0 if how == signal.SIGKILL else 8.0)
    del llm
    gc.collect()
