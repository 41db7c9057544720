# mypy: allow-untyped-defs
"""Triton kernels from logits to tokens: draws, the cut of top-k, top-p and min-p, penalties, log-probabilities.

A draw reads the logits once and makes the noise in registers. The cut never sorts the vocabulary: the maxima of groups
of tokens bound it, the few tokens above the bound are gathered, and a search over the bits of their values finds it;
rows for which those do not suffice (a top-p over a flat distribution, a huge top-k) search the whole row. Knows nothing
of requests. Called through triton_ops.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.reference import IN_PROMPT

DRAW_BLOCK = 1024  # small: a draw makes all the noise of its first block, and of few others
SCORE_BLOCK = 2048
PENALTY_BLOCK = 2048
STAGES = tl.constexpr(4)  # blocks of logits on their way to a greedy program; more work a token hides the reads
GROUP = tl.constexpr(128)  # tokens that share a maximum
TILE_GROUPS = 32  # of one program of group_stats_kernel
GATHER_GROUPS = tl.constexpr(16)
CANDIDATES = tl.constexpr(4096)  # a row's gathered tokens; a smaller vocabulary is gathered whole
MOST_GROUPS = tl.constexpr(640)  # top_k up to which a row is cut by its candidates
PIVOTS = tl.constexpr(16)
ROW_BLOCK = tl.constexpr(2048)
SHORT_BLOCK = tl.constexpr(1024)
NEG_INF = tl.constexpr(float("-inf"))
NO_ID = tl.constexpr(2**31 - 1)
PROMPT_FLAG = tl.constexpr(IN_PROMPT)
# Bits of a float32 that are always 0 when it came from a narrower type: no search needs to visit them.
SPARE_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def launch_draw(
    logits: Tensor,
    temperature: Tensor | None,
    keys: Tensor | None,
    cut: tuple[Tensor, Tensor] | None,
    target_programs: int,
) -> Tensor:
    """reference.draw_tokens; the last dim of logits is contiguous."""
    num_rows, vocab = logits.shape
    splits, span = _splits(num_rows, vocab, DRAW_BLOCK, target_programs)
    ids = torch.empty((num_rows, splits), dtype=torch.int32, device=logits.device)
    values = torch.empty((num_rows, splits), dtype=torch.float32, device=logits.device)
    launch(
        draw_kernel,
        (splits, num_rows),
        (logits, temperature, keys, cut[0] if cut else None, cut[1] if cut else None, values, ids),
        (vocab, span, logits.stride(0)),
        RANDOM=temperature is not None,
        CUT=cut is not None,
        BLOCK=DRAW_BLOCK,
        num_warps=4,
    )
    if splits == 1:
        return ids[:, 0]
    best = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    launch(
        best_of_splits_kernel,
        (num_rows,),
        (values, ids, best),
        (splits,),
        BLOCK=_most_splits(vocab, DRAW_BLOCK),
        num_warps=1,
    )
    return best


def launch_cut(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """reference.cut_tokens; the last dim of logits is contiguous."""
    num_rows, vocab = logits.shape
    num_groups = cdiv(vocab, GROUP.value)
    num_parts = cdiv(num_groups, TILE_GROUPS)
    device = logits.device
    group_max = torch.empty((num_rows, num_groups), dtype=torch.float32, device=device)
    parts = torch.empty((2, num_rows, num_parts), dtype=torch.float32, device=device)
    groups = torch.empty((num_rows, num_groups), dtype=torch.int32, device=device)
    values = torch.empty((num_rows, CANDIDATES.value), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, CANDIDATES.value), dtype=torch.int32, device=device)
    cut_value = torch.empty(num_rows, dtype=torch.float32, device=device)
    cut_last = torch.empty(num_rows, dtype=torch.int32, device=device)
    settings = (temperature, top_k, top_p, min_p)
    launch(
        group_stats_kernel,
        (num_parts, num_rows),
        (logits, *settings, group_max, parts),
        (vocab, num_groups, logits.stride(0), num_rows),
        TILE_GROUPS=TILE_GROUPS,
        num_warps=4,
    )
    launch(
        cut_kernel,
        (num_rows,),
        (logits, *settings, group_max, parts, groups, values, ids, cut_value, cut_last),
        (vocab, num_groups, logits.stride(0), num_rows, num_parts),
        BLOCK_PARTS=next_power_of_2(num_parts),
        SPARE=SPARE_BITS[logits.dtype],
        num_warps=8,
        # A product fused into the sum across lanes rounds otherwise in each of them: they would disagree about the ends
        # of a search, and its loop would never end.
        enable_fp_fusion=False,
    )
    return cut_value, cut_last


def launch_penalties(
    logits: Tensor, counts: Tensor, slots: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> None:
    """reference.apply_penalties; all contiguous."""
    num_rows, vocab = logits.shape
    launch(
        penalties_kernel,
        (cdiv(vocab, PENALTY_BLOCK), num_rows),
        (logits, counts, slots, repetition, frequency, presence),
        (vocab,),
        BLOCK=PENALTY_BLOCK,
        num_warps=4,
    )


def launch_token_logprobs(logits: Tensor, tokens: Tensor, target_programs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, ranks (reference.token_logprobs) and log-sum-exps float32 [R]; logits as in launch_draw."""
    num_rows, vocab = logits.shape
    splits, span = _splits(num_rows, vocab, SCORE_BLOCK, target_programs)
    device = logits.device
    sums = torch.empty((2, num_rows, splits), dtype=torch.float32, device=device)
    better = torch.empty((num_rows, splits), dtype=torch.int32, device=device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=device)
    lse = torch.empty_like(logprobs)
    ranks = torch.empty(num_rows, dtype=torch.int32, device=device)
    launch(
        score_kernel,
        (splits, num_rows),
        (logits, tokens, sums, better),
        (vocab, span, logits.stride(0), num_rows),
        BLOCK=SCORE_BLOCK,
        num_warps=8,
    )
    launch(
        score_of_splits_kernel,
        (num_rows,),
        (logits, tokens, sums, better, logprobs, ranks, lse),
        (splits, logits.stride(0), num_rows),
        BLOCK=_most_splits(vocab, SCORE_BLOCK),
        num_warps=1,
    )
    return logprobs, ranks, lse


def _splits(num_rows: int, vocab: int, block: int, target_programs: int) -> tuple[int, int]:
    """(programs a row, tokens of each): enough to fill the device, each with at least a block and none empty."""
    blocks = cdiv(vocab, block)
    per_program = cdiv(blocks, min(blocks, max(target_programs // num_rows, 1)))
    return cdiv(blocks, per_program), per_program * block


def _most_splits(vocab: int, block: int) -> int:
    """Power of two that no number of splits exceeds: one kernel for any number of rows."""
    return next_power_of_2(cdiv(vocab, block))


@triton.jit
def mix_32(h):
    """reference.mix_32 of uint32."""
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def random_bits(key, tokens):
    """The uint32 behind reference.gumbel."""
    bits = mix_32(key ^ mix_32(tokens.to(tl.uint32) * 0x9E3779B1 + 0x165667B1))
    return mix_32(bits + key)


@triton.jit
def gumbel(bits):
    """reference.gumbel in float32. With u = (bits + 0.5) / 2**32 it is -log(-log(u)), where log(u) keeps its relative
    precision towards u = 1: it is taken of 1 - u there, by the series of 2 atanh(x / (2 + x)).
    """
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    word = uniform.to(tl.int32, bitcast=True)
    exponent = (word - 0x3F2AAAAB) >> 23  # uniform = mantissa * 2**exponent, mantissa in [2/3, 4/3)
    mantissa = (word - (exponent << 23)).to(tl.float32, bitcast=True)
    x = tl.where(exponent == 0, -one_minus_uniform(bits), mantissa - 1.0)
    s = x / (2.0 + x)
    z = s * s
    series = 1.0 + z * (0.33333333 + z * (0.2 + z * (0.14285714 + z * (0.11111111 + z * 0.09090909))))
    log_uniform = exponent.to(tl.float32) * 0.69314718 + 2.0 * s * series
    return -tl.log(-log_uniform)


@triton.jit
def one_minus_uniform(bits):
    return ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def best_logit(row_ptr, start, end, BLOCK: tl.constexpr):
    """The best logit in start..end and the lowest id that has it."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], NEG_INF, tl.float32)
    best_id = start + lanes
    for first in tl.range(start, end, BLOCK, num_stages=STAGES):
        tokens = first + lanes
        logit = tl.load(row_ptr + tokens, mask=tokens < end, other=NEG_INF).to(tl.float32)
        better = logit > best
        best = tl.where(better, logit, best)
        best_id = tl.where(better, tokens, best_id)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, best_id, NO_ID), 0)


@triton.jit
def best_draw(row_ptr, start, end, scale, key, cut_value, cut_last, CUT: tl.constexpr, BLOCK: tl.constexpr):
    """The best of logit * scale + noise in start..end and the lowest id that has it.

    A token beats `best` only if -log(u) <= exp(logit * scale - best), and 1 - u is below -log(u): with that cheap test
    most blocks need no logarithms, since records become rare.
    """
    lanes = tl.arange(0, BLOCK)
    best = start * 0.0 + NEG_INF
    best_id = start
    for first in range(start, end, BLOCK):
        tokens = first + lanes
        logit = tl.load(row_ptr + tokens, mask=tokens < end, other=NEG_INF).to(tl.float32)
        if CUT:
            inside = (logit > cut_value) | ((logit == cut_value) & (tokens <= cut_last))
            logit = tl.where(inside, logit, NEG_INF)
        scaled = logit * scale
        bits = random_bits(key, tokens)
        may_win = one_minus_uniform(bits) <= tl.exp(scaled - best + 1e-3)
        if tl.max(may_win.to(tl.int32), 0) > 0:
            score = scaled + gumbel(bits)
            top = tl.max(score, 0)
            if top > best:
                best = top
                best_id = tl.min(tl.where(score == top, tokens, NO_ID), 0)
    return best, best_id


@triton.jit
def draw_kernel(
    logits_ptr,  # [R, vocab]
    temperature_ptr,  # float32 [R]
    keys_ptr,  # int32 [R]
    cut_value_ptr,  # float32 [R]
    cut_last_ptr,  # int32 [R]
    value_ptr,  # float32 [R, splits]
    id_ptr,  # int32 [R, splits]
    vocab,
    span,
    stride_row,
    RANDOM: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (split, row): the best of tokens split * span onwards."""
    split = tl.program_id(0)
    row = tl.program_id(1)
    row_ptr = logits_ptr + row.to(tl.int64) * stride_row
    start = split * span
    end = tl.minimum(start + span, vocab)
    if RANDOM:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            key = tl.load(keys_ptr + row).to(tl.uint32, bitcast=True)
            cut_value = NEG_INF
            cut_last = vocab
            if CUT:
                cut_value = tl.load(cut_value_ptr + row)
                cut_last = tl.load(cut_last_ptr + row)
            top, top_id = best_draw(row_ptr, start, end, 1.0 / temperature, key, cut_value, cut_last, CUT, BLOCK)
        else:
            top, top_id = best_logit(row_ptr, start, end, BLOCK)
    else:
        top, top_id = best_logit(row_ptr, start, end, BLOCK)
    at = row * tl.num_programs(0) + split
    tl.store(value_ptr + at, top)
    tl.store(id_ptr + at, top_id)


@triton.jit(do_not_specialize=["splits"])
def best_of_splits_kernel(value_ptr, id_ptr, best_ptr, splits, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    parts = tl.arange(0, BLOCK)
    mask = parts < splits
    value = tl.load(value_ptr + row * splits + parts, mask=mask, other=NEG_INF)
    ids = tl.load(id_ptr + row * splits + parts, mask=mask, other=NO_ID)
    tl.store(best_ptr + row, tl.min(tl.where(value == tl.max(value, 0), ids, NO_ID), 0))


@triton.jit
def penalties_kernel(
    logits_ptr,  # float32 [R, vocab]
    counts_ptr,  # int32 [slots, vocab]
    slots_ptr,  # int32 [R]
    repetition_ptr,  # float32 [R], the next two as well
    frequency_ptr,
    presence_ptr,
    vocab,
    BLOCK: tl.constexpr,
):
    """Only the logits of counted tokens are read and written."""
    row = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if slot > 0:
        tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        counts = tl.load(counts_ptr + slot.to(tl.int64) * vocab + tokens, mask=tokens < vocab, other=0)
        pointers = logits_ptr + row.to(tl.int64) * vocab + tokens
        logit = tl.load(pointers, mask=counts != 0, other=0.0)
        repetition = tl.load(repetition_ptr + row)
        logit = tl.where(logit > 0, logit / repetition, logit * repetition)
        amount = (counts & (PROMPT_FLAG - 1)).to(tl.float32)
        penalty = tl.load(frequency_ptr + row) * amount + tl.load(presence_ptr + row)
        tl.store(pointers, tl.where(amount > 0, logit - penalty, logit), mask=counts != 0)


@triton.jit(do_not_specialize=["num_rows"])
def score_kernel(
    logits_ptr,  # [R, vocab]
    tokens_ptr,  # [R]
    sums_ptr,  # float32 [2, R, splits]: the maximum, and the sum of exponentials over it
    better_ptr,  # int32 [R, splits]: how many logits are above the token's
    vocab,
    span,
    stride_row,
    num_rows,
    BLOCK: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1)
    splits = tl.num_programs(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride_row
    chosen = tl.load(row_ptr + tl.load(tokens_ptr + row)).to(tl.float32)
    start = split * span
    end = tl.minimum(start + span, vocab)
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -1e30, tl.float32)  # finite, for logits that are not
    total = tl.zeros([BLOCK], tl.float32)
    better = tl.zeros([BLOCK], tl.int32)
    for first in range(start, end, BLOCK):
        tokens = first + lanes
        logit = tl.load(row_ptr + tokens, mask=tokens < end, other=NEG_INF).to(tl.float32)
        higher = tl.maximum(top, logit)
        total = total * tl.exp(top - higher) + tl.exp(logit - higher)
        top = higher
        better += (logit > chosen).to(tl.int32)
    highest = tl.max(top, 0)
    at = row * splits + split
    tl.store(sums_ptr + at, highest)
    tl.store(sums_ptr + num_rows * splits + at, tl.sum(total * tl.exp(top - highest), 0))
    tl.store(better_ptr + at, tl.sum(better, 0))


@triton.jit(do_not_specialize=["splits", "num_rows"])
def score_of_splits_kernel(
    logits_ptr,
    tokens_ptr,
    sums_ptr,
    better_ptr,
    logprobs_ptr,  # float32 [R]
    ranks_ptr,  # int32 [R]
    lse_ptr,  # float32 [R]
    splits,
    stride_row,
    num_rows,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    parts = tl.arange(0, BLOCK)
    mask = parts < splits
    at = row * splits + parts
    top = tl.load(sums_ptr + at, mask=mask, other=-1e30)
    total = tl.load(sums_ptr + num_rows * splits + at, mask=mask, other=0.0)
    highest = tl.max(top, 0)
    # Not highest + log(sum): the log-probability of a near-certain token would lose its digits.
    log_sum = tl.log(tl.sum(total * tl.exp(top - highest), 0))
    chosen = tl.load(logits_ptr + row.to(tl.int64) * stride_row + tl.load(tokens_ptr + row)).to(tl.float32)
    tl.store(logprobs_ptr + row, chosen - highest - log_sum)
    tl.store(lse_ptr + row, highest + log_sum)
    tl.store(ranks_ptr + row, tl.sum(tl.load(better_ptr + at, mask=mask, other=0), 0) + 1)


@triton.jit
def key_of(x, SPARE: tl.constexpr):
    """int32 in the order of the float32 x, without its SPARE low bits; -0 is 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SPARE


@triton.jit
def lowest_key(
    ptr, length, low, high, target, top, scale, BY_MASS: tl.constexpr, SPARE: tl.constexpr, BLOCK: tl.constexpr
):
    """The lowest key in low..high above which less than `target` of ptr[:length] lies: of the number of values, or of
    their masses exp((x - top) * scale). Nothing lies above `high`. PIVOTS keys a pass, so that a pass wins 4 bits.
    """
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    order = tl.arange(0, PIVOTS).to(tl.int64)
    while low < high:
        pivots = low + (high - low) * order // PIVOTS  # from low to below high
        above = tl.zeros([PIVOTS, BLOCK], tl.float32)
        for first in range(0, length, BLOCK):
            at = first + lanes
            x = tl.load(ptr + at, mask=at < length, other=NEG_INF).to(tl.float32)
            weight = tl.exp((x - top) * scale) if BY_MASS else (at < length).to(tl.float32)
            is_above = key_of(x, SPARE)[None, :] > pivots.to(tl.int32)[:, None]
            above += tl.where(is_above, weight[None, :], 0.0)
        enough = tl.sum(above, 1) >= target
        low = tl.maximum(low, tl.max(tl.where(enough, pivots + 1, low), 0))
        high = tl.minimum(high, tl.min(tl.where(enough, high, pivots), 0))
    return low.to(tl.int32)


@triton.jit
def stats_at(ptr, length, key, top, scale, SPARE: tl.constexpr, BLOCK: tl.constexpr):
    """(number above key, their mass, number at key, the value there)."""
    lanes = tl.arange(0, BLOCK)
    above = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    ties = tl.zeros([BLOCK], tl.int32)
    value = tl.full([BLOCK], NEG_INF, tl.float32)
    for first in range(0, length, BLOCK):
        at = first + lanes
        x = tl.load(ptr + at, mask=at < length, other=NEG_INF).to(tl.float32)
        keys = key_of(x, SPARE)
        is_above = keys > key
        is_tie = (keys == key) & (at < length)
        above += is_above.to(tl.int32)
        mass += tl.where(is_above, tl.exp((x - top) * scale), 0.0)
        ties += is_tie.to(tl.int32)
        value = tl.where(is_tie, x, value)
    return tl.sum(above, 0), tl.sum(mass, 0), tl.sum(ties, 0), tl.max(value, 0)


@triton.jit
def index_of_tie(ptr, length, value, number, BLOCK: tl.constexpr):
    """Where the number-th (from 1) of the values equal to `value` lies."""
    lanes = tl.arange(0, BLOCK)
    seen = 0
    index = length
    for first in range(0, length, BLOCK):
        at = first + lanes
        x = tl.load(ptr + at, mask=at < length, other=NEG_INF).to(tl.float32)
        is_tie = (x == value) & (at < length)
        count = tl.sum(is_tie.to(tl.int32), 0)
        if (seen < number) & (number <= seen + count):
            order = tl.cumsum(is_tie.to(tl.int32), 0) + seen
            index = tl.min(tl.where(is_tie & (order == number), at, length), 0)
        seen += count
    return index


@triton.jit
def cut_of(ptr, length, low, high, k, p, by_rank, by_mass, top, scale, total, SPARE: tl.constexpr, BLOCK: tl.constexpr):
    """Cuts ptr[:length]: (value, how many of the values equal to it stay, how many there are). by_rank: at the k best;
    by_mass: at the share p of the mass of what is left, or of `total`.
    """
    value = NEG_INF
    kept = 0
    ties = 0
    above_k = length
    if by_rank:
        key = lowest_key(ptr, length, low, high, k.to(tl.float32), top, scale, False, SPARE, BLOCK)
        above, mass, ties, value = stats_at(ptr, length, key, top, scale, SPARE, BLOCK)
        kept = k - above
        above_k = k
        total = mass + kept.to(tl.float32) * tl.exp((value - top) * scale)
    if by_mass:
        key = lowest_key(ptr, length, low, high, p * total, top, scale, True, SPARE, BLOCK)
        above, mass, num_ties, at_cut = stats_at(ptr, length, key, top, scale, SPARE, BLOCK)
        needed = tl.ceil((p * total - mass) / tl.exp((at_cut - top) * scale))
        needed = tl.minimum(tl.maximum(needed, 1.0), num_ties.to(tl.float32)).to(tl.int32)
        if above + needed <= above_k:
            value = at_cut
            kept = needed
            ties = num_ties
    return value, kept, ties


@triton.jit(do_not_specialize=["num_rows"])
def group_stats_kernel(
    logits_ptr,  # [R, vocab]
    temperature_ptr,  # float32 [R]
    top_k_ptr,  # int32 [R]
    top_p_ptr,  # float32 [R]
    min_p_ptr,  # float32 [R]
    group_max_ptr,  # float32 [R, num_groups]
    parts_ptr,  # float32 [2, R, parts]: the maximum, and the mass over it
    vocab,
    num_groups,
    stride_row,
    num_rows,
    TILE_GROUPS: tl.constexpr,
):
    """Program (part, row): the maxima of TILE_GROUPS groups of a row that is filtered."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    filters = (tl.load(top_k_ptr + row) < vocab) | (tl.load(top_p_ptr + row) < 1.0) | (tl.load(min_p_ptr + row) > 0.0)
    if (temperature > 0) & filters:
        groups = part * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
        tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        pointers = logits_ptr + row.to(tl.int64) * stride_row + tokens
        x = tl.load(pointers, mask=tokens < vocab, other=NEG_INF).to(tl.float32)
        group_max = tl.max(x, 1)
        tl.store(group_max_ptr + row.to(tl.int64) * num_groups + groups, group_max, mask=groups < num_groups)
        top = tl.maximum(tl.max(group_max, 0), -1e30)  # finite, for a part that is all masked
        mass = tl.sum(tl.sum(tl.exp((x - top) / temperature), 1), 0)
        parts = tl.num_programs(0)
        tl.store(parts_ptr + row * parts + part, top)
        tl.store(parts_ptr + (num_rows + row) * parts + part, mass)


@triton.jit
def gather_above(row_ptr, group_max_ptr, groups_ptr, value_ptr, id_ptr, vocab, num_groups, bound, BLOCK: tl.constexpr):
    """Tokens with logits >= bound, in order of id, into value_ptr and id_ptr; returns how many there are, of which only
    the first CANDIDATES are written.
    """
    lanes = tl.arange(0, BLOCK)
    chosen = 0
    for first in range(0, num_groups, BLOCK):
        group = first + lanes
        has = tl.load(group_max_ptr + group, mask=group < num_groups, other=NEG_INF) >= bound
        has &= group < num_groups
        tl.store(groups_ptr + chosen + tl.cumsum(has.to(tl.int32), 0) - 1, group, mask=has)
        chosen += tl.sum(has.to(tl.int32), 0)
    tl.debug_barrier()  # other threads of this program read the list
    found = 0
    for first in range(0, chosen, GATHER_GROUPS):
        at = first + tl.arange(0, GATHER_GROUPS)
        group = tl.load(groups_ptr + at, mask=at < chosen, other=num_groups)
        tokens = tl.reshape(group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [GATHER_GROUPS * GROUP])
        x = tl.load(row_ptr + tokens, mask=tokens < vocab, other=NEG_INF).to(tl.float32)
        has = (x >= bound) & (tokens < vocab)
        place = found + tl.cumsum(has.to(tl.int32), 0) - 1
        tl.store(value_ptr + place, x, mask=has & (place < CANDIDATES))
        tl.store(id_ptr + place, tokens, mask=has & (place < CANDIDATES))
        found += tl.sum(has.to(tl.int32), 0)
    tl.debug_barrier()
    return found


@triton.jit
def mass_of(ptr, length, top, scale, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, length, BLOCK):
        at = first + lanes
        x = tl.load(ptr + at, mask=at < length, other=NEG_INF)
        mass += tl.exp((x - top) * scale)
    return tl.sum(mass, 0)


@triton.jit(do_not_specialize=["num_rows"])
def cut_kernel(
    logits_ptr,  # [R, vocab]
    temperature_ptr,  # float32 [R]
    top_k_ptr,  # int32 [R]
    top_p_ptr,  # float32 [R]
    min_p_ptr,  # float32 [R]
    group_max_ptr,  # float32 [R, num_groups]
    parts_ptr,  # float32 [2, R, num_parts]
    groups_ptr,  # int32 [R, num_groups], scratch
    value_ptr,  # float32 [R, CANDIDATES], scratch
    id_ptr,  # int32 [R, CANDIDATES], scratch
    cut_value_ptr,  # float32 [R]
    cut_last_ptr,  # int32 [R]
    vocab,
    num_groups,
    stride_row,
    num_rows,
    num_parts,
    BLOCK_PARTS: tl.constexpr,
    SPARE: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    k = tl.load(top_k_ptr + row)
    p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    row_ptr = logits_ptr + row * stride_row
    group_max_ptr += row * num_groups
    groups_ptr += row * num_groups
    value_ptr += row * CANDIDATES
    id_ptr += row * CANDIDATES
    by_rank = k < vocab
    by_mass = p < 1.0
    cut_value = NEG_INF
    cut_last = vocab
    if (temperature > 0) & (by_rank | by_mass | (min_p > 0.0)):
        scale = 1.0 / temperature
        parts = tl.arange(0, BLOCK_PARTS)
        part_top = tl.load(parts_ptr + row * num_parts + parts, mask=parts < num_parts, other=-1e30)
        mass = tl.load(parts_ptr + (num_rows + row) * num_parts + parts, mask=parts < num_parts, other=0.0)
        top = tl.max(part_top, 0)
        total = tl.sum(mass * tl.exp((part_top - top) * scale), 0)
        high = key_of(top, SPARE)
        lowest = key_of(top * 0.0 + NEG_INF, SPARE)
        if by_rank | by_mass:
            # A bound with enough tokens above it: each of the `wanted` best groups has one, or for a top-p alone, the
            # best tokens of some groups have the mass.
            wanted = tl.minimum(MOST_GROUPS, num_groups)
            of_groups = mass_of(group_max_ptr, num_groups, top, scale, SHORT_BLOCK)
            whole = 0
            if by_rank:
                whole = (k > wanted).to(tl.int32)
                wanted = tl.minimum(k, wanted)
            elif of_groups < p * total:
                wanted = num_groups * 7 // 8
            else:
                wanted = 0
            bound_key = lowest
            bound = NEG_INF
            if vocab <= CANDIDATES:
                whole = 0
            elif whole == 0:
                if wanted > 0:
                    bound_key = lowest_key(
                        group_max_ptr,
                        num_groups,
                        lowest,
                        high,
                        wanted.to(tl.float32),
                        top,
                        scale,
                        False,
                        SPARE,
                        SHORT_BLOCK,
                    )
                else:
                    bound_key = lowest_key(
                        group_max_ptr, num_groups, lowest, high, p * total, top, scale, True, SPARE, SHORT_BLOCK
                    )
                _, _, _, bound = stats_at(group_max_ptr, num_groups, bound_key, top, scale, SPARE, SHORT_BLOCK)
            kept = 0
            ties = 0
            if whole == 0:
                found = gather_above(
                    row_ptr, group_max_ptr, groups_ptr, value_ptr, id_ptr, vocab, num_groups, bound, SHORT_BLOCK
                )
                if found > CANDIDATES:
                    whole = 1
                elif (by_rank == 0) & (found < vocab):
                    whole = (mass_of(value_ptr, found, top, scale, SHORT_BLOCK) < p * total).to(tl.int32)
                if whole == 0:
                    cut_value, kept, ties = cut_of(
                        value_ptr, found, bound_key, high, k, p, by_rank, by_mass, top, scale, total, SPARE, SHORT_BLOCK
                    )
                    if kept < ties:
                        index = index_of_tie(value_ptr, found, cut_value, kept, SHORT_BLOCK)
                        cut_last = tl.load(id_ptr + index)
            if whole == 1:
                low = lowest
                if by_rank == 0:
                    # The tokens below it have too little mass, all together, to be what a top-p leaves out.
                    share = (1.0 - p) * 0.99 * total / vocab
                    low = key_of(tl.maximum(top + tl.log(share) * temperature, -3e38), SPARE)
                cut_value, kept, ties = cut_of(
                    row_ptr, vocab, low, high, k, p, by_rank, by_mass, top, scale, total, SPARE, ROW_BLOCK
                )
                if kept < ties:
                    cut_last = index_of_tie(row_ptr, vocab, cut_value, kept, ROW_BLOCK)
        floor = top + tl.log(min_p) * temperature
        if (min_p > 0.0) & (floor > cut_value):
            cut_value = floor
            cut_last = vocab
    tl.store(cut_value_ptr + row, cut_value)
    tl.store(cut_last_ptr + row, cut_last)
