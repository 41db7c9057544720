"""Rows of a KV cache in e4m3: what is written, and that attention sees nothing else."""

import math

import pytest
import torch
from torch import Tensor

from pdserve.kernels.attention import reference as attention
from pdserve.kernels.attention.spec import AttentionSpec, Paged
from pdserve.kernels.e4m3 import E4M3, LARGEST
from pdserve.kernels.kv import reference as kv_ops
from pdserve.kernels.kv.ops import RowScales

HEADS, KV_HEADS, DIM, BLOCK, ROWS = 6, 2, 16, 16, 40
SCALES = RowScales(torch.tensor([0.25, 2.0]), torch.tensor([0.5, 2.0**-6]))


def rows() -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(ROWS, HEADS, DIM)
    k, v = torch.randn(2, ROWS, KV_HEADS, DIM).unbind()
    k[3, 0, 5] = 1e6  # past the largest number
    return q, k, v


def tables() -> tuple[Tensor, Tensor]:
    angles = torch.rand(ROWS, DIM // 2) * math.tau
    return angles.cos(), angles.sin()


def cache(dtype: torch.dtype) -> Tensor:
    """Returns one layer of a KV cache that has three."""
    return torch.zeros(8, KV_HEADS, 3, 2, BLOCK, DIM).to(dtype)[:, :, 1]


@pytest.mark.parametrize("scales", [None, SCALES])
def test_attention_is_that_over_the_rounded_rows_bit_for_bit(scales: RowScales | None) -> None:
    """Powers of two change no rounding: neither in the scores nor in the sum of values."""
    q, k, v = rows()
    cos, sin = tables()
    positions = torch.arange(ROWS)
    slots = positions + BLOCK  # block 0 is the null block
    kv = cache(E4M3)
    scaled, codes_k, codes_v = kv_ops.rope_write_kv(
        q, k, v, cos, sin, positions, kv, slots, None, scales
    )
    k_scale, v_scale = (
        torch.ones(2, KV_HEADS) if scales is None else torch.stack((scales.k, scales.v))
    )
    rotated_q, rotated_k = kv_ops.apply_rope(q, k, cos, sin, positions)
    rounded = [
        (x / s[:, None]).clamp(-LARGEST, LARGEST).to(E4M3).float() * s[:, None]
        for x, s in ((rotated_k, k_scale), (v, v_scale))
    ]
    plain = cache(torch.float32)
    kv_ops.write_kv(rounded[0], rounded[1], plain, slots)
    paged = Paged(
        torch.arange(8, dtype=torch.int32)[None, 1:4].contiguous(),
        torch.zeros(ROWS, dtype=torch.int32),
        torch.arange(1, ROWS + 1, dtype=torch.int32),
        ROWS,
    )
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5)
    want = attention.decode(rotated_q, plain, paged, spec)
    made = attention.decode(scaled, kv, paged, spec, None, None if scales is None else scales.v)
    assert torch.equal(made, want)
    unrounded = cache(torch.float32)
    kv_ops.write_kv(rotated_k, v, unrounded, slots)
    assert not torch.equal(attention.decode(rotated_q, unrounded, paged, spec), want)
    for codes, x, s in ((codes_k, rounded[0], k_scale), (codes_v, rounded[1], v_scale)):
        assert codes.dtype == q.dtype and torch.equal(codes * s[:, None], x)


def test_a_cache_in_16_bits_is_written_as_it_was() -> None:
    q, k, v = (x.bfloat16() for x in rows())
    cos, sin = tables()
    positions = torch.arange(ROWS)
    kv = cache(torch.bfloat16)
    made_q, made_k, made_v = kv_ops.rope_write_kv(
        q, k, v, cos, sin, positions, kv, positions, None, None
    )
    want_q, want_k = kv_ops.apply_rope(q, k, cos, sin, positions)
    assert torch.equal(made_q, want_q) and torch.equal(made_k, want_k) and torch.equal(made_v, v)
    assert torch.equal(kv[1, :, 0, 3], want_k[BLOCK + 3])


def test_blocks_are_copied_and_repacked_as_bytes() -> None:
    source = torch.randint(0, 256, (4, KV_HEADS, 3, 2, 16, DIM), dtype=torch.uint8)
    target = torch.zeros(2, KV_HEADS, 3, 2, 64, DIM, dtype=torch.uint8)
    ids = torch.tensor([2, 0, 3], dtype=torch.int32)
    kv_ops.repack(source.view(E4M3), ids, target.view(E4M3), torch.tensor([1]), 16, 32)
    assert torch.equal(target[1, :, :, :, :16], source[0])
    assert torch.equal(target[1, :, :, :, 16:32], source[3])
