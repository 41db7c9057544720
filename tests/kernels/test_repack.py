"""KV rows between blocks of different sizes: the kernel and its twin against rows taken one by
one."""

import pytest
import torch
from torch import Tensor

from pdserve.kernels.kv import reference, triton_ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = 3
LAYERS = 2
NUM_BLOCKS = 40


def pool_of(block_size: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(NUM_BLOCKS, HEADS, LAYERS, 2, block_size, head_dim, device=DEVICE).to(dtype)


def row_of(pool: Tensor, ids: Tensor, row: int) -> Tensor:
    return pool[int(ids[row // pool.shape[4]]), :, :, :, row % pool.shape[4]]


@pytest.mark.parametrize(
    "head_dim,dtype",
    [(64, torch.float32), (40, torch.bfloat16), (128, torch.float16), (576, torch.bfloat16)],
)
@pytest.mark.parametrize("sizes", [(16, 64), (64, 16), (128, 32), (32, 32)])
@pytest.mark.parametrize("skip,num_rows", [(0, 128), (32, 200), (96, 1)])
def test_repack(
    skip: int, num_rows: int, sizes: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    source, pool = (pool_of(size, head_dim, dtype) for size in sizes)
    source_ids, block_ids = (torch.randperm(NUM_BLOCKS, device=DEVICE).int() for _ in range(2))
    before = pool.clone()
    twin = pool.clone()
    triton_ops.repack(source, source_ids, pool, block_ids, skip, num_rows)
    reference.repack(source, source_ids, twin, block_ids, skip, num_rows)
    assert torch.equal(pool, twin)
    for row in (0, num_rows // 2, num_rows - 1):
        assert torch.equal(row_of(pool, block_ids, row), row_of(source, source_ids, skip + row))
    used = block_ids[: -(-num_rows // sizes[1])].long()
    others = torch.ones(NUM_BLOCKS, dtype=torch.bool, device=DEVICE).index_fill_(0, used, False)
    assert torch.equal(pool[others], before[others]), "only the named blocks change"


def test_a_layer_of_a_pool_is_refused() -> None:
    pool = pool_of(16, 64, torch.float32)
    ids = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="each block of source and kv_cache must be contiguous"):
        triton_ops.repack(pool[:, :, :1], ids, pool[:, :, :1], ids, 0, 16)
    with pytest.raises(ValueError, match="must differ in the size of blocks alone"):
        triton_ops.repack(pool[:, :1], ids, pool, ids, 0, 16)
