# mypy: allow-untyped-defs
"""Triton kernels that draw tokens. A draw takes the best logit of a row, or the best sum of logit /
temperature and Gumbel noise.

A draw reads the logits once and makes the noise in registers, from a row's key and the token ids.
Several programs may share a row; then the best of their results is taken. The cut of a row is given
as a value and an id; this file does not know how it was found (sampling/cut.py). triton_ops.py
calls it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.launch import launch
from pdserve.kernels.sampling.rows import NEG_INF, NO_ID, most_splits, splits_of

DRAW_BLOCK = 1024  # small: a draw makes all noise of its first block, but of few others
# Blocks of logits in flight in a greedy program. Other programs have more work per token, which
# hides the reads.
STAGES = tl.constexpr(4)


def launch_draw(
    logits: Tensor,
    temperature: Tensor | None,
    keys: Tensor | None,
    cut: tuple[Tensor, Tensor] | None,
    target_programs: int,
) -> Tensor:
    """Does what reference.draw_tokens does. The last dim of logits must be contiguous."""
    num_rows, vocab = logits.shape
    num_splits, span = splits_of(num_rows, vocab, DRAW_BLOCK, target_programs)
    ids = torch.empty((num_rows, num_splits), dtype=torch.int32, device=logits.device)
    values = torch.empty((num_rows, num_splits), dtype=torch.float32, device=logits.device)
    launch(
        draw_kernel,
        (num_splits, num_rows),
        (logits, temperature, keys, cut[0] if cut else None, cut[1] if cut else None, values, ids),
        (vocab, span, logits.stride(0)),
        RANDOM=temperature is not None,
        CUT=cut is not None,
        BLOCK=DRAW_BLOCK,
        num_warps=4,
    )
    if num_splits == 1:
        return ids[:, 0]
    best = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    launch(
        best_of_splits_kernel,
        (num_rows,),
        (values, ids, best),
        (num_splits,),
        BLOCK=most_splits(vocab, DRAW_BLOCK),
        num_warps=1,
    )
    return best


@triton.jit
def mix_32(h):
    """Does what reference.mix_32 does, for uint32."""
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def random_bits(key, tokens):
    """Returns the uint32 from which reference.gumbel makes its noise."""
    bits = mix_32(key ^ mix_32(tokens.to(tl.uint32) * 0x9E3779B1 + 0x165667B1))
    return mix_32(bits + key)


@triton.jit
def gumbel(bits):
    """Does what reference.gumbel does, in float32. With u = (bits + 0.5) / 2**32 the noise is
    -log(-log(u)). log(u) must keep its relative precision near u = 1. There it is computed from 1 -
    u, by the series of 2 atanh(x / (2 + x)).
    """
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    word = uniform.to(tl.int32, bitcast=True)
    exponent = (word - 0x3F2AAAAB) >> 23  # uniform = mantissa * 2**exponent, mantissa in [2/3, 4/3)
    mantissa = (word - (exponent << 23)).to(tl.float32, bitcast=True)
    x = tl.where(exponent == 0, -one_minus_uniform(bits), mantissa - 1.0)
    s = x / (2.0 + x)
    z = s * s
    series = 1.0 + z * (
        0.33333333 + z * (0.2 + z * (0.14285714 + z * (0.11111111 + z * 0.09090909)))
    )
    log_uniform = exponent.to(tl.float32) * 0.69314718 + 2.0 * s * series
    return -tl.log(-log_uniform)


@triton.jit
def one_minus_uniform(bits):
    return ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def best_logit(row_ptr, start, end, BLOCK: tl.constexpr):
    """Returns the best logit in start..end, and the lowest id that has it."""
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
def best_draw(
    row_ptr, start, end, scale, key, cut_value, cut_last, CUT: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns the best of logit * scale + noise in start..end, and the lowest id that has it.

    A token beats `best` only if -log(u) <= exp(logit * scale - best), and 1 - u is below -log(u).
    With that cheap test most blocks need no logarithms, because new records become rare.
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
    """Each program (split, row) finds the best of the tokens from split * span on."""
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
            top, top_id = best_draw(
                row_ptr, start, end, 1.0 / temperature, key, cut_value, cut_last, CUT, BLOCK
            )
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
