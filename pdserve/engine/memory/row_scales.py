"""Puts the scales of one rank's KV rows on its device."""

from collections.abc import Mapping

import torch

from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.kv.ops import RowScales
from pdserve.models.kv_scales import KvScales


def row_scales(
    scales: KvScales | None, attention: Mapping[int, AttentionSpec], device: torch.device
) -> dict[int, RowScales]:
    """Scales by layer, without the layers whose scales are all 1."""
    if scales is None:
        return {}
    found = {}
    for layer, spec in attention.items():
        heads = slice(spec.first_kv_head, spec.first_kv_head + spec.num_kv_heads)
        k, v = scales.k[layer][heads], scales.v[layer][heads]
        if set(k + v) != {1.0}:
            found[layer] = RowScales(*(torch.tensor(each, device=device) for each in (k, v)))
    return found
