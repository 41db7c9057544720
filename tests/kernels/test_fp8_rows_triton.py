"""The Triton kernels on a KV cache in e4m3, against their plain-torch twins. Written rows are equal
bit for bit. Attention over them is as near to float64 as the twin's."""

from dataclasses import replace

import pytest
import torch
from attention_problem import PagedProblem, paged_problem, pairwise
from test_triton import DEVICE, DTYPES, ON_GPU, TORCH, TRITON, assert_as_good
from torch import Tensor

from pdserve.kernels.e4m3 import E4M3, to_codes
from pdserve.kernels.kv.cache_rows import launch_gather_kv
from pdserve.kernels.kv.ops import HeadNorms, RowScales
from pdserve.kernels.kv.reference import gather_kv
from pdserve.kernels.norm.ops import Norm
from pdserve.kernels.ops import Ops

pytestmark = pytest.mark.lengthy

HEADS = [(4, 4), (6, 2), (7, 1), (32, 8), (66, 33)]
HEAD_DIMS = [40, 64, 96, 128]
BLOCK_SIZES = [16, 32, 64, 128]
# (context, queries): a chunk, a whole prompt, and one query alone
PAIRS = [(95, 5), (37, 37), (67, 1)]


def scales_of(num_kv_heads: int) -> RowScales:
    """Makes powers of two that differ by head, and between keys and values."""
    exponents = torch.arange(2.0 * num_kv_heads, device=DEVICE) % 7 - 5
    k, v = torch.exp2(exponents).view(2, -1).flip(1).unbind()
    return RowScales(k.contiguous(), v.contiguous())


def bits(x: Tensor) -> Tensor:
    """To compare: NaN with NaN, and +0 with +0 alone. One code stands for every NaN."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return torch.where(x.float().isnan(), 0x7F, x.view(kinds[x.itemsize]).int())


class Written:
    """The same rows written by an implementation: q, k, v as it returns them, and the pool."""

    def __init__(
        self,
        heads: tuple[int, int],
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        has_norms: bool = False,
    ) -> None:
        num_heads, num_kv_heads = heads
        self.heads = [num_heads, num_kv_heads, num_kv_heads]
        fused = torch.randn(4, sum(self.heads), head_dim, device=DEVICE) * 30
        fused[1, num_heads:, :8] *= 1e4  # past the largest number
        fused[2, num_heads:, 8:16] *= 1e-5  # below the smallest normal one, and nearer to zero
        fused[3, -1, 3] = float("nan")
        fused[3, num_heads, 5] = float("nan")  # its pair in the rotation becomes NaN too
        self.fused = fused.clamp(-6e4, 6e4).to(dtype)
        # exact: a GPU may fuse the product with the sum, and round once less
        turns = torch.arange(20 * head_dim // 2, device=DEVICE).view(20, -1) % 4
        self.cos = torch.tensor([1.0, 0, -1, 0], device=DEVICE)[turns]
        self.sin = torch.tensor([0.0, 1, 0, -1], device=DEVICE)[turns]
        self.positions = torch.randint(0, 20, (4,), device=DEVICE)
        self.slots = torch.randperm(3 * block_size, device=DEVICE)[:4]
        self.pool = to_codes(
            torch.randn(3, num_kv_heads, 3, 2, block_size, head_dim, device=DEVICE)
        )
        weight = torch.exp2(torch.randint(-2, 3, (head_dim,), device=DEVICE)).to(dtype)
        norms = HeadNorms(Norm(weight, 1e-6), Norm(weight.flip(0), 1e-6))
        self.norms = norms if has_norms else None

    def by(self, ops: Ops, scales: RowScales | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        pool = self.pool.clone()
        q, k, v = self.fused.clone().split(self.heads, dim=1)
        written = ops.kv.rope_write_kv(
            q,
            k,
            v,
            self.cos,
            self.sin,
            self.positions,
            pool[:, :, 1],
            self.slots,
            self.norms,
            scales,
        )
        return *written, pool


@pytest.mark.sampled(11)
@pytest.mark.parametrize("has_scales", [False, True])
@pytest.mark.parametrize(
    "heads,head_dim,block_size,dtype", pairwise(HEADS, HEAD_DIMS, BLOCK_SIZES, DTYPES)
)
def test_codes_are_the_twins_bit_for_bit(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype, has_scales: bool
) -> None:
    """Saturated, subnormal and NaN; nothing else in the pool changes."""
    rows = Written(heads, head_dim, block_size, dtype)
    scales = scales_of(heads[1]) if has_scales else None
    for mine, twin in zip(rows.by(TRITON, scales), rows.by(TORCH, scales), strict=True):
        assert mine.dtype == twin.dtype and torch.equal(bits(mine), bits(twin))
    _, k, v, pool = rows.by(TRITON, scales)
    written = pool[rows.slots // block_size, :, 1, :, rows.slots % block_size]  # [4, Hk, 2, D]
    assert torch.equal(bits(written[:, :, 0].to(dtype)), bits(k))
    assert torch.equal(bits(written[:, :, 1].to(dtype)), bits(v))
    assert k.isnan().any() and v[3, -1, 3].isnan()
    assert k.nan_to_num().abs().max() == v.nan_to_num().abs().max() == 448


def test_norms_come_before_rounding() -> None:
    rows = Written((6, 2), 64, 16, torch.float32, has_norms=True)
    rows.fused.nan_to_num_()
    scales = scales_of(2)
    made, twins = rows.by(TRITON, scales), rows.by(TORCH, scales)
    torch.testing.assert_close(made[0], twins[0])
    for mine, twin in zip(made[1:3], twins[1:3], strict=True):
        differ = (mine != twin).float().mean()  # a last bit may cross the middle of two codes
        assert differ < 0.01
        torch.testing.assert_close(mine, twin, rtol=0.13, atol=0.002)


def test_a_cache_in_another_dtype_is_refused() -> None:
    rows = Written((6, 2), 64, 16, torch.float32)
    rows.pool = rows.pool.half()
    with pytest.raises(ValueError, match=r"kv must be in e4m3 or torch\.float32"):
        rows.by(TRITON, None)
    problem = paged_problem((6, 2), 64, 16, torch.float32, [20], device=DEVICE)
    problem.kv = problem.kv.half()
    with pytest.raises(ValueError, match=r"kv must be in e4m3 or torch\.float32"):
        problem.decode(TRITON.attention)


def in_e4m3(problem: PagedProblem) -> PagedProblem:
    """With codes in the cache, NaN where nothing is written, and keys and values as they are."""
    dtype = problem.q.dtype
    keys, values = (
        [to_codes(x).to(dtype) for x in rows] for rows in (problem.keys, problem.values)
    )
    pool = to_codes(problem.kv)
    cache = torch.zeros(*pool.shape[:2], 3, *pool.shape[2:], dtype=torch.uint8, device=DEVICE)
    cache.fill_(0x7F)
    cache[:, :, 1] = pool.view(torch.uint8)
    return replace(problem, kv=cache.view(E4M3)[:, :, 1], keys=keys, values=values)


def check(problem: PagedProblem, kind: str, scales: Tensor | None) -> None:
    def by(ops: Ops) -> Tensor:
        args = problem.spec, None, scales
        if kind == "decode":
            return ops.attention.decode(problem.q, problem.kv, problem.paged, *args)
        none = problem.q[:0]
        return ops.attention.prefill(problem.q, none, none, problem.kv, problem.prefills, *args)

    answer = problem.answer()
    if scales is not None:
        group = problem.q.shape[1] // len(scales)
        answer *= scales.double().repeat_interleave(group)[:, None]
    made = by(TRITON)
    assert made.isfinite().all()
    assert_as_good(made, by(TORCH), answer)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("has_scales", [False, True])
@pytest.mark.parametrize(
    "heads,head_dim,block_size,dtype",
    pairwise(HEADS[1:4], HEAD_DIMS, BLOCK_SIZES, DTYPES),
)
def test_attention(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype, has_scales: bool
) -> None:
    """Sequences of several shares and of one, an empty one, and padding rows."""
    shape = heads, head_dim, block_size, dtype
    scales = scales_of(heads[1]).v if has_scales else None
    contexts = [600, 33, 0] if heads[1] < 8 else [140, 33, 0]
    check(in_e4m3(paged_problem(*shape, contexts, device=DEVICE)), "decode", scales)
    contexts, queries = ([*x] for x in zip(*PAIRS, strict=True))
    prompts = in_e4m3(paged_problem(*shape, contexts, queries, 7, device=DEVICE))
    check(prompts, "prefill", scales)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_windows_and_soft_caps(kind: str) -> None:
    queries = None if kind == "decode" else [9, 40]
    problem = paged_problem((6, 2), 64, 16, torch.float32, [150, 40], queries, device=DEVICE)
    problem.window, problem.soft_cap = 40, 5.0
    check(in_e4m3(problem), kind, scales_of(2).v)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("power", [-60, 20])
def test_queries_may_be_of_any_size(kind: str, power: int) -> None:
    """Codes are multiplied in float16, which ends at 65,504."""
    queries = None if kind == "decode" else [9, 40]
    problem = paged_problem((6, 2), 64, 16, torch.bfloat16, [150, 40], queries, device=DEVICE)
    problem = in_e4m3(replace(problem, q=problem.q * 2.0**power))
    problem.q[-1] = 0
    check(problem, kind, None)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stored_nan_reaches_those_who_see_it_and_nobody_else(
    kind: str, plane: int, dtype: torch.dtype
) -> None:
    queries = None if kind == "decode" else [5, 30]
    problem = in_e4m3(paged_problem((4, 2), 64, 16, dtype, [70, 30], queries, device=DEVICE))
    block = problem.block_tables[problem.table_rows[0], 1]
    problem.kv.view(torch.uint8)[block, 1, plane, 3, 7] = 0xFF  # position 19 of the first
    run = problem.decode if kind == "decode" else problem.prefill
    made = run(TRITON.attention)
    first = 1 if queries is None else queries[0]
    seen = made[:first, 2:]
    assert (seen if plane == 0 else seen[..., 7]).isnan().all()
    assert made[first:].isfinite().all() and made[:first, :2].isfinite().all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("block_size,head_dim", [(16, 64), (64, 40), (128, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_rows_are_numbers(block_size: int, head_dim: int, dtype: torch.dtype) -> None:
    problem = in_e4m3(paged_problem((4, 2), head_dim, block_size, dtype, [600, 512], device=DEVICE))
    args = problem.kv, problem.block_tables, problem.table_rows[1:], 128, 256, dtype
    gathered = launch_gather_kv(*args)
    assert gathered.dtype == dtype and torch.equal(gathered, gather_kv(*args))
    assert torch.equal(gathered[1], problem.values[1][128:384])
    codes = launch_gather_kv(*args[:5], E4M3)
    assert torch.equal(codes.to(dtype), gathered)


def test_blocks_are_copied_and_repacked_as_they_are() -> None:
    """The blocks have every code, including those of NaN."""
    source = torch.randint(0, 256, (4, 2, 3, 2, 16, 40), dtype=torch.uint8, device=DEVICE)
    want = torch.zeros(3, 2, 3, 2, 64, 40, dtype=torch.uint8, device=DEVICE)
    target = want.clone()
    ids, blocks = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([2, 0, 3], [1]))
    for ops, made in ((TORCH, want), (TRITON, target)):
        ops.kv.repack(source.view(E4M3), ids, made.view(E4M3), blocks, 16, 32)
    assert torch.equal(target, want) and target.any()
    src, dst = (torch.tensor(x, device=DEVICE) for x in ([0, 3], [1, 2]))
    want = source.clone()
    TRITON.kv.copy_blocks(source.view(E4M3), src, dst)
    TORCH.kv.copy_blocks(want, src, dst)
    assert torch.equal(source, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_long_contexts(dtype: torch.dtype) -> None:
    """Tiles by TMA, and shares of many chunks."""
    assert ON_GPU
    for block_size in (16, 64, 128):
        shape = (32, 8), 128, block_size, dtype
        scales = scales_of(8).v
        contexts = [1, 700, 0, 4097, block_size, 129]
        check(in_e4m3(paged_problem(*shape, contexts, device=DEVICE)), "decode", scales)
        prompts = in_e4m3(paged_problem(*shape, [1700, 900], [1500, 900], 3, device=DEVICE))
        check(prompts, "prefill", scales)
