"""KVCache: the memory of one rank's blocks, and views of each layer's rows in it.

Knows the layout. Knows neither who owns a block (block_manager) nor what is in it. Made by
`kv_cache_size.allocate_kv_cache`; the staging ring makes its own.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pdserve.configs.kv_layout import ALIGNMENT, DTYPE_BYTES, KVLayout, LayerGroup
from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.kv.ops import NO_SCALES, RowScales

FP8 = "fp8_e4m3"
TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    FP8: torch.float8_e4m3fn,
}


class KVCache:
    """One rank's blocks, and views of them.

    - data: uint8 `[num_blocks, layout.block_bytes]`, contiguous. The tensors below are views of it.
    - groups: for each group of layers `[num_blocks, kv_heads, layers, planes, block_size,
      row_width]`. Each block of a group is contiguous.
    - layers: by global id `[num_blocks, kv_heads, planes, block_size, row_width]`.
    - scales: for each group float32 `[kv_heads, layers, planes]`, the divisors of rows in e4m3;
      None where all are 1. They are no views of data.
    """

    def __init__(
        self, memory: Tensor, layout: KVLayout, scales: Mapping[int, RowScales] = NO_SCALES
    ) -> None:
        """Make views of `memory`, a tensor of any dtype and shape. scales: by layer. ValueError if
        the memory is not one contiguous piece of whole blocks."""
        if not memory.is_contiguous():
            raise ValueError(
                "the KV cache must be one contiguous tensor: allocate it whole and pass it unsliced"
            )
        if memory.nbytes % layout.block_bytes:
            raise ValueError(
                f"the KV cache must be whole blocks of {layout.block_bytes} bytes, not "
                f"{memory.nbytes} bytes"
            )
        self.layout = layout
        self.data = memory.view(-1).view(torch.uint8).view(-1, layout.block_bytes)
        self.groups = tuple(self._group(number) for number in range(len(layout.groups)))
        self.layers = {
            layer: rows
            for group, views in zip(layout.groups, self.groups, strict=True)
            for layer, rows in zip(group.layers, views.unbind(2), strict=True)
        }
        self.scales = tuple(self._scales(group, scales) for group in layout.groups)

    @property
    def num_blocks(self) -> int:
        return self.data.shape[0]

    @property
    def device(self) -> torch.device:
        return self.data.device

    def _group(self, number: int) -> Tensor:
        dtype = TORCH_DTYPES[self.layout.groups[number].dtype]
        shape = self.layout.shapes[number]
        start = self.layout.offsets[number]
        used = torch.Size(shape).numel() * dtype.itemsize
        return self.data[:, start : start + used].view(dtype).unflatten(1, shape)

    def _scales(self, group: LayerGroup, scales: Mapping[int, RowScales]) -> Tensor | None:
        if scales.keys().isdisjoint(group.layers):
            return None
        found = torch.ones(len(group.heads), len(group.layers), group.planes, device=self.device)
        for index, layer in enumerate(group.layers):
            if layer in scales:
                found[:, index] = torch.stack((scales[layer].k, scales[layer].v), 1)
        return found


def layout_of(
    attention: Mapping[int, AttentionSpec],
    block_size: int,
    dtype: str,
    peer_stages: Sequence[range] = (),
) -> KVLayout:
    """The layout for these layers. Layers that store rows of the same shape form a group, or with
    peer_stages one group for each of a peer's stages: so the layers that a peer rank has are one
    piece of memory. (Rows that are too short for several groups stay in one.)"""
    bytes_of = DTYPE_BYTES[dtype]
    if any(spec.row_width * bytes_of % ALIGNMENT for spec in attention.values()):
        peer_stages = ()
    groups: dict[tuple[range, int, int, int], list[int]] = {}
    for layer, spec in attention.items():
        heads = range(spec.first_kv_head, spec.first_kv_head + spec.num_kv_heads)
        stage = next((n for n, layers in enumerate(peer_stages) if layer in layers), 0)
        groups.setdefault((heads, spec.planes, spec.row_width, stage), []).append(layer)
    return KVLayout(
        groups=tuple(
            LayerGroup(
                layers=tuple(layers),
                heads=tuple(heads),
                row_width=row_width,
                planes=planes,
                dtype=dtype,
            )
            for (heads, planes, row_width, _), layers in groups.items()
        ),
        block_size=block_size,
    )
