"""Products of activations with a weight matrix, fused with their neighbours in a layer.

The residual stream of a model passes through as an opaque value. It may hold a sum over ranks that
the next norm finishes. So a caller must use the stream that it gets back, and no longer the old
one. The hidden rows of an MLP are opaque too: their gate may be left to the product that takes
them. A scheme of storing weights has a LinearOps for each kind of device (`schemes/`). For dense
weights these are reference.py and triton_ops.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pdserve.kernels.collective.ops import Stream, normed
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.norm.ops import Activation, Norm, NormOps

Product = Callable[[Tensor, Matrix], Tensor]
"""The type of a product without anything beside it."""


@dataclass(frozen=True, slots=True)
class Ungated:
    """Rows whose gate is left to the product that takes them.

    product: `[T, 2 * I]`, gate and up.
    """

    product: Tensor
    activation: Activation

    def __len__(self) -> int:
        return len(self.product)

    def __getitem__(self, rows: slice) -> "Ungated":
        return Ungated(self.product[rows], self.activation)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the rows have with the gate, `[T, I]`."""
        return len(self.product), self.product.shape[1] // 2

    @property
    def dtype(self) -> torch.dtype:
        return self.product.dtype


Hidden = Tensor | Ungated


class LinearOps(Protocol):
    @property
    def linear_into(self) -> Callable[[Any, Matrix, Tensor], object] | None:
        """A function that writes the result of `linear` to a tensor with contiguous rows. None: the
        ops have no product that does so without a copy."""
        ...

    def linear(self, x: Any, m: Matrix) -> Tensor:
        """Computes `x @ m.T + bias`; x [T, in] -> [T, out]. x is a tensor. Ops whose norm_gated
        returns Ungated take that here, too."""
        ...

    def norm_linear(self, stream: Stream, norm: Norm, m: Matrix) -> tuple[Tensor, Tensor]:
        """Returns linear() of the normed stream, and the finished stream."""
        ...

    def norm_gated(
        self,
        stream: Stream,
        norm: Norm,
        m: Matrix,
        activation: Activation,
        may_leave_gate: bool = False,
    ) -> tuple[Hidden, Tensor]:
        """Runs norm_linear with gate and up in one matrix [2 * I, in], then the gate. Returns
        [T, I] and the finished stream.

        may_leave_gate: the result goes to `linear` or `add_linear` of these ops and to nothing
            else, so it may be Ungated.
        """
        ...

    def add_linear(
        self, stream: Tensor, x: Any, m: Matrix, post_norm: Norm | None = None
    ) -> Tensor:
        """Returns the stream with linear(x) added. If post_norm is given, linear(x) is normed by it
        first. x is as in `linear`."""
        ...


class Composed:
    """LinearOps of a kind of matrix that has a product but no fused kernels."""

    linear_into = None

    def __init__(self, product: Product, norms: NormOps) -> None:
        self.linear = product
        self._norms = norms

    def norm_linear(self, stream: Stream, norm: Norm, m: Matrix) -> tuple[Tensor, Tensor]:
        x, finished = normed(stream, norm, self._norms)
        return self.linear(x, m), finished

    def norm_gated(
        self,
        stream: Stream,
        norm: Norm,
        m: Matrix,
        activation: Activation,
        may_leave_gate: bool = False,
    ) -> tuple[Tensor, Tensor]:
        product, finished = self.norm_linear(stream, norm, m)
        return self._norms.gate(product, activation), finished

    def add_linear(
        self, stream: Tensor, x: Tensor, m: Matrix, post_norm: Norm | None = None
    ) -> Tensor:
        added = self.linear(x, m)
        return stream + (self._norms.rms_norm(added, post_norm) if post_norm else added)
