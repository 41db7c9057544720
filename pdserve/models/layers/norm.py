"""Norms."""

from collections.abc import Mapping

from torch import Tensor

from pdserve.kernels.norm.ops import Norm
from pdserve.models.layers.context import LayerContext
from pdserve.models.weights import Init, Part, Plain, Weight


class RmsNorm:
    """Root-mean-square norm of rows `[width]`; every rank has all of it. eps: by default the
    model's. value: what ops take."""

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
