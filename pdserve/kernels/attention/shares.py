# mypy: allow-untyped-defs
"""Shares of the keys of a tile of prefill attention, and the kernel that merges what their programs
have found.

A chunk of a few hundred rows deep in a prompt has fewer tiles than a device has places for
programs, and each tile has thousands of keys. prefill.py then runs several programs for each tile.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.launching.notes import scratch

MAX_SPLITS = 16  # programs that share the keys of a tile
LEAST_KEYS = 1024  # keys of each of them: fewer are read in the time that merging takes
LEAST_SHARE = tl.constexpr(256)  # keys of a share, except of the one that reaches the first key
PROGRAMS = 2  # programs that a multiprocessor runs at once
# Writing and reading what a program found for its tile takes, of a whole device, as long as a
# program needs for so many keys: 30 ns on an H200.
MERGED_KEYS = 2.5
GAIN = 0.95  # more shares must take at most so much of the time
# The number is chosen for contexts of at most so many keys: a graph is captured for the longest
# context that a sequence may have, and most are shorter.
DEEP_KEYS = 16_384
MERGED_ROWS = 8  # of a program of merge_rows_kernel


def num_splits(
    num_tiles: int, longest: int, spec: AttentionSpec, num_sms: int, skip: int = 0
) -> int:
    """Number of programs that share the keys of each tile, so that all are done soonest.

    Multiprocessors take the programs in rounds. With few programs the last round, which may be the
    only one, leaves many places empty. Each share more must be merged.
    num_tiles: tiles of all sequences and KV heads. longest: keys of the longest context. skip: as
    `launch_prefill` takes it.
    """
    longest = min(longest, DEEP_KEYS)
    most = min(longest // LEAST_KEYS, MAX_SPLITS)
    if spec.window is not None or skip or not num_tiles or most < 2:
        return 1

    def keys(splits: int) -> float:
        rounds = cdiv(num_tiles * splits, PROGRAMS * num_sms) * longest / splits
        return rounds + (MERGED_KEYS * num_tiles * splits if splits > 1 else 0)

    best = 1
    for splits in range(2, most + 1):
        if keys(splits) < GAIN * keys(best):
            best = splits
    return best


@dataclass(frozen=True)
class Parts:
    """The results of several programs for the same rows. All are float32.

    sums: `[splits, tokens, heads, D]`, weighted values that are not divided yet. A program without
    keys writes none.
    maxima, totals: `[splits, tokens, heads]`, of the unscaled scores and of the weights. Without
    keys they are -inf and 0.
    """

    sums: Tensor
    maxima: Tensor
    totals: Tensor

    @staticmethod
    def of(q: Tensor, splits: int) -> "Parts":
        shape = (splits, *q.shape[:2])
        return Parts(
            scratch(*shape, q.shape[2], like=q), scratch(*shape, like=q), scratch(*shape, like=q)
        )

    def merge(
        self,
        query_starts: Tensor,
        group: int,
        v_scales: Tensor | None,
        scale_log2: float,
        out: Tensor,
    ) -> None:
        """Writes the rows of all sequences to out [T, Hq, D], and leaves its padding rows."""
        splits, num_tokens, num_heads, head_dim = self.sums.shape
        num_rows = num_tokens * num_heads
        launch(
            merge_rows_kernel,
            (cdiv(num_rows, MERGED_ROWS),),
            (self.sums, self.maxima, self.totals, query_starts, v_scales, out),
            (scale_log2, num_rows, num_heads, group, len(query_starts) - 1, splits),
            HEAD_DIM=head_dim,
            BLOCK_D=next_power_of_2(head_dim),
            ROWS=MERGED_ROWS,
            num_warps=4,
        )


@triton.jit(
    do_not_specialize=["num_rows", "num_heads", "group", "num_seqs", "num_splits"],
    do_not_specialize_on_alignment=["starts_ptr"],  # a part of a step's packed arrays
)
def merge_rows_kernel(
    partial_ptr,  # float32 [num_splits, T, Hq, D]: not divided by their sums
    max_ptr,  # float32 [num_splits, T, Hq], of unscaled scores
    sum_ptr,  # float32 [num_splits, T, Hq]
    starts_ptr,  # int32 [S + 1]
    v_scale_ptr,  # float32 [Hk], or None: all are 1
    out_ptr,  # [T, Hq, D], contiguous
    scale_log2,
    num_rows,  # T * Hq
    num_heads,
    group,
    num_seqs,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merges the shares of ROWS rows, where a row is one head of one token. The shares are weighted
    by exp(scaled max), added up, and divided by the sum of their sums, weighted likewise. Padding
    rows are left as they are."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = row < tl.load(starts_ptr + num_seqs).to(tl.int64) * num_heads
    dims = tl.arange(0, BLOCK_D)
    mask = in_range[:, None] & (dims < HEAD_DIM)[None, :]
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    # from the last share on, which has seen a key: the maxima of others may be -inf
    for split in range(num_splits - 1, -1, -1):
        at = split * num_rows + row
        part_max = tl.load(max_ptr + at, mask=in_range, other=0.0)
        part_sum = tl.load(sum_ptr + at, mask=in_range, other=1.0)
        has_keys = (part_max > float("-inf"))[:, None]
        values_ptr = partial_ptr + at[:, None] * HEAD_DIM + dims[None, :]
        part = tl.load(values_ptr, mask=mask & has_keys, other=0.0)
        new_max = tl.maximum(row_max, part_max)
        weight = tl.exp2((part_max - new_max) * scale_log2)
        keep = tl.exp2((row_max - new_max) * scale_log2)
        acc = acc * keep[:, None] + part * weight[:, None]
        total = total * keep + part_sum * weight
        row_max = new_max
    out = acc / total[:, None]
    if v_scale_ptr is not None:
        scales = tl.load(v_scale_ptr + row % num_heads // group, mask=in_range, other=1.0)
        out *= scales[:, None]
    elements = row[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + elements, out.to(out_ptr.dtype.element_ty), mask=mask)
