"""Makes keys of counter-based random numbers. A draw is a function of (seed, choice, position,
purpose, global token id) and of nothing else.

So a request resumes anywhere, in any batch, on any TP degree, with the same draws. Every token id
has its own number, and a rank that holds a part of the vocabulary computes only that part. The host
knows all coordinates of a row and makes its key here. Kernels (`kernels.sampling.reference.gumbel`)
turn keys and token ids into noise. Called by the sampler.
"""

from enum import IntEnum

import numpy as np

MASK_32 = 0xFFFFFFFF


class Purpose(IntEnum):
    """Draws for different purposes at one position are independent."""

    SAMPLE = 0
    SPECULATIVE_ACCEPT = 1
    SPECULATIVE_REJECT = 2


def _mix(h: np.ndarray) -> np.ndarray:
    """Same as `kernels.sampling.reference.mix_32`. The low 32 bits of wrapped int64 products are
    exact."""
    h = (h ^ (h >> 16)) * 0x7FEB352D & MASK_32
    h = (h ^ (h >> 15)) * 0x846CA68B & MASK_32
    return h ^ (h >> 16)


def row_keys(
    seeds: np.ndarray, choices: np.ndarray, positions: np.ndarray, purpose: Purpose
) -> np.ndarray:
    """Returns int32 `[rows]`, the 32 bits of each row's key at its (seed, choice, position). All
    inputs are int64 `[rows]`."""
    h = _mix((seeds & MASK_32) ^ 0x9E3779B9)
    h = _mix(h ^ ((seeds >> 32) & MASK_32))
    h = _mix(h ^ ((choices * 0x85EBCA6B) & MASK_32))
    h = _mix(h ^ ((positions * 0xC2B2AE35) & MASK_32))
    return _mix(h ^ (int(purpose) * 0x27D4EB2F & MASK_32)).astype(np.uint32).view(np.int32)
