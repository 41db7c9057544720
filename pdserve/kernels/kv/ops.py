"""The interface of operations on rows and blocks of the KV cache. reference.py says the shapes and
implements it in plain torch; triton_ops.py implements it in Triton."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from pdserve.kernels.norm.ops import Norm


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The RMS norms of query and key heads that some models apply before the rotation (Qwen3). One
    weight `[D]` serves all heads of q, another one all heads of k."""

    q: Norm
    k: Norm


@dataclass(frozen=True, slots=True)
class RowScales:
    """The scales of one layer's keys and values in e4m3, float32 `[Hk]` each. A stored number times
    its head's scale is the true number. Scales are powers of two, so that scaling is exact."""

    k: Tensor
    v: Tensor


NO_SCALES: Mapping[int, RowScales] = MappingProxyType({})
"""Scales by layer where all are 1."""


class KVOps(Protocol):
    def rope_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        kv: Tensor,
        slot_mapping: Tensor,
        norms: HeadNorms | None = None,
        scales: RowScales | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Writes into kv, and may norm, rotate and round in place. Use the returned q, k and v; the
        given ones are no longer valid.

        norms: None for models whose heads have none.
        scales: those of a kv in e4m3; None: all are 1.
        """
        ...

    def copy_blocks(self, kv_cache: Tensor, src: Tensor, dst: Tensor) -> None: ...

    def repack(
        self,
        source: Tensor,
        source_ids: Tensor,
        kv_cache: Tensor,
        block_ids: Tensor,
        skip: int,
        num_rows: int,
        scales: Tensor | None = None,
    ) -> None: ...
