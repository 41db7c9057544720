"""KVLayout: the shape of one rank's KV cache, and every number derived from it.

A block is one contiguous piece of memory for all layers. It holds one part for each group of layers
whose rows have the same shape, laid out as `[kv_heads, layers, planes, block_size, row_width]`. A
whole block, or a range of a group's KV heads, therefore moves with one transfer descriptor, which
costs about 5 us on NVLink whatever its size. Kernels, engine and kvtransfer take a KVLayout and
hard-code nothing. This module imports no torch and knows no addresses and no devices.
"""

import hashlib
from collections.abc import Iterable
from itertools import accumulate
from math import lcm
from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1}
ALIGNMENT = 16  # bytes that a kernel reads with one instruction


class LayerGroup(BaseModel):
    """Layers that store rows of the same shape inside a block.

    layers: global layer ids in storage order.
    heads: *global* ids of the KV heads that this rank stores.
    planes: 2 for K and V, 1 for a joint latent row.
    row_width: number of elements of one token's row in one plane of one head.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    row_width: int
    planes: int = 2
    dtype: str = "float32"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {sorted(DTYPE_BYTES)}, not {self.dtype!r}")
        if not self.layers or not self.heads or self.row_width < 1 or self.planes not in (1, 2):
            raise ValueError("a layer group needs layers, heads, row_width >= 1 and 1 or 2 planes")
        return self

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row in one plane of one head."""
        return self.row_width * DTYPE_BYTES[self.dtype]


class KVLayout(BaseModel):
    """One rank's KV cache: blocks of `block_size` tokens, in which each group has a part.

    A token costs token_bytes for every block size. With several groups, the end of a block is
    padded so that token_bytes is a multiple of each group's row size, because kernels address one
    layer of the whole KV cache as a matrix of its rows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    groups: tuple[LayerGroup, ...]
    block_size: int

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, not {self.block_size}")
        layers = [layer for group in self.groups for layer in group.layers]
        if not layers or len(set(layers)) < len(layers):
            raise ValueError(f"groups must hold each layer once, not the layers {layers}")
        widths = [group.row_bytes for group in self.groups]
        if len(widths) > 1 and any(width % ALIGNMENT for width in widths):
            raise ValueError(
                f"the rows of several groups must be multiples of {ALIGNMENT} bytes, not {widths}"
            )
        return self

    @classmethod
    def uniform(
        cls, *, num_layers: int, heads: tuple[int, ...], head_dim: int, block_size: int, dtype: str
    ) -> Self:
        """The layout of a decoder whose layers all store K and V rows of `head_dim` for the global
        KV heads `heads`."""
        group = LayerGroup(
            layers=tuple(range(num_layers)), heads=heads, row_width=head_dim, dtype=dtype
        )
        return cls(groups=(group,), block_size=block_size)

    def with_block_size(self, block_size: int) -> "KVLayout":
        """The same rows in blocks of another size. ValueError unless that is a power of two."""
        return KVLayout(groups=self.groups, block_size=block_size)

    def with_dtype(self, dtype: str) -> "KVLayout":
        """The same layout with another dtype."""
        groups = tuple(group.model_copy(update={"dtype": dtype}) for group in self.groups)
        return KVLayout(groups=groups, block_size=self.block_size)

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int, int], ...]:
        """Each group's part of a block: `(kv_heads, layers, planes, block_size, row_width)`,
        contiguous in this order."""
        return tuple(
            (len(g.heads), len(g.layers), g.planes, self.block_size, g.row_width)
            for g in self.groups
        )

    @property
    def head_bytes(self) -> tuple[int, ...]:
        """Bytes of one KV head of each group (its layers, all planes) in one block."""
        return tuple(len(g.layers) * g.planes * self.block_size * g.row_bytes for g in self.groups)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte of a block at which each group begins."""
        sizes = [len(g.heads) * size for g, size in zip(self.groups, self.head_bytes, strict=True)]
        return tuple(accumulate(sizes[:-1], initial=0))

    @property
    def token_bytes(self) -> int:
        """Bytes of the KV cache that one token takes on this rank."""
        used = sum(len(g.heads) * len(g.layers) * g.planes * g.row_bytes for g in self.groups)
        multiple = lcm(*(g.row_bytes for g in self.groups))
        return -(-used // multiple) * multiple

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all groups together."""
        return self.block_size * self.token_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` rows."""
        return -(-num_tokens // self.block_size)


def rows_digest(model_fingerprint: str, groups: Iterable[LayerGroup]) -> str:
    """Digest of the model and of how each layer stores its rows. It is equal for two engines
    exactly when a row's bytes mean the same in both.

    groups: those of all ranks and stages together. The heads of a rank, the layers of a stage and
    the block size do not count.
    """
    formats = {
        layer: (group.planes, group.row_width, group.dtype)
        for group in groups
        for layer in group.layers
    }
    text = f"{model_fingerprint}|{sorted(formats.items())}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
