"""GPUs that share a model: the tokens of one, what is said when a rank dies, and the memory
back in the end."""

import gc
import signal

import pytest
import torch
from support.gpu_llms import SharedGpus, make_llm, seconds_to_find, shared_gpus, twice

__all__ = ["shared_gpus"]
pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.processes,
    pytest.mark.lengthy,
    pytest.mark.usefixtures("shared_gpus"),
]

GIB = 1 << 30


@pytest.mark.parametrize(("ranks", "cuda_graphs"), [(2, True), (2, False), (4, True)])
def test_tokens_are_those_of_one_gpu(ranks: int, cuda_graphs: bool) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} ranks take as many GPUs")
    expected = twice(cuda_graphs=cuda_graphs)
    assert twice(tensor_parallel_size=ranks, cuda_graphs=cuda_graphs) == expected


def test_memory_of_all_ranks_comes_back() -> None:
    torch.cuda.init()
    free = [torch.cuda.mem_get_info(index)[0] for index in range(2)]
    llm = make_llm(tensor_parallel_size=2, num_kv_blocks=20_000)
    assert torch.cuda.mem_get_info(1)[0] < free[1]
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    left = [torch.cuda.mem_get_info(index)[0] for index in range(2)]
    assert left[1] > free[1] - GIB // 8 and left[0] > free[0] - GIB


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stands_still_is_found(how: signal.Signals) -> None:
    llm = make_llm(tensor_parallel_size=2, step_deadline_s=3.0)
    assert SharedGpus.newest is not None
    child = SharedGpus.newest.children[1]
    assert seconds_to_find(llm, 1, how) < (1.0 if how == signal.SIGKILL else 5.0)
    del llm
    gc.collect()
    assert child.wait(10) is not None
