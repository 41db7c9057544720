"""Random numbers that depend on (key, element index) alone: not on device, dtype or chunking.

torch.Generator draws differently on CPU and CUDA and by dtype, so two workers with one seed could
hold different dummy weights under one fingerprint. Here each element hashes its index (splitmix64,
Steele et al. 2014) in integer arithmetic, which is exact everywhere. models/weights.py uses it for
load_format="dummy".
"""

import hashlib
from collections.abc import Sequence

import torch

# Elements hashed at once. On CPU the int64 temporaries must stay in the cache (ten times faster).
# Elsewhere a chunk only bounds their memory to a few hundred MiB.
CPU_CHUNK = 1 << 16
DEVICE_CHUNK = 1 << 24
MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB
SUM_STD = (4 * ((1 << 32) - 1) / 12) ** 0.5  # of the sum of four uniform integers of 16 bits
SUM_MEAN = 2 * 65535


def fill_normal(
    target: torch.Tensor,
    std: float,
    key: str,
    first: Sequence[int] = (),
    whole: Sequence[int] = (),
) -> None:
    """Fills `target`, whose rows are contiguous, in place with nearly normal numbers of the given
    std (sums of four uniforms).

    first, whole: if target is a window of a larger tensor, where it begins there and the shape of
        that tensor, whose numbers it gets. () if target is the whole tensor.
    """
    start = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    if tuple(whole) == tuple(target.shape):
        whole = ()
    flat = target.view(-1) if target.is_contiguous() else target.new_empty(target.numel())
    chunk = CPU_CHUNK if target.device.type == "cpu" else DEVICE_CHUNK
    for begin in range(0, flat.numel(), chunk):
        piece = flat[begin : begin + chunk]
        index = torch.arange(begin, begin + piece.numel(), device=target.device)
        if whole:
            index = _index_in_whole(index, target.shape, first, whole)
        bits = _splitmix64(start, index)
        sums = sum((bits >> shift) & 0xFFFF for shift in (0, 16, 32, 48))
        assert isinstance(sums, torch.Tensor)
        piece.copy_((sums - SUM_MEAN).float() * (std / SUM_STD))
    if not target.is_contiguous():
        target.copy_(flat.view(target.shape))


def _index_in_whole(
    index: torch.Tensor, shape: Sequence[int], first: Sequence[int], whole: Sequence[int]
) -> torch.Tensor:
    """Returns the places of a window's elements in the flat tensor that it belongs to."""
    found = torch.zeros_like(index)
    stride = 1
    for axis in reversed(range(len(shape))):
        found += (index % shape[axis] + first[axis]) * stride
        index = index // shape[axis]
        stride *= whole[axis]
    return found


def _splitmix64(start: int, index: torch.Tensor) -> torch.Tensor:
    """Returns 64 random bits for each int64 index. Products wrap. Shifts become logical by masking
    the copies of the sign."""
    z = index * _signed(GOLDEN) + _signed(start)
    z = (z ^ ((z >> 30) & (MASK64 >> 30))) * _signed(MIX1)
    z = (z ^ ((z >> 27) & (MASK64 >> 27))) * _signed(MIX2)
    return z ^ ((z >> 31) & (MASK64 >> 31))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
