# mypy: allow-untyped-defs
"""Triton kernels that find the cut of top-k, top-p and min-p: the smallest logit that stays, and
the last id that stays among equal logits.

The vocabulary is never sorted. The maxima of groups of tokens bound the cut, the few tokens above
the bound are gathered, and a search over their values (sampling/search.py) finds it. If these
tokens do not suffice (a top-p over a flat distribution, a huge top-k), the whole row is searched.
These kernels draw nothing. triton_ops.py calls them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.sampling.rows import NEG_INF
from pdserve.kernels.sampling.search import (
    cut_of,
    index_of_tie,
    key_of,
    lowest_key,
    mass_of,
    stats_at,
)

GROUP = tl.constexpr(128)  # tokens that share a maximum
TILE_GROUPS = 32  # groups of one program of group_stats_kernel
GATHER_GROUPS = tl.constexpr(16)
CANDIDATES = tl.constexpr(4096)  # a row's gathered tokens; a smaller vocabulary is gathered whole
MOST_GROUPS = tl.constexpr(640)  # up to this top_k, a row is cut by its candidates
ROW_BLOCK = tl.constexpr(2048)
SHORT_BLOCK = tl.constexpr(1024)
# Number of bits of a float32 that are always 0 if it came from a narrower type. No search needs to
# visit them.
SPARE_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def launch_cut(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Does what reference.cut_tokens does. The last dim of logits must be contiguous."""
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
        # If a product is fused into the sum across lanes, each lane rounds it in another way. Then
        # lanes would disagree about the ends of a search, and its loop would never end.
        enable_fp_fusion=False,
    )
    return cut_value, cut_last


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
    """Each program (part, row) finds the maxima of TILE_GROUPS groups of a row that is filtered."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    filters = (
        (tl.load(top_k_ptr + row) < vocab)
        | (tl.load(top_p_ptr + row) < 1.0)
        | (tl.load(min_p_ptr + row) > 0.0)
    )
    if (temperature > 0) & filters:
        groups = part * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
        tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        pointers = logits_ptr + row.to(tl.int64) * stride_row + tokens
        x = tl.load(pointers, mask=tokens < vocab, other=NEG_INF).to(tl.float32)
        group_max = tl.max(x, 1)
        tl.store(
            group_max_ptr + row.to(tl.int64) * num_groups + groups,
            group_max,
            mask=groups < num_groups,
        )
        top = tl.maximum(tl.max(group_max, 0), -1e30)  # finite also if a whole part is masked
        mass = tl.sum(tl.sum(tl.exp((x - top) / temperature), 1), 0)
        parts = tl.num_programs(0)
        tl.store(parts_ptr + row * parts + part, top)
        tl.store(parts_ptr + (num_rows + row) * parts + part, mass)


@triton.jit
def gather_above(
    row_ptr,
    group_max_ptr,
    groups_ptr,
    value_ptr,
    id_ptr,
    vocab,
    num_groups,
    bound,
    BLOCK: tl.constexpr,
):
    """Gathers tokens with logits >= bound, in order of id, into value_ptr and id_ptr. Returns their
    number; only the first CANDIDATES are written.
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
        tokens = tl.reshape(
            group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [GATHER_GROUPS * GROUP]
        )
        x = tl.load(row_ptr + tokens, mask=tokens < vocab, other=NEG_INF).to(tl.float32)
        has = (x >= bound) & (tokens < vocab)
        place = found + tl.cumsum(has.to(tl.int32), 0) - 1
        tl.store(value_ptr + place, x, mask=has & (place < CANDIDATES))
        tl.store(id_ptr + place, tokens, mask=has & (place < CANDIDATES))
        found += tl.sum(has.to(tl.int32), 0)
    tl.debug_barrier()
    return found


@triton.jit
def candidates_bound(
    group_max_ptr,
    vocab,
    num_groups,
    k,
    p,
    by_rank,
    lowest,
    high,
    top,
    scale,
    total,
    SPARE: tl.constexpr,
):
    """Finds a bound that has enough tokens above it. Each of the `wanted` best groups has one token
    above it. For a top-p alone, the best tokens of some groups have the mass. Returns (1 if there
    is no bound, its key, its value).
    """
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
    key = lowest
    bound = NEG_INF
    if vocab <= CANDIDATES:
        whole = 0
    elif whole == 0:
        if wanted > 0:
            key = lowest_key(
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
            key = lowest_key(
                group_max_ptr,
                num_groups,
                lowest,
                high,
                p * total,
                top,
                scale,
                True,
                SPARE,
                SHORT_BLOCK,
            )
        _, _, _, bound = stats_at(group_max_ptr, num_groups, key, top, scale, SPARE, SHORT_BLOCK)
    return whole, key, bound


@triton.jit
def cut_by_candidates(
    row_ptr,
    group_max_ptr,
    groups_ptr,
    value_ptr,
    id_ptr,
    vocab,
    num_groups,
    k,
    p,
    by_rank,
    by_mass,
    lowest,
    high,
    top,
    scale,
    total,
    SPARE: tl.constexpr,
):
    """Returns (1 if candidates do not suffice and the whole row must be searched, else 0; the cut's
    value; its last id)."""
    value = NEG_INF
    last = vocab
    whole, bound_key, bound = candidates_bound(
        group_max_ptr, vocab, num_groups, k, p, by_rank, lowest, high, top, scale, total, SPARE
    )
    if whole == 0:
        found = gather_above(
            row_ptr,
            group_max_ptr,
            groups_ptr,
            value_ptr,
            id_ptr,
            vocab,
            num_groups,
            bound,
            SHORT_BLOCK,
        )
        if found > CANDIDATES:
            whole = 1
        elif (by_rank == 0) & (found < vocab):
            whole = (mass_of(value_ptr, found, top, scale, SHORT_BLOCK) < p * total).to(tl.int32)
        if whole == 0:
            value, kept, ties = cut_of(
                value_ptr,
                found,
                bound_key,
                high,
                k,
                p,
                by_rank,
                by_mass,
                top,
                scale,
                total,
                SPARE,
                SHORT_BLOCK,
            )
            if kept < ties:
                last = tl.load(id_ptr + index_of_tie(value_ptr, found, value, kept, SHORT_BLOCK))
    return whole, value, last


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
    """Each program cuts one row."""
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
        mass = tl.load(
            parts_ptr + (num_rows + row) * num_parts + parts, mask=parts < num_parts, other=0.0
        )
        top = tl.max(part_top, 0)
        total = tl.sum(mass * tl.exp((part_top - top) * scale), 0)
        high = key_of(top, SPARE)
        lowest = key_of(top * 0.0 + NEG_INF, SPARE)
        if by_rank | by_mass:
            whole, cut_value, cut_last = cut_by_candidates(
                row_ptr,
                group_max_ptr,
                groups_ptr,
                value_ptr,
                id_ptr,
                vocab,
                num_groups,
                k,
                p,
                by_rank,
                by_mass,
                lowest,
                high,
                top,
                scale,
                total,
                SPARE,
            )
            if whole == 1:
                low = lowest
                if by_rank == 0:
                    # All tokens below `low` together have less mass than a top-p may leave out.
                    share = (1.0 - p) * 0.99 * total / vocab
                    low = key_of(tl.maximum(top + tl.log(share) * temperature, -3e38), SPARE)
                cut_value, kept, ties = cut_of(
                    row_ptr,
                    vocab,
                    low,
                    high,
                    k,
                    p,
                    by_rank,
                    by_mass,
                    top,
                    scale,
                    total,
                    SPARE,
                    ROW_BLOCK,
                )
                if kept < ties:
                    cut_last = index_of_tie(row_ptr, vocab, cut_value, kept, ROW_BLOCK)
        floor = top + tl.log(min_p) * temperature
        if (min_p > 0.0) & (floor > cut_value):
            cut_value = floor
            cut_last = vocab
    tl.store(cut_value_ptr + row, cut_value)
    tl.store(cut_last_ptr + row, cut_last)
