"""The KV cache of the paper model: a digest of 8 bytes a token, which the ranks of its engine share
as they would heads.

Used by engine/harness.py, which computes and checks rows, and by the hand-over machine, which moves
them.
"""

from collections.abc import Sequence

import numpy as np
import torch

from pdserve.configs.kv_layout import KVLayout, LayerGroup
from pdserve.engine.memory.kv_cache import KVCache

HALVES = 2  # of a digest: heads of 4 bytes
HALF_BYTES = 4

Blocks = int | Sequence[int]


class PaperRows:
    """Indexed as int64 `[blocks, block_size]`. parts: of each rank, int32 `[blocks, heads,
    block_size]`."""

    def __init__(self, num_blocks: int, block_size: int, num_ranks: int = 1) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, HALVES // num_ranks, block_size)
        self.parts = [np.full(shape, -1, dtype=np.int32) for _ in range(num_ranks)]

    def __getitem__(self, blocks: Blocks) -> np.ndarray:
        """A copy."""
        halves = np.concatenate([part[blocks] for part in self.parts], axis=-2)
        digits = np.ascontiguousarray(halves.swapaxes(-1, -2))
        return digits.view(np.int64)[..., 0]

    def write(self, block: int, offset: int, digest: int) -> None:
        halves = np.array([digest], dtype=np.int64).view(np.int32)
        for part, own in zip(self.parts, np.split(halves, len(self.parts)), strict=True):
            part[block, :, offset] = own

    def copy_block(self, source: int, target: int) -> None:
        for part in self.parts:
            part[target] = part[source]

    def copy(self) -> "PaperRows":
        made = PaperRows(self.num_blocks, self.block_size, len(self.parts))
        made.parts = [part.copy() for part in self.parts]
        return made

    def kv_cache(self, rank: int) -> KVCache:
        """A rank's part, over the same memory."""
        part = self.parts[rank]
        held = part.shape[1]
        group = LayerGroup(
            layers=(0,),
            heads=tuple(range(rank * held, (rank + 1) * held)),
            planes=1,
            row_width=1,
            dtype="float32",
        )
        data = torch.from_numpy(part).view(torch.uint8).view(len(part), -1)
        return KVCache(data, KVLayout(groups=(group,), block_size=self.block_size))
