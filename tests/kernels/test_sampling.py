"""Sampling kernels against their twins and float64: draws, cuts with their ties, penalties,
masks, log-probabilities.

In the interpreter over small vocabularies, on a GPU (marked gpu) at the sizes of real ones.
"""

from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.sampling import reference, triton_ops
from pdserve.kernels.sampling.draw import gumbel, random_bits
from pdserve.kernels.sampling.reference import IN_PROMPT

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
VOCABS = [1, 50, 1000, 2049, 5000]
LARGE = [128256, 151937, 32000]
gpu = pytest.mark.gpu


def logits_of(num_rows: int, vocab: int, dtype: torch.dtype, spread: float = 3.0) -> Tensor:
    return (torch.randn(num_rows, vocab, device=DEVICE) * spread).to(dtype)


def floats(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def random_keys(num_rows: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, (num_rows,), device=DEVICE).int()


# --- noise and draws ---


@triton.jit
def noise_kernel(keys_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton compiles annotations too
    row = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + row).to(tl.uint32, bitcast=True)
    tl.store(out_ptr + row * tl.num_programs(0) * BLOCK + tokens, gumbel(random_bits(key, tokens)))


def test_noise_is_the_twins_up_to_rounding() -> None:
    rows, blocks = (64, 128) if ON_GPU else (8, 8)
    keys = random_keys(rows)
    out = torch.empty(rows, blocks * 1024, device=DEVICE)
    noise_kernel[(blocks, rows)](keys, out, BLOCK=1024)
    torch.testing.assert_close(
        out,
        reference.gumbel(keys, torch.arange(blocks * 1024, device=DEVICE)),
        atol=1e-6,
        rtol=1e-6,
    )


def check_greedy(vocab: int, dtype: torch.dtype, num_rows: int) -> None:
    logits = logits_of(num_rows, vocab, dtype)
    logits[0] = 0.0
    logits[1] = float("-inf")
    best = logits[2].max() + 1
    logits[2, [vocab // 3, vocab // 2, vocab - 1]] = best
    tokens = triton_ops.draw_tokens(logits)
    ids = torch.arange(vocab, device=DEVICE)
    lowest = torch.where(logits == logits.max(dim=-1, keepdim=True).values, ids, vocab).amin(dim=-1)
    assert tokens.dtype == torch.int32 and torch.equal(tokens.long(), lowest)
    assert tokens[:3].tolist() == [0, 0, vocab // 3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy_takes_the_lowest_of_the_best(vocab: int, dtype: torch.dtype) -> None:
    check_greedy(vocab, dtype, 5)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", LARGE)
def test_greedy_of_real_vocabularies(vocab: int, dtype: torch.dtype) -> None:
    for num_rows in (3, 70, 513):
        check_greedy(vocab, dtype, num_rows)


def check_draws(vocab: int, dtype: torch.dtype, num_rows: int, cut: bool) -> None:
    """The twin's tokens, except where two scores nearly tie."""
    logits = logits_of(num_rows, vocab, dtype)
    keys = random_keys(num_rows)
    temperature = floats([(1.0, 0.0, 0.6, 1.8)[i % 4] for i in range(num_rows)])
    where = (
        (floats([0.5] * num_rows), ints([Random().randrange(vocab) for _ in range(num_rows)]))
        if cut
        else None
    )
    logits[:, 0] = 0.5
    tokens = triton_ops.draw_tokens(logits, temperature, keys, where)
    twins = reference.draw_tokens(logits, temperature, keys, where)
    assert tokens.dtype == twins.dtype == torch.int32
    ids = torch.arange(vocab, device=DEVICE)
    scores = logits.double() / temperature.clamp(min=1e-9)[:, None].double() + reference.gumbel(
        keys, ids
    )
    gap = (scores.gather(1, twins.long()[:, None]) - scores.gather(1, tokens.long()[:, None]))[:, 0]
    assert (gap.abs()[temperature > 0] < 1e-4).all()
    assert torch.equal(tokens[temperature == 0], twins[temperature == 0])
    if cut:
        value = logits.gather(1, tokens.long()[:, None])[:, 0].float()
        assert where is not None
        assert ((value > 0.5) | (value == 0.5) & (tokens <= where[1]) | (temperature == 0)).all()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_draws(vocab: int, dtype: torch.dtype, cut: bool) -> None:
    check_draws(vocab, dtype, 5, cut)


@gpu
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", LARGE)
def test_draws_from_real_vocabularies(vocab: int, dtype: torch.dtype, cut: bool) -> None:
    for num_rows in (1, 64, 300):
        check_draws(vocab, dtype, num_rows, cut)


# --- cuts ---

SHAPES: dict[str, Callable[[int, int, torch.dtype], Tensor]] = {
    "bell": lambda rows, vocab, dtype: logits_of(rows, vocab, dtype),
    "peaked": lambda rows, vocab, dtype: logits_of(rows, vocab, dtype, 8.0),
    "flat": lambda rows, vocab, dtype: logits_of(rows, vocab, dtype, 0.05),
    "all equal": lambda rows, vocab, dtype: torch.full(
        (rows, vocab), -1.5, dtype=dtype, device=DEVICE
    ),
    "five values": lambda rows, vocab, dtype: torch.randint(-2, 3, (rows, vocab), device=DEVICE).to(
        dtype
    ),
    "the best side by side": lambda rows, vocab, dtype: (
        logits_of(rows, vocab, dtype).sort(dim=-1).values
    ),
    "mostly masked": lambda rows, vocab, dtype: logits_of(rows, vocab, dtype).masked_fill_(
        torch.arange(vocab, device=DEVICE) % 20 != 0, float("-inf")
    ),
}
# (top_k: a share of the vocabulary when below 1, top_p, min_p, temperature)
SETTINGS = [
    *[
        (50, 0.9, 0.0, 1.0),
        (1, 1.0, 0.0, 1.0),
        (0.7, 1.0, 0.0, 0.8),
        (1.0, 0.9, 0.0, 1.0),
        (1.0, 0.02, 0.0, 1.3),
    ],
    *[
        (1.0, 0.9999, 0.0, 1.0),
        (1.0, 1.0, 0.05, 0.7),
        (600, 0.5, 0.2, 2.0),
        (0.9, 0.7, 0.0, 0.5),
        (1.0, 1.0, 0.0, 1.0),
    ],
    *[(7, 1.0, 0.0, 0.0), (2, 1e-6, 0.0, 1.0)],
]


def check_cut(logits: Tensor, settings: list[tuple[float, float, float, float]]) -> None:
    """The kept tokens are a prefix of (logit falling, id rising), and of the length that float64
    wants."""
    vocab = logits.shape[-1]
    tops = [k if isinstance(k, int) else int(k * vocab) for k, _, _, _ in settings]
    counts = [min(max(top, 1), vocab) for top in tops]
    _, top_p, min_p, temperature = (floats(list(column)) for column in zip(*settings, strict=True))
    values, last = triton_ops.cut_tokens(logits, temperature, ints(counts), top_p, min_p)
    twins = reference.cut_tokens(logits, temperature, ints(counts), top_p, min_p)
    ids = torch.arange(vocab, device=DEVICE)
    for value, end in ((values, last), twins):
        kept = (logits > value[:, None]) | ((logits == value[:, None]) & (ids <= end[:, None]))
        for row, (_, p, floor, t) in enumerate(settings):
            check_kept(logits[row].double(), kept[row], counts[row], p, floor, t)


def check_kept(
    logits: Tensor, kept: Tensor, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    ordered, index = logits.sort(descending=True, stable=True)
    num_kept = int(kept.sum())
    assert num_kept >= 1 and bool(kept[index[:num_kept]].all()), "not a prefix"
    if temperature == 0:
        assert num_kept == len(logits)
        return
    probs = (ordered[:top_k] / temperature).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    slack = 2e-5
    most = top_k if top_p == 1 else int((before < top_p + slack).sum())
    least = top_k if top_p == 1 else int((before < top_p - slack).sum())
    if min_p > 0:
        ratio = probs / probs[0]
        most = min(most, int((ratio > min_p - 1e-5).sum()))
        least = min(least, int((ratio > min_p + 1e-5).sum()))
    masked = bool((ordered[min(num_kept, len(ordered) - 1)] == float("-inf")).item())
    assert max(least, 1) <= num_kept <= max(most, 1) or (masked and num_kept >= least), (
        f"{least}..{most}: {num_kept}"
    )


@pytest.mark.sampled(8)
@pytest.mark.lengthy
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "vocab,dtype",
    [(1, DTYPES[0]), (50, DTYPES[2]), (2100, DTYPES[1]), (5000, DTYPES[0]), (9001, DTYPES[2])],
)
def test_cuts(vocab: int, dtype: torch.dtype, shape: str) -> None:
    check_cut(SHAPES[shape](len(SETTINGS), vocab, dtype), SETTINGS)


@gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", LARGE)
def test_cuts_of_real_vocabularies(vocab: int, dtype: torch.dtype, shape: str) -> None:
    check_cut(SHAPES[shape](len(SETTINGS), vocab, dtype), SETTINGS)


def test_ties_at_the_cut_keep_the_lower_ids() -> None:
    logits = torch.zeros(2, 300, device=DEVICE)
    logits[:, [7, 100, 200, 299]] = 2.0
    logits[:, 250] = 3.0
    ones = floats([1.0, 1.0])
    off = floats([0.0, 0.0])
    for ops in (reference, triton_ops):
        value, last = ops.cut_tokens(logits, ones, ints([3, 300]), floats([1.0, 0.09]), off)
        assert value.tolist() == [2.0, 2.0]
        # e^3 of 295 + 4 e^2 + e^3 = 344.6 is 0.058; each 2.0 adds 0.021: two are needed to reach
        # 0.09
        assert last.tolist() == [100, 100]


def test_a_row_is_cut_and_drawn_alike_in_any_batch() -> None:
    vocab = 128256 if ON_GPU else 3000
    logits = logits_of(len(SETTINGS), vocab, torch.bfloat16)
    keys = random_keys(len(SETTINGS))
    top_k = ints([min(50, vocab) if i % 2 else vocab for i in range(len(SETTINGS))])
    _, top_p, min_p, temperature = (floats(list(column)) for column in zip(*SETTINGS, strict=True))

    def tokens(rows: slice) -> Tensor:
        cut = triton_ops.cut_tokens(
            logits[rows], temperature[rows], top_k[rows], top_p[rows], min_p[rows]
        )
        return torch.stack(
            (*cut, triton_ops.draw_tokens(logits[rows], temperature[rows], keys[rows], cut).float())
        )

    whole = tokens(slice(None))
    for i in range(len(SETTINGS)):
        assert torch.equal(tokens(slice(i, i + 1))[:, 0], whole[:, i])


# --- edits, penalties and log-probabilities ---


def check_edits(vocab: int, width: int, num_rows: int = 5) -> None:
    """Checks slots that use all their edits, one, or none."""
    logits = logits_of(num_rows, vocab, torch.float32)
    counts = ints([0, width, 1, width // 2, 0, width])
    ids = torch.stack([torch.randperm(vocab, device=DEVICE)[:width] for _ in counts]).int()
    values = torch.randn(ids.shape, device=DEVICE)
    values[:, ::3] = float("-inf")
    slots = ints([5, 0, 1, 3, 2][:num_rows])
    answer = logits.clone()
    for row, slot in enumerate(slots.tolist()):
        for entry in range(int(counts[slot]) if slot else 0):
            answer[row, ids[slot, entry]] += values[slot, entry]
    for apply_edits in (triton_ops.apply_edits, reference.apply_edits):
        out = logits.clone()
        apply_edits(out, slots, counts, ids, values)
        assert torch.equal(out, answer)


@pytest.mark.parametrize(("vocab", "width"), [(1, 1), (50, 50), (50, 7), (2500, 1030)])
def test_edits(vocab: int, width: int) -> None:
    check_edits(vocab, width)


@gpu
@pytest.mark.parametrize("vocab", LARGE)
def test_edits_of_large_vocabularies(vocab: int) -> None:
    check_edits(vocab, 2050)


def test_no_row_has_edits() -> None:
    logits = logits_of(2, 50, torch.float32)
    nothing = ints([0, 0])
    for apply_edits in (triton_ops.apply_edits, reference.apply_edits):
        out = logits.clone()
        apply_edits(out, nothing, nothing, nothing[:, None], floats([1.0, 1.0])[:, None])
        assert torch.equal(out, logits)


def check_token_mask(vocab: int, num_rows: int = 6) -> None:
    """Rows with masks of all, one and some tokens, in any order, beside rows without one; bits
    beyond the vocabulary are set at random."""
    logits = logits_of(num_rows, vocab, torch.float32)
    logits[0, 0] = float("-inf")
    rows = torch.randperm(num_rows)[: num_rows - 2]
    words = torch.randint(-(2**31), 2**31, (len(rows), -(-vocab // 32)))
    words[0] = -1
    words[1] = 0
    words[1, (vocab - 1) // 32] = 1 << (vocab - 1) % 32  # the last token alone
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    answer = logits.clone()
    for row, mask in zip(rows.tolist(), words.tolist(), strict=True):
        hidden = [t for t in range(vocab) if not mask[t // 32] >> t % 32 & 1]
        answer[row, hidden] = float("-inf")
    for apply_token_mask in (triton_ops.apply_token_mask, reference.apply_token_mask):
        out = logits.clone()
        apply_token_mask(out, rows.int().to(DEVICE), words.to(DEVICE))
        assert torch.equal(out, answer)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 50, 2048, 2049, 5000])
def test_token_masks(vocab: int) -> None:
    check_token_mask(vocab)


@gpu
@pytest.mark.parametrize("vocab", LARGE)
def test_token_masks_of_large_vocabularies(vocab: int) -> None:
    check_token_mask(vocab)


def test_no_row_has_a_token_mask() -> None:
    logits = logits_of(2, 50, torch.float32)
    for apply_token_mask in (triton_ops.apply_token_mask, reference.apply_token_mask):
        out = logits.clone()
        apply_token_mask(out, ints([]), ints([]).view(0, 2))
        assert torch.equal(out, logits)


@pytest.mark.parametrize("vocab", [1, 50, 2500])
def test_penalties(vocab: int) -> None:
    logits = logits_of(4, vocab, torch.float32)
    logits[0, 0] = float("-inf")
    counts = torch.randint(0, 4, (7, vocab), device=DEVICE, dtype=torch.int32)
    counts += torch.randint(0, 2, (7, vocab), device=DEVICE, dtype=torch.int32) * IN_PROMPT
    slots = ints([6, 0, 3, 1])
    repetition = floats([1.3, 5.0, 1.0, 0.6])
    settings = slots, repetition, floats([0.5, 2.0, -0.25, 0.0]), floats([0.1, 2.0, 1.5, 0.0])
    out = logits.clone()
    twin = logits.clone()
    answer = logits.double()
    triton_ops.apply_penalties(out, counts, *settings)
    reference.apply_penalties(twin, counts, *settings)
    for row, slot in enumerate(slots.tolist()):
        if slot:
            amount = (counts[slot] % IN_PROMPT).double()
            values = answer[row]
            values = torch.where(
                counts[slot] > 0,
                torch.where(values > 0, values / repetition[row], values * repetition[row]),
                values,
            )
            answer[row] = values - settings[2][row] * amount - settings[3][row] * (amount > 0)
    torch.testing.assert_close(out, answer.float(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(twin, answer.float(), atol=1e-6, rtol=1e-6)
    assert torch.equal(out[1], logits[1])


def check_logprobs(vocab: int, dtype: torch.dtype, num_rows: int, spread: float) -> None:
    logits = logits_of(num_rows, vocab, dtype, spread)
    logits[0, vocab // 2] = 30.0
    tokens = torch.randint(0, vocab, (num_rows,), device=DEVICE).int()
    tokens[0] = vocab // 2
    num_top = min(5, vocab)
    logprobs, ranks, top, top_ids = triton_ops.token_logprobs(logits, tokens, num_top)
    wide = logits.double()
    answer = wide.log_softmax(dim=-1)
    torch.testing.assert_close(
        logprobs, answer.gather(1, tokens.long()[:, None])[:, 0].float(), atol=4e-6, rtol=1e-6
    )
    torch.testing.assert_close(top, answer.gather(1, top_ids).float(), atol=4e-6, rtol=1e-6)
    assert torch.equal(
        top_ids.sort().values.diff(dim=-1) > 0, torch.ones_like(top_ids[:, 1:], dtype=torch.bool)
    )
    torch.testing.assert_close(top, answer.topk(num_top).values.float(), atol=4e-6, rtol=1e-6)
    assert torch.equal(
        ranks.long(), (wide > wide.gather(1, tokens.long()[:, None])).sum(dim=-1) + 1
    )


@pytest.mark.parametrize("spread", [0.1, 5.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_logprobs(vocab: int, dtype: torch.dtype, spread: float) -> None:
    check_logprobs(vocab, dtype, 3, spread)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", LARGE)
def test_logprobs_of_real_vocabularies(vocab: int, dtype: torch.dtype) -> None:
    for num_rows in (1, 64, 300):
        check_logprobs(vocab, dtype, num_rows, 4.0)


def test_logits_may_be_rows_of_a_wider_tensor_but_not_columns() -> None:
    wide = logits_of(6, 1500, torch.float32)
    rows = wide[:4, :1100]
    assert torch.equal(triton_ops.draw_tokens(rows), reference.draw_tokens(rows))
    keys = random_keys(4)
    ones = floats([1.0] * 4)
    assert torch.equal(
        triton_ops.draw_tokens(rows, ones, keys),
        triton_ops.draw_tokens(rows.contiguous(), ones, keys),
    )
    with pytest.raises(ValueError, match="logits has stride"):
        triton_ops.draw_tokens(wide.t())
    assert len(triton_ops.draw_tokens(wide[:0])) == 0
