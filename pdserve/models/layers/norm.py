"""Norms that layers are made with."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pdserve.kernels.norm.ops import Norm
from pdserve.models.layers.context import LayerContext
from pdserve.models.weights import Init, Part, Plain, Weight


class RmsNorm:
    """Root-mean-square norm of rows `[width]`. Every rank has all of it.

    eps: by default the model's.
    value: what ops take.
    """

    value: Norm

    def __init__(
        self, context: LayerContext, module: str, width: int, eps: float | None = None
    ) -> None:
        self._context = context
        self._eps = context.spec.rms_eps if eps is None else eps
        weights = context.weights
        init: Init = "zeros" if context.spec.plus_one_norms else "ones"
        part = Part(module, width)
        plain = {"weight": Plain((), weights.dtype, init)}
        weights.add(Weight([part], plain, weights.device, self._finish))

    def __call__(self, x: Tensor) -> Tensor:
        return self._context.ops.norm.rms_norm(x, self.value)

    def _finish(self, tensors: Mapping[str, Tensor]) -> None:
        spec = self._context.spec
        self.value = Norm(tensors["weight"], self._eps, spec.plus_one_norms)


class NormOfHeads:
    """Root-mean-square norm over all heads of q, or of k, together (OLMo 2). If ranks share the
    heads, each needs the squares of all.

    part: the rank's heads in the projection.
    """

    def __init__(self, context: LayerContext, module: str, part: Part) -> None:
        self._context = context
        self._part = part
        weights = context.weights
        own = replace(part, module=module, order=())
        plain = {"weight": Plain((), weights.dtype, "ones")}
        weights.add(Weight([own], plain, weights.device, self._finish))

    def __call__(self, x: Tensor) -> Tensor:
        """Computes the norm of x `[T, this rank's heads * D]`."""
        if self._context.dims.tp == 1:
            return self._context.ops.norm.rms_norm(x, self._value)
        wide = x.float()
        squares = self._of_all_ranks(wide.square().sum(-1, keepdim=True))
        scale = torch.rsqrt(squares / self._part.rows + self._value.eps)
        return (wide * scale).to(x.dtype) * self._value.weight

    def _of_all_ranks(self, own: Tensor) -> Tensor:
        """Returns the sum of float32 `[T, 1]` over the ranks, with each KV head counted once.
        Collectives add up rows of the stream's width and dtype. So each rank sends its numbers as
        bytes in columns of its own, which loses nothing."""
        dims = self._context.dims
        rows = own.new_zeros(
            len(own), self._context.spec.hidden_size, dtype=self._context.weights.dtype
        )
        columns = slice(4 * dims.tp_rank, 4 * dims.tp_rank + 4)
        rows[:, columns] = own.contiguous().view(torch.uint8).to(rows.dtype)
        sent = self._context.ops.collective.sum(rows)[:, : 4 * dims.tp]
        each = sent.to(torch.uint8).contiguous().view(torch.float32)
        return each.sum(-1, keepdim=True) / (dims.tp // self._part.count)

    def _finish(self, tensors: Mapping[str, Tensor]) -> None:
        self._value = Norm(tensors["weight"], self._context.spec.rms_eps)
