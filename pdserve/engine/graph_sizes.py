"""Sizes of the steps that are captured as CUDA graphs, and which size a step takes.

They are numbers of sequences for steps of decodes alone, and numbers of rows for steps with
prompts. Knows no device, so that engines on paper use the same rules.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

FINE = range(64, 513, 64)
COARSE = (*range(640, 1025, 128), *range(1280, 2561, 256), 3072)
WIDE = range(3584, 8193, 512)
DENSE_ROWS = 1024  # of a rank that has whole layers; for more, the device is slower than the host
ALIGNED = 4  # arrays of a step begin at multiples of so many numbers


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture. Padding costs little where a step mostly reads weights, and less than
    7 % above 128."""
    sizes = [1, 2, 4, *range(8, 129, 8), *range(144, max_num_seqs + 16, 16)]
    return sorted({min(size, max_num_seqs) for size in sizes})


def prompt_sizes(max_rows: int, has_experts: bool, stage_ranks: int) -> list[int]:
    """Numbers of rows to capture, at most max_rows.

    The host is slower than the device up to about DENSE_ROWS rows: a worker that also answers
    routers needs 19 ms for the launches of such a step. If several ranks share a layer, or if it
    has experts, there are more kernels for less work: then the sizes go on to the largest of
    COARSE. With both they go on to the largest of WIDE. If that is more than max_rows, a full step
    is captured too, because under load most steps with prompts are nearly full."""
    shares_layers = stage_ranks > 1
    largest = COARSE[-1] if has_experts or shares_layers else DENSE_ROWS
    sizes = [size for size in (*FINE, *COARSE) if size <= min(largest, max_rows)]
    if has_experts and shares_layers:
        sizes += [size for size in WIDE if size <= max_rows]
        full = max_rows - max_rows % ALIGNED
        if 0 < full < WIDE[-1] and full not in sizes:
            sizes.append(full)
    return sizes


def nearest_size(sizes: Sequence[int], num_rows: int) -> int:
    """The smallest of these sizes that holds a step; 0 if there is none."""
    index = bisect_left(sizes, num_rows)
    return sizes[index] if index < len(sizes) else 0


def fast_sizes(seconds: Mapping[int, float]) -> list[int]:
    """Returns the sizes, in order, that take less time than every larger one. A library may have a
    slow product for one number of rows: on an H200, 448 rows take longer than 512."""
    fast: list[int] = []
    least = math.inf
    for size in sorted(seconds, reverse=True):
        if seconds[size] < least:
            fast.append(size)
            least = seconds[size]
    return fast[::-1]


def representative(sizes: Sequence[int]) -> list[int]:
    """Returns the largest of the sizes up to each power of two, largest first. Nearly all kernels
    of the other sizes are theirs."""
    return sorted({(size - 1).bit_length(): size for size in sorted(sizes)}.values(), reverse=True)
