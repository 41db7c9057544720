"""Products of activations with a weight matrix, fused with what stands around them in a layer.

The residual stream of a model passes through opaquely: a sum over ranks may be left in it that the
next norm finishes, so a caller uses the stream that it is given back, and the old one no more. A
scheme of storing weights brings a LinearOps for each kind of device (`schemes/`); reference.py and
triton_ops.py are those of dense weights.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pdserve.kernels.collective.ops import Stream, normed
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.norm.ops import Activation, Norm, NormOps

Product = Callable[[Tensor, Matrix], Tensor]
"""`LinearOps.linear`."""


class LinearOps(Protocol):
    def linear(self, x: Tensor, m: Matrix) -> Tensor:
        """`x @ m.T + bias`; x [T, in] -> [T, out]."""
        ...

    def norm_linear(self, stream: Stream, norm: Norm, m: Matrix) -> tuple[Tensor, Tensor]:
        """linear of the normed stream, and the stream, finished."""
        ...

    def norm_gated(
        self, stream: Stream, norm: Norm, m: Matrix, activation: Activation
    ) -> tuple[Tensor, Tensor]:
        """norm_linear with gate and up in one matrix [2 * I, in], then the gate; [T, I]."""
        ...

    def add_linear(
        self, stream: Tensor, x: Tensor, m: Matrix, post_norm: Norm | None = None
    ) -> Tensor:
        """The stream with linear(x) added, normed by post_norm before if given."""
        ...


class Composed:
    """LinearOps of a kind of matrix that has a product and no more."""

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
