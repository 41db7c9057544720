"""The ops in plain torch: right against float64, and on CPU bit-equal however a step is composed
(design: batch invariance)."""

from itertools import pairwise as neighbours

import pytest
import torch
from attention_problem import PagedProblem, paged_problem, pairwise
from torch import Tensor

from pdserve.kernels import torch_ops

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
    out = torch_ops.paged_decode(*decode.decode_args)
    assert (out - decode.answer()).abs().max() < TOLERANCE[dtype]
    prefill = paged_problem(
        heads, head_dim, block_size, dtype, [150, 1, 9, 129], [20, 1, 9, 1], padding=3
    )
    out = torch_ops.paged_prefill(*prefill.prefill_args)
    assert (out - prefill.answer()).abs().max() < TOLERANCE[dtype]


def test_masked_keys_lose_to_the_lowest_scores() -> None:
    problem = paged_problem((4, 2), 64, 16, torch.float32, [140, 20], [140, 20])
    problem.make_all_scores(-50000.0)
    out = torch_ops.paged_prefill(*problem.prefill_args)
    assert (out - problem.answer()).abs().max() < TOLERANCE[torch.float32]


def _prefill_rows(problem: PagedProblem, seq: int, first: int, last: int) -> Tensor:
    """Positions first..last of one sequence as a step of its own, given a problem whose queries are
    whole contexts."""
    start = int(problem.query_starts[seq])
    return torch_ops.paged_prefill(
        problem.q[start + first : start + last],
        problem.kv,
        problem.block_tables,
        problem.table_rows[seq : seq + 1],
        torch.tensor([last], dtype=torch.int32),
        torch.tensor([0, last - first], dtype=torch.int32),
        last - first,
        problem.scale,
    )


@pytest.mark.parametrize(
    "heads,head_dim,block_size,dtype",
    pairwise(HEADS, [*HEAD_DIMS, 12, 26], BLOCK_SIZES, list(TOLERANCE)),
)
def test_attention_is_batch_invariant(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    lens = [300, 5, 128, 1]
    problem = paged_problem(heads, head_dim, block_size, dtype, lens, lens)
    whole = torch_ops.paged_prefill(*problem.prefill_args)
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
        out = torch_ops.paged_decode(
            problem.q[rows[:size]],
            problem.kv,
            problem.block_tables,
            table_rows,
            lens[:size],
            problem.scale,
            300,
        )
        assert torch.equal(out, whole[rows[:size]])


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_each_of_many_sequences_gets_what_it_gets_alone(block_size: int) -> None:
    """More than one batch of tiles, with padded ones among them."""
    lens = torch.randint(1, 700, (40,)).tolist()
    problem = paged_problem((4, 2), 32, block_size, torch.float32, [0, 1500, 64, 65, *lens])
    whole = torch_ops.paged_decode(*problem.decode_args)
    for seq, length in enumerate(problem.context_lens.tolist()):
        own = slice(seq, seq + 1)
        q = problem.q[own]
        table_rows = problem.table_rows[own]
        lens = problem.context_lens[own]
        alone = torch_ops.paged_decode(
            q, problem.kv, problem.block_tables, table_rows, lens, problem.scale, length
        )
        assert torch.equal(alone, whole[own])


def test_inputs_changed_in_place_are_noticed() -> None:
    """What is kept between the layers of a step belongs to the values of its inputs, not to the
    tensors."""
    problem = paged_problem((4, 2), 32, 16, torch.float32, [40, 90, 70])
    before = torch_ops.paged_decode(*problem.decode_args)
    for x in (problem.block_tables, problem.context_lens, problem.q):
        x.copy_(x.flip(0))
    problem.table_rows.copy_(len(problem.block_tables) - 1 - problem.table_rows.flip(0))
    assert torch.equal(torch_ops.paged_decode(*problem.decode_args), before.flip(0))


@pytest.mark.parametrize("width", [32, 100, 256, 1000])
def test_elementwise_ops_are_batch_invariant(width: int) -> None:
    x = torch.randn(50, width)
    weight = torch.randn(width)
    gate_up = torch.randn(50, 2 * width)
    positions = torch.randint(0, 99, (50,))
    q = torch.randn(50, 6, 40)
    k = torch.randn(50, 2, 40)
    cos = torch.randn(99, 20)
    sin = torch.randn(99, 20)
    for rows in (slice(0, 1), slice(3, 5), slice(17, 34)):
        assert torch.equal(
            torch_ops.rms_norm(x[rows], weight, 1e-5), torch_ops.rms_norm(x, weight, 1e-5)[rows]
        )
        assert torch.equal(torch_ops.silu_mul(gate_up[rows]), torch_ops.silu_mul(gate_up)[rows])
        rotated = torch_ops.apply_rope(q[rows], k[rows], cos, sin, positions[rows])
        for part, full in zip(
            rotated, torch_ops.apply_rope(q, k, cos, sin, positions), strict=True
        ):
            assert torch.equal(part, full[rows])


@pytest.mark.parametrize("in_features,out_features", [(64, 64), (96, 80), (256, 1000), (1000, 72)])
def test_linear_is_invariant_over_multiples_of_16(in_features: int, out_features: int) -> None:
    x = torch.randn(512, in_features)
    weight = torch.randn(out_features, in_features)
    whole = torch_ops.linear(x, weight)
    for rows in (16, 32, 48, 80, 128, 240, 384):
        assert torch.equal(torch_ops.linear(x[:rows], weight), whole[:rows])
        assert torch.equal(torch_ops.linear(x[-rows:], weight), whole[-rows:])


def test_a_kv_view_that_is_no_layer_of_a_pool_is_refused() -> None:
    problem = paged_problem((2, 1), 32, 16, torch.float32, [5])
    problem.kv = problem.kv.transpose(3, 4).contiguous().transpose(3, 4)
    with pytest.raises(ValueError, match="kv must be"):
        torch_ops.paged_decode(*problem.decode_args)
