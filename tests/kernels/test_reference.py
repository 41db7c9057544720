"""The ops in plain torch: right against float64, and on CPU bit-equal however a step is composed
(design: batch invariance)."""

from itertools import pairwise as neighbours

import pytest
import torch
from attention_problem import PagedProblem, paged_problem, pairwise
from torch import Tensor

from pdserve.kernels.attention.spec import Paged, Prefills
from pdserve.kernels.kv.reference import apply_rope
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.reference import linear
from pdserve.kernels.norm.ops import Norm
from pdserve.kernels.norm.reference import gate, rms_norm, sigmoid
from pdserve.kernels.ops import TORCH

HEADS = [(1, 1), (2, 1), (3, 3), (6, 2), (7, 1), (8, 2), (32, 8), (64, 1)]
HEAD_DIMS = [32, 40, 64, 72, 80, 96, 112, 128, 192, 256]
BLOCK_SIZES = [16, 32, 64, 128]
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize(
    "heads,head_dim,block_size,dtype", pairwise(HEADS, HEAD_DIMS, BLOCK_SIZES, list(TOLERANCE))
)
def test_attention_is_right(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    decode = paged_problem(heads, head_dim, block_size, dtype, [0, 1, 130, 128, 17])
    out = decode.decode(TORCH.attention)
    assert (out - decode.answer()).abs().max() < TOLERANCE[dtype]
    prefill = paged_problem(
        heads, head_dim, block_size, dtype, [150, 1, 9, 129], [20, 1, 9, 1], padding=3
    )
    out = prefill.prefill(TORCH.attention)
    assert (out - prefill.answer()).abs().max() < TOLERANCE[dtype]


def test_masked_keys_lose_to_the_lowest_scores() -> None:
    problem = paged_problem((4, 2), 64, 16, torch.float32, [140, 20], [140, 20])
    problem.make_all_scores(-50000.0)
    out = problem.prefill(TORCH.attention)
    assert (out - problem.answer()).abs().max() < TOLERANCE[torch.float32]


def _prefill_rows(problem: PagedProblem, seq: int, first: int, last: int) -> Tensor:
    """Positions first..last of one sequence as a step of its own, given a problem whose queries are
    whole contexts."""
    start = int(problem.query_starts[seq])
    q = problem.q[start + first : start + last]
    paged = Paged(
        problem.block_tables,
        problem.table_rows[seq : seq + 1],
        torch.tensor([last], dtype=torch.int32),
        last,
    )
    starts = torch.tensor([0, last - first], dtype=torch.int32)
    prefills = Prefills(paged, starts, last - first)
    return TORCH.attention.prefill(q, q[:0], q[:0], problem.kv, prefills, problem.spec)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "heads,head_dim,block_size,dtype",
    pairwise(HEADS, [*HEAD_DIMS, 12, 26], BLOCK_SIZES, list(TOLERANCE)),
)
def test_attention_is_batch_invariant(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    check_batch_invariance(heads, head_dim, block_size, dtype)


@pytest.mark.parametrize("window,soft_cap", [(1, None), (40, None), (100, 3.0), (None, 3.0)])
@pytest.mark.parametrize("block_size", [16, 128])
def test_windows_and_soft_caps_are_batch_invariant(
    block_size: int, window: int | None, soft_cap: float | None
) -> None:
    check_batch_invariance((6, 2), 40, block_size, torch.float32, window, soft_cap)


def check_batch_invariance(
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    lens = [300, 5, 128, 1]
    problem = paged_problem(heads, head_dim, block_size, dtype, lens, lens)
    problem.window, problem.soft_cap = window, soft_cap
    whole = problem.prefill(TORCH.attention)
    for seq, length in enumerate(lens):
        start = int(problem.query_starts[seq])
        own = whole[start : start + length]
        # Alone; in chunks (so with an earlier part cached); and every kind of chunk length.
        cuts = [0, *sorted({1, 2, 18, 127, 129, 131, 200} & set(range(length))), length]
        chunks = [_prefill_rows(problem, seq, first, last) for first, last in neighbours(cuts)]
        assert torch.equal(torch.cat(chunks), own)
    _check_decode_equals_prefill(problem, whole)


def _check_decode_equals_prefill(problem: PagedProblem, whole: Tensor) -> None:
    """One decode batch over positions of all sequences, in a random order, equals their rows of the
    prefill."""
    picks = [(0, 299), (0, 0), (1, 4), (2, 127), (3, 0), (0, 128), (0, 127), (2, 64), (0, 250)]
    picks = [picks[i] for i in torch.randperm(len(picks)).tolist()]
    rows = torch.tensor([int(problem.query_starts[seq]) + position for seq, position in picks])
    seqs = torch.tensor([seq for seq, _ in picks])
    lens = torch.tensor([position + 1 for _, position in picks], dtype=torch.int32)
    for size in (len(picks), 4, 1):
        table_rows = problem.table_rows[seqs[:size]]
        paged = Paged(problem.block_tables, table_rows, lens[:size], 300)
        out = TORCH.attention.decode(problem.q[rows[:size]], problem.kv, paged, problem.spec)
        assert torch.equal(out, whole[rows[:size]])


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_each_of_many_sequences_gets_what_it_gets_alone(block_size: int) -> None:
    """The sequences need more than one batch of tiles, and some tiles are padded."""
    lens = torch.randint(1, 700, (40,)).tolist()
    problem = paged_problem((4, 2), 32, block_size, torch.float32, [0, 1500, 64, 65, *lens])
    whole = problem.decode(TORCH.attention)
    for seq, length in enumerate(problem.context_lens.tolist()):
        own = slice(seq, seq + 1)
        q = problem.q[own]
        table_rows = problem.table_rows[own]
        lens = problem.context_lens[own]
        paged = Paged(problem.block_tables, table_rows, lens, length)
        alone = TORCH.attention.decode(q, problem.kv, paged, problem.spec)
        assert torch.equal(alone, whole[own])


def test_inputs_changed_in_place_are_noticed() -> None:
    """Results that are kept between the layers of a step belong to the values of its inputs, not to
    the tensors."""
    problem = paged_problem((4, 2), 32, 16, torch.float32, [40, 90, 70])
    before = problem.decode(TORCH.attention)
    for x in (problem.block_tables, problem.context_lens, problem.q):
        x.copy_(x.flip(0))
    problem.table_rows.copy_(len(problem.block_tables) - 1 - problem.table_rows.flip(0))
    assert torch.equal(problem.decode(TORCH.attention), before.flip(0))


@pytest.mark.parametrize("width", [32, 100, 256, 1000])
def test_elementwise_ops_are_batch_invariant(width: int) -> None:
    x = torch.randn(50, width)
    norm = Norm(torch.randn(width), 1e-5)
    gate_up = torch.randn(50, 2 * width)
    positions = torch.randint(0, 99, (50,))
    q = torch.randn(50, 6, 40)
    k = torch.randn(50, 2, 40)
    cos = torch.randn(99, 20)
    sin = torch.randn(99, 20)
    for rows in (slice(0, 1), slice(3, 5), slice(17, 34)):
        assert torch.equal(rms_norm(x[rows], norm), rms_norm(x, norm)[rows])
        assert torch.equal(gate(gate_up[rows], "silu"), gate(gate_up, "silu")[rows])
        rotated = apply_rope(q[rows], k[rows], cos, sin, positions[rows])
        for part, full in zip(rotated, apply_rope(q, k, cos, sin, positions), strict=True):
            assert torch.equal(part, full[rows])


def test_a_sigmoid_is_the_same_wherever_it_stands() -> None:
    x = torch.randn(1000)
    whole = sigmoid(x)
    torch.testing.assert_close(whole, x.sigmoid())
    for i in range(len(x)):
        assert sigmoid(x[i : i + 1]) == whole[i]


@pytest.mark.parametrize("in_features,out_features", [(64, 64), (96, 80), (256, 1000), (1000, 72)])
def test_linear_is_invariant_over_multiples_of_16(in_features: int, out_features: int) -> None:
    x = torch.randn(512, in_features)
    matrix = Matrix(torch.randn(out_features, in_features))
    whole = linear(x, matrix)
    for rows in (16, 32, 48, 80, 128, 240, 384):
        assert torch.equal(linear(x[:rows], matrix), whole[:rows])
        assert torch.equal(linear(x[-rows:], matrix), whole[-rows:])


def test_a_kv_view_that_is_no_layer_of_a_pool_is_refused() -> None:
    problem = paged_problem((2, 1), 32, 16, torch.float32, [5])
    problem.kv = problem.kv.transpose(3, 4).contiguous().transpose(3, 4)
    with pytest.raises(ValueError, match="kv must be"):
        problem.decode(TORCH.attention)
