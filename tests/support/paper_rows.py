"""The KV cache of the paper model: a digest of 8 bytes a token, which the ranks of its engine share
as they would heads and layers.

Used by engine/harness.py, which computes and checks rows, and by the hand-over machine, which moves
them.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from support.shares import ONE_RANK, Degrees, dims_of, num_ranks, share_of

from pdserve.configs.kv_layout import KVLayout, LayerGroup
from pdserve.engine.memory.kv_cache import FP8, KVCache

HEADS, LAYERS = 2, 2  # a head of a layer has 2 bytes of the digest
ROW_BYTES = 8

Form = Literal["bytes", "codes", "numbers"]
"""The form in which rows are moved: 16 bits, two numbers in e4m3, or these numbers in float16,
which can be rounded to those in e4m3."""

Blocks = int | Sequence[int]


class PaperRows:
    """Indexed as int64 `[blocks, block_size]`: blocks of home 0 first, then those of the others.

    `parts` are those of each rank of a home, over the blocks of all homes, int16 `[blocks, heads,
    layers, block_size]`. Those of numbers are float16, with two of them last. `degrees` are those
    of all ranks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        degrees: Degrees = ONE_RANK,
        form: Form = "bytes",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._degrees = degrees
        self._form = form
        one_home = degrees._replace(dp=1)
        self._shares = [
            share_of(rank, one_home, HEADS, LAYERS) for rank in range(num_ranks(one_home))
        ]
        whole = np.full((num_blocks, HEADS, LAYERS, block_size), -1, dtype=np.int16)
        if form == "numbers":
            whole = _numbers(whole)
        self.parts = [whole[:, heads, layers].copy() for heads, layers in self._shares]

    def __getitem__(self, blocks: Blocks) -> np.ndarray:
        """A copy."""
        digits = np.empty((*np.shape(blocks), self.block_size, HEADS, LAYERS), dtype=np.int16)
        for part, (heads, layers) in zip(self.parts, self._shares, strict=True):
            found = _codes(part[blocks]) if self._form == "numbers" else part[blocks]
            digits[..., heads, layers] = np.moveaxis(found, -1, -3)
        return digits.reshape(*digits.shape[:-2], HEADS * LAYERS).view(np.int64)[..., 0]

    def write(self, block: int, offset: int, digest: int) -> None:
        digits = np.array([digest], dtype=np.int64).view(np.int16).reshape(HEADS, LAYERS)
        for part, share in zip(self.parts, self._shares, strict=True):
            found = digits[share]
            part[block, :, :, offset] = _numbers(found) if self._form == "numbers" else found

    def copy_block(self, source: int, target: int) -> None:
        for part in self.parts:
            part[target] = part[source]

    def copy(self) -> "PaperRows":
        made = PaperRows(self.num_blocks, self.block_size, self._degrees, self._form)
        made.parts = [part.copy() for part in self.parts]
        return made

    def kv_cache(self, rank: int) -> KVCache:
        """A rank's part of its home's blocks, over the same memory."""
        dims = dims_of(rank, self._degrees)
        place = dims.tp_rank + dims.tp * dims.pp_rank
        count = self.num_blocks // dims.dp
        part = self.parts[place][dims.home * count :][:count]
        heads, layers = self._shares[place]
        group = LayerGroup(
            layers=tuple(range(LAYERS)[layers]),
            heads=tuple(range(HEADS)[heads]),
            planes=1,
            row_width=1 if self._form == "bytes" else 2,
            dtype=FP8 if self._form == "codes" else "float16",
        )
        data = torch.from_numpy(part).flatten(1).view(torch.uint8)
        return KVCache(data, KVLayout(groups=(group,), block_size=self.block_size))


def _numbers(digits: np.ndarray) -> np.ndarray:
    """Turns int16 into float16 `[..., 2]`."""
    return _cast(digits[..., None].view(np.uint8), torch.float8_e4m3fn, torch.float16, np.float16)


def _codes(numbers: np.ndarray) -> np.ndarray:
    """Turns float16 `[..., 2]` into int16."""
    codes = _cast(numbers, torch.float16, torch.float8_e4m3fn, np.uint8)
    return codes.view(np.int16)[..., 0]


def _cast(given: np.ndarray, source: torch.dtype, target: torch.dtype, bits: Any) -> np.ndarray:
    tensor = torch.from_numpy(np.ascontiguousarray(given).view(np.uint8)).view(source).to(target)
    found: np.ndarray = tensor.view(torch.uint8).numpy().view(bits)
    return found
