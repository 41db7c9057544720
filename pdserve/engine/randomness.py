"""Counter-based random numbers: a function of (seed, choice, position, purpose, global token id) and of nothing else.

So a request resumes anywhere, in any batch, on any TP degree, with the same draws: every token id has its own number,
and a rank that holds part of the vocabulary computes just its part. The mixer is a 32-bit finaliser (Wang/lowbias32
style) applied to each word in turn; 64-bit products wrap, of which the low 32 bits are exact on every device.
"""

from enum import IntEnum

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


class Purpose(IntEnum):
    """Draws for different purposes at one position are independent."""

    SAMPLE = 0
    SPECULATIVE_ACCEPT = 1
    SPECULATIVE_REJECT = 2


def _mix(h: Tensor) -> Tensor:
    h = (h ^ (h >> 16)) * 0x7FEB352D & _MASK
    h = (h ^ (h >> 15)) * 0x846CA68B & _MASK
    return h ^ (h >> 16)


def row_keys(seeds: Tensor, choices: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """int64 `[rows]` 32-bit keys of the draws at each row's (seed, choice, position). All inputs int64 `[rows]`."""
    h = _mix((seeds & _MASK) ^ 0x9E3779B9)
    h = _mix(h ^ ((seeds >> 32) & _MASK))
    h = _mix(h ^ ((choices * 0x85EBCA6B) & _MASK))
    h = _mix(h ^ ((positions * 0xC2B2AE35) & _MASK))
    return _mix(h ^ (int(purpose) * 0x27D4EB2F & _MASK))


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 `[rows, tokens]`, for row keys `[rows]` and global token ids `[tokens]`.

    argmax(log p + noise) draws from p (Gumbel-max). Two chained mixes a token: 32 random bits that also depend on
    keys which differ in few bits.
    """
    bits = _mix(keys[:, None] ^ _mix(token_ids * 0x9E3779B1 + 0x165667B1 & _MASK)[None, :])
    bits = _mix(bits + keys[:, None] & _MASK)
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-32
    return (-torch.log(-torch.log(uniform))).to(torch.float32)
