"""KV rows between blocks of different sizes: the kernel and its twin against rows taken one by
one."""

import pytest
import torch
from torch import Tensor

from pdserve.kernels.e4m3 import E4M3
from pdserve.kernels.kv import reference, triton_ops
from pdserve.kernels.kv.ops import RowScales

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = 3
LAYERS = 2
NUM_BLOCKS = 40
NAN = 0x7F  # in e4m3, whatever its sign


def pool_of(block_size: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(NUM_BLOCKS, HEADS, LAYERS, 2, block_size, head_dim, device=DEVICE).to(dtype)


def row_of(pool: Tensor, ids: Tensor, row: int) -> Tensor:
    return pool[int(ids[row // pool.shape[4]]), :, :, :, row % pool.shape[4]]


@pytest.mark.sampled(5)
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


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(16, 64), (64, 16), (32, 32)])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_rows_are_rounded_as_they_are_written(
    is_scaled: bool, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    """By both implementations, to the bits that rope_write_kv leaves; a NaN stays one."""
    source = pool_of(sizes[0], 64, dtype) * 100
    source[0, 0, 0, 1, 0, :3] = torch.tensor([float("nan"), 1000.0, -1000.0])
    powers = torch.randint(-4, 4, (HEADS, LAYERS, 2), device=DEVICE)
    scales = 2.0**powers if is_scaled else None
    source_ids = torch.arange(NUM_BLOCKS, device=DEVICE).int()
    block_ids = torch.randperm(NUM_BLOCKS, device=DEVICE).int()
    shape = (NUM_BLOCKS, HEADS, LAYERS, 2, sizes[1], 64)
    pools = [torch.zeros(shape, dtype=E4M3, device=DEVICE) for _ in range(2)]
    for ops, pool in zip((triton_ops, reference), pools, strict=True):
        ops.repack(source, source_ids, pool, block_ids, 0, 128, scales)
    codes = [torch.where(pool.isnan(), NAN, pool.view(torch.uint8)) for pool in pools]
    assert torch.equal(*codes) and (codes[0] == NAN).sum() == 1
    for layer in range(LAYERS):
        rows = torch.stack([row_of(source, source_ids, row)[:, layer] for row in range(128)])
        k, v = rows.unbind(2)
        written = torch.zeros(8, HEADS, 2, 16, 64, dtype=E4M3, device=DEVICE)
        still = torch.ones(1, 32, device=DEVICE), torch.zeros(1, 32, device=DEVICE)
        positions = torch.zeros(128, dtype=torch.int64, device=DEVICE)
        slots = torch.arange(128, device=DEVICE)
        of_layer = None if scales is None else RowScales(*scales[:, layer].unbind(1))
        reference.rope_write_kv(k.clone(), k, v, *still, positions, written, slots, scales=of_layer)
        for row in range(128):
            there = row_of(pools[1], block_ids, row)[:, layer].view(torch.uint8)
            assert torch.equal(there, written[row // 16, :, :, row % 16].view(torch.uint8))


def test_codes_are_not_turned_back() -> None:
    ids = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    codes = pool_of(16, 64, torch.float32).to(E4M3)
    with pytest.raises(ValueError, match="rows can only be rounded to e4m3"):
        triton_ops.repack(codes, ids, pool_of(16, 64, torch.float32), ids, 0, 16)


def test_a_layer_of_a_pool_is_refused() -> None:
    pool = pool_of(16, 64, torch.float32)
    ids = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="each block of source and kv_cache must be contiguous"):
        triton_ops.repack(pool[:, :, :1], ids, pool[:, :, :1], ids, 0, 16)
    with pytest.raises(ValueError, match="must differ in their block size alone"):
        triton_ops.repack(pool[:, :1], ids, pool, ids, 0, 16)
