"""Products of activations with a weight matrix, fused with their neighbours in a layer.

The residual stream of a model passes through as an opaque value. It may hold a sum over ranks that
the next norm finishes. So a caller must use the stream that it gets back, and no longer the old
one. A scheme of storing weights has a LinearOps for each kind of device (`schemes/`). For dense
weights these are reference.py and triton_ops.py.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pdserve.kernels.collective.ops import Stream, normed
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.norm.ops import Activation, Norm, NormOps

Product = Callable[[Tensor, Matrix], Tensor]
"""The type of `LinearOps.linear`, which computes a product."""


class LinearOps(Protocol):
    def linear(self, x: Tensor, m: Matrix) -> Tensor:
        """Computes `x @ m.T + bias`; x [T, in] -> [T, out]."""
        ...

    def norm_linear(self, stream: Stream, norm: Norm, m: Matrix) -> tuple[Tensor, Tensor]:
        """Returns linear() of the normed stream, and the finished stream."""
        ...

    def norm_gated(
        self, stream: Stream, norm: Norm, m: Matrix, activation: Activation
    ) -> tuple[Tensor, Tensor]:
        """Runs norm_linear with gate and up in one matrix [2 * I, in], then the gate. Returns
        [T, I] and the finished stream."""
        ...

    def add_linear(
        self, stream: Tensor, x: Tensor, m: Matrix, post_norm: Norm | None = None
    ) -> Tensor:
        """Returns the stream with linear(x) added. If post_norm is given, linear(x) is normed by it
        first."""
        ...


class Composed:
    """LinearOps of a kind of matrix that has a product but no fused kernels."""

    def __init__(self, product: Product, norms: NormOps) -> None:
        self.linear = product
        self._norms = norms

    def norm_linear(self, stream: Stream, norm: Norm, m: Matrix) -> tuple[Tensor, Tensor]:
        x, finished = normed(stream, norm, self._norms)
        return self.linear(x, m), finished

    def norm_gated(
        self, stream: Stream, norm: Norm, m: Matrix, activation: Activation
    ) -> tuple[Tensor, Tensor]:
        product, finished = self.norm_linear(stream, norm, m)
        return self._norms.gate(product, activation), finished

    def add_linear(
        self, stream: Tensor, x: Tensor, m: Matrix, post_norm: Norm | None = None
    ) -> Tensor:
        added = self.linear(x, m)
        return stream + (self._norms.rms_norm(added, post_norm) if post_norm else added)
