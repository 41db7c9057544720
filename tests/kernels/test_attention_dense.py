"""Attention of prompts on contiguous rows, by cuDNN on a GPU, against its plain-torch twin. Tests
which shapes are taken, and how the parts of a chunk after other rows are gathered and joined.
"""

from dataclasses import replace

import pytest
import torch
from attention_problem import PagedProblem, paged_problem
from torch import Tensor

from pdserve.kernels.attention import dense, reference, triton_ops
from pdserve.kernels.attention.join import launch_join_attention
from pdserve.kernels.kv.cache_rows import launch_gather_kv
from pdserve.kernels.kv.reference import gather_kv

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.float16 if ON_GPU else torch.float32
TOLERANCE = 2e-3 if ON_GPU else 1e-5


def fresh_problem(
    lens: tuple[int, ...], heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v [T, heads, 64], padding included, as slices of a fused projection."""
    num_heads, num_kv_heads = heads
    fused = torch.randn(sum(lens) + 3, num_heads + 2 * num_kv_heads, 64, device=DEVICE).to(dtype)
    return fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)


@pytest.mark.parametrize("lens", [(4,), (8, 8, 8), (4, 12, 12), (16, 8), (32, 4, 4, 20)])
def test_fresh_prompts(lens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are computed alone and in batches. A prompt of NaN spoils no other."""
    for name in ("LENGTH_MULTIPLE", "MIN_LENGTH"):
        monkeypatch.setattr(dense, name, 4)
    dense.deal.cache_clear()
    q, k, v = fresh_problem(lens, dtype=torch.float16 if ON_GPU else torch.float32)
    for x in (q, k, v):
        x[sum(lens) - lens[-1] :] = float("nan")
    out = dense.fresh_prefill(q, k, v, lens, 0.125)
    twin = reference.fresh_prefill(q, k, v, lens, 0.125)
    torch.testing.assert_close(out, twin, atol=2e-3 if ON_GPU else 1e-6, rtol=0, equal_nan=True)
    dense.deal.cache_clear()


def test_fresh_prompts_that_do_not_pay() -> None:
    """Short prompts, odd lengths, and shapes nobody has warmed."""
    deal = dense.deal
    multiple = dense.LENGTH_MULTIPLE
    assert deal((multiple,)) == deal((4096, 16)) == deal((4097,)) == ()
    assert [part[1:] for part in deal((2048,) * 7)] == [(4, 2048), (2, 2048), (1, 2048)]
    assert deal((2048, 8192)) == ((0, 1, 2048), (2048, 1, 8192))
    assert not dense.fresh_prefill_pays(*fresh_problem((2048,)), (2048,))


@pytest.mark.gpu
def test_warmed_fresh_prompts() -> None:
    q, k, v = fresh_problem((7168,), (8, 2), torch.bfloat16)
    dense.warm_dense_prefill(q, k, v, 0.125)
    for lens in ((7168,), (1024, 1024, 1024, 2048), (2048, 2048)):
        q, k, v = fresh_problem(lens, (8, 2), torch.bfloat16)
        assert dense.fresh_prefill_pays(q, k, v, lens)
        out, twin = (ops.fresh_prefill(q, k, v, lens, 0.125) for ops in (dense, reference))
        torch.testing.assert_close(out, twin, atol=2e-2, rtol=0)
    assert not dense.fresh_prefill_pays(*fresh_problem((8192,), (8, 2), torch.bfloat16), (8192,))


@pytest.mark.parametrize("block_size,head_dim", [(16, 64), (64, 40), (128, 128)])
def test_gather_kv(block_size: int, head_dim: int) -> None:
    problem = paged_problem((4, 2), head_dim, block_size, DTYPE, [600, 512], device=DEVICE)
    args = problem.kv, problem.block_tables, problem.table_rows[1:], 128, 256, DTYPE
    gathered = launch_gather_kv(*args)
    assert torch.equal(gathered, gather_kv(*args))
    assert torch.equal(gathered[0], problem.keys[1][128:384]) and torch.equal(
        gathered[1], problem.values[1][128:384]
    )


@pytest.mark.parametrize("head_dim", [40, 128])
def test_join_attention(head_dim: int) -> None:
    """Keys are divided into two parts. Some log-sum-exps are far apart, some are equal."""
    q, k, v = torch.randn(3, 30, 6, head_dim, device=DEVICE).to(DTYPE).unbind()
    q[7] *= 50
    want, want_lse = reference.dense_attention(1, q, k, v, False, 0.125)
    parts = [
        reference.dense_attention(1, q, k[rows], v[rows], False, 0.125)
        for rows in (slice(11), slice(11, 30))
    ]
    twin, twin_lse = reference.join_attention(*parts[0], *parts[1])
    joined = torch.empty_like(want)
    launch_join_attention(*parts[0], *parts[1], joined)
    tolerance = max(TOLERANCE, 1e-4)  # scores of hundreds keep four decimals
    for out, lse in ((twin, twin_lse), (joined, parts[0][1])):
        torch.testing.assert_close(out, want, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse, want_lse, atol=1e-3, rtol=1e-3)


def chunk_problem(
    prefix: int,
    length: int,
    dtype: torch.dtype,
    heads: tuple[int, int] = (4, 2),
    block_size: int = 16,
) -> tuple[PagedProblem, tuple[Tensor, Tensor, Tensor]]:
    """A chunk of `length` behind `prefix` rows, and its q, k and v as slices of a fused
    projection."""
    problem = paged_problem(
        heads, 64, block_size, dtype, [prefix + length], [length], device=DEVICE
    )
    own = [rows[0][prefix:] for rows in (problem.keys, problem.values)]
    fused = torch.cat([problem.q, *own], dim=1)
    return problem, fused.split((heads[0], heads[1], heads[1]), dim=1)


def run_chunk(
    problem: PagedProblem, rows: tuple[Tensor, Tensor, Tensor], prefix: int
) -> tuple[Tensor, Tensor]:
    """By triton_ops, and the answer in float64."""
    prefills = replace(problem.prefills, chunks=((prefix, len(problem.q)),))
    out = triton_ops.prefill(*rows, problem.kv, prefills, problem.spec)
    return out, problem.answer()


def prepare(
    monkeypatch: pytest.MonkeyPatch, rows: tuple[Tensor, Tensor, Tensor], piece: int
) -> None:
    """As if plans for chunks like these rows had been made."""
    part = dense.PromptBatch(0, 1, dense.chunk_rows(len(rows[0])))
    monkeypatch.setattr(dense._warm, "pieces", {dense._shape(part, *rows): piece})


@pytest.mark.parametrize("length", [32, 45, 33, 64])
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_chunk_behind_pieces(pieces: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole chunks, and some whose last rows are left to the paged kernel."""
    monkeypatch.setattr(dense, "CHUNK_MULTIPLE", 16)
    problem, rows = chunk_problem(64 * pieces, length, DTYPE)
    prepare(monkeypatch, rows, 64)
    out, answer = run_chunk(problem, rows, 64 * pieces)
    torch.testing.assert_close(out.double(), answer, atol=TOLERANCE, rtol=0)


def test_chunks_that_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing before them, another number of rows, too few of their own, blocks across pieces,
    plans nobody made."""
    _, rows = chunk_problem(0, 2048, DTYPE)
    pays = dense.chunk_prefill_pays
    assert not pays(*rows, 4096, 16)
    prepare(monkeypatch, rows, 4096)
    assert pays(*rows, 4096, 16) and pays(*rows, 12288, 16)
    assert not pays(*rows, 0, 16) and not pays(*rows, 4097, 16) and not pays(*rows, 4096, 8192)
    q, k, v = rows
    assert not pays(q[:2000], k[:2000], v[:2000], 4096, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
def test_warmed_chunks(block_size: int) -> None:
    problem, rows = chunk_problem(0, 4096, torch.bfloat16, (8, 2), block_size)
    null_blocks = torch.zeros(1, 8192 // block_size, dtype=torch.int32, device=DEVICE)
    triton_ops.warm_prefill(*rows, problem.kv, null_blocks, problem.spec)
    for prefix, length in ((4096, 4096), (8192, 3000), (4096, 2048)):
        problem, rows = chunk_problem(prefix, length, torch.bfloat16, (8, 2), block_size)
        assert dense.chunk_prefill_pays(*rows, prefix, block_size)
        out, answer = run_chunk(problem, rows, prefix)
        torch.testing.assert_close(out.double(), answer, atol=5e-3, rtol=2e-2)


@pytest.mark.gpu
def test_head_dims_that_cudnn_does_not_take_are_left_alone() -> None:
    q, k, v = torch.randn(3, 2048, 4, 72 + 1, device=DEVICE).bfloat16().unbind()
    dense.warm_dense_prefill(q, k, v, 0.125)
    assert not dense.fresh_prefill_pays(q, k, v, (2048,))
