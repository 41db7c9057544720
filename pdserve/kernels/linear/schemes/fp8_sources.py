"""How checkpoints hold weights in e4m3: with a scale for the whole module, for each row, or for
blocks of 128 x 128 (DeepSeek-V3, Qwen3-FP8).

A scale of calibrated activations (`input_scale`) is not used: activations are scaled by row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.linear.schemes.fp8 import BLOCK, E4M3
from pdserve.kernels.linear.schemes.scheme import Cut, Pieces
from pdserve.kernels.linear.schemes.source import Read

SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
ONE = ((), (1,), (1, 1))  # shapes of a scale for all


@dataclass(frozen=True)
class Fp8Source:
    """`weight` e4m3 `[out, in]`. scale: name of the scales: one, `[]`, `[1]` or `[1, 1]`; with
    has_rows one for each row, `[out, 1]` or `[out]`."""

    has_rows: bool
    scale: str = "weight_scale"

    def reads(self, cut: Cut) -> Mapping[str, Read]:
        by_row = Read(((cut.of_rows, 1), (cut.of_rows,)), (cut.rows,), SCALES)
        return {
            "weight": _weight(cut),
            self.scale: by_row if self.has_rows else Read(ONE, (), SCALES),
            "input_scale": Read(ONE, (), SCALES, optional=True),
        }

    def pieces(self, raw: Mapping[str, Tensor], cut: Cut) -> Pieces:
        scales = _checked(raw, self.scale).reshape(-1, 1).expand(cut.num_rows, 1)
        return Pieces(raw["weight"], scales)


@dataclass(frozen=True)
class Fp8BlockSource:
    """`weight` e4m3 `[out, in]`. scale: name of the scales, `[out / 128, in / 128]`, rounded up;
    DeepSeek's "inv" notwithstanding, numbers are multiplied by them."""

    scale: str = "weight_scale_inv"

    def reads(self, cut: Cut) -> Mapping[str, Read]:
        shape = _blocks(slice(0, cut.of_rows)).stop, _blocks(slice(0, cut.of_columns)).stop
        window = _blocks(cut.rows), _blocks(cut.columns)
        return {"weight": _weight(cut), self.scale: Read((shape,), window, SCALES)}

    def pieces(self, raw: Mapping[str, Tensor], cut: Cut) -> Pieces:
        scales = _checked(raw, self.scale)
        offset = cut.rows.start % BLOCK
        return Pieces(raw["weight"], scales, group=(BLOCK, BLOCK), offset=offset)


def _weight(cut: Cut) -> Read:
    return Read(((cut.of_rows, cut.of_columns),), (cut.rows, cut.columns), (E4M3,))


def _blocks(numbers: slice) -> slice:
    """The blocks that these rows, or columns, touch."""
    return slice(numbers.start // BLOCK, -(-numbers.stop // BLOCK))


def _checked(raw: Mapping[str, Tensor], name: str) -> Tensor:
    """The scales, float32."""
    scales = raw[name].float()
    if not bool((scales.isfinite() & (scales >= 0)).all()):
        raise ValueError(
            f"{name} holds numbers that are no scales (not finite, or below 0): is the file "
            "damaged?"
        )
    return scales
