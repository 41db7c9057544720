"""Projections: one matrix, or several stacked in one, stored by whatever scheme."""

from collections.abc import Mapping

from torch import Tensor

from pdserve.kernels.collective.ops import Stream
from pdserve.kernels.linear.matrix import WHOLE, Matrix, Shard
from pdserve.kernels.linear.ops import LinearOps
from pdserve.kernels.linear.schemes.dense import Dense
from pdserve.kernels.linear.schemes.scheme import Scheme, TensorSpec
from pdserve.kernels.norm.ops import Activation
from pdserve.models.layers.context import LayerContext
from pdserve.models.layers.norm import RmsNorm
from pdserve.models.quantisation import scheme_of
from pdserve.models.weights import Init, Part, Weight

DENSE = Dense()


class Linear:
    """A projection `[T, in] -> [T, out]` of this rank's rows (`parts`) and columns (`shard`).

    matrix: what ops take. num_inputs: columns that the rank has. bias: whether each part has one;
    of columns that ranks share, the first rank adds it.
    """

    matrix: Matrix

    def __init__(
        self,
        context: LayerContext,
        parts: list[Part],
        num_inputs: int,
        bias: bool,
        shard: Shard = WHOLE,
        scheme: Scheme | None = None,
    ) -> None:
        self._shard = shard
        self._collective = context.ops.collective
        self._scheme = scheme or scheme_of(context.spec.quantization, parts[0].module) or DENSE
        weights = context.weights
        self.ops: LinearOps = self._scheme.ops(weights.device)
        rows = sum(part.num_held for part in parts)
        specs: dict[str, TensorSpec] = dict(self._scheme.tensors(rows, num_inputs, weights.dtype))
        inits: dict[str, Init] = dict.fromkeys(specs, "matrix")
        if bias and shard.axis == "in" and shard.index:
            weights.elsewhere += tuple(f"{part.module}.bias" for part in parts)
        elif bias:
            specs["bias"] = TensorSpec((rows,), weights.dtype, out_axis=0)
            inits["bias"] = "bias"
        weights.add(Weight(parts, specs, inits, weights.device, self._finish, shard))

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.matrix)

    def of_norm(self, stream: Stream, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        """Of the normed stream; and the stream, finished."""
        return self.ops.norm_linear(stream, norm.value, self.matrix)

    def gated(self, stream: Stream, norm: RmsNorm, activation: Activation) -> tuple[Tensor, Tensor]:
        """of_norm, then the gate: of gate and up, stacked."""
        return self.ops.norm_gated(stream, norm.value, self.matrix, activation)

    def add_to(self, stream: Tensor, x: Tensor, post_norm: RmsNorm | None = None) -> Stream:
        """The stream with the projection of x added, normed before if post_norm is given. Of
        columns that ranks share, all ranks together."""
        if self._shard.axis != "in":
            post = post_norm.value if post_norm is not None else None
            return self.ops.add_linear(stream, x, self.matrix, post)
        partial = self.ops.linear(x, self.matrix)
        if post_norm is None:
            return self._collective.add(stream, partial)
        return stream + post_norm(self._collective.sum(partial))

    def _finish(self, tensors: Mapping[str, Tensor]) -> None:
        held = dict(tensors)
        bias = held.pop("bias", None)
        self.matrix = self._scheme.finish(held, bias, self._shard)


class Stack:
    """Matrices of one shape. value: with data `[count, rows, num_inputs]`, of what this rank
    has."""

    value: Matrix

    def __init__(
        self,
        context: LayerContext,
        parts: list[Part],
        count: int,
        num_inputs: int,
        shard: Shard = WHOLE,
    ) -> None:
        self._count = count
        self._shard = shard
        weights = context.weights
        rows = sum(part.num_held for part in parts)
        specs = {"weight": TensorSpec((rows, num_inputs), weights.dtype, out_axis=0, in_axis=1)}
        inits: dict[str, Init] = {"weight": "matrix"}
        weights.add(Weight(parts, specs, inits, weights.device, self._finish, shard))

    def _finish(self, tensors: Mapping[str, Tensor]) -> None:
        data = tensors["weight"].unflatten(0, (self._count, -1))
        self.value = Matrix(data, shard=self._shard)


def column_parts(context: LayerContext, outs: Mapping[str, int]) -> list[Part]:
    """Of modules (name -> rows) whose rows the ranks of tensor parallelism share."""
    dims = context.dims
    return [Part(module, rows, dims.tp_rank, dims.tp) for module, rows in outs.items()]


def row_shard(context: LayerContext) -> Shard:
    """Of a matrix whose columns the ranks of tensor parallelism share."""
    dims = context.dims
    return Shard("in", dims.tp_rank, dims.tp) if dims.tp > 1 else WHOLE
