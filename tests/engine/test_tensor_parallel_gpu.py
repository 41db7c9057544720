"""GPUs that share a model: the tokens of one, what is said when a rank dies, and the memory
back in the end."""

import gc
import signal
from pathlib import Path

import pytest
import torch
from support.gpu_llms import (
    SharedGpus,
    make_llm,
    replayed_sizes,
    seconds_to_find,
    shared_gpus,
    twice,
)
from support.tiny_models import make_tiny

from pdserve.engine.llm import SamplingParams

__all__ = ["replayed_sizes", "shared_gpus"]
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


def test_full_steps_replay_graphs_whose_rows_go_in_pieces(
    tmp_path: Path, replayed_sizes: list[int]
) -> None:
    """A product of 8,192 rows is sent on a second stream, which is a branch of the graph. Ranks
    that share experts have graphs of full steps, and this model has a layer without experts."""
    folder = make_tiny(
        "qwen3-moe",
        tmp_path,
        hidden_size=1024,
        intermediate_size=8192,
        max_position_embeddings=16384,
    )
    prompts = [
        torch.randint(256, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        for n in (8192, 7900, 9000)
    ]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = []
    for ranks in (1, 2):
        llm = make_llm(
            folder,
            num_kv_blocks=600,
            tensor_parallel_size=ranks,
            expert_parallel=ranks > 1,
            cuda_graphs=ranks > 1,
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
        del llm
        gc.collect()
    assert replayed_sizes.count(8192) >= 3, replayed_sizes
    assert found[0] == found[1]
