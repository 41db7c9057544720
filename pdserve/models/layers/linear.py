"""Projections: one matrix, or several stacked in one, held by any scheme."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from pdserve.kernels.collective.ops import Stream, finished
from pdserve.kernels.linear.matrix import WHOLE, Matrix, Shard
from pdserve.kernels.linear.ops import Hidden, LinearOps
from pdserve.kernels.linear.schemes.dense import Dense
from pdserve.kernels.linear.schemes.scheme import Scheme
from pdserve.kernels.norm.ops import Activation
from pdserve.models.layers.context import LayerContext
from pdserve.models.layers.norm import RmsNorm
from pdserve.models.sources.stacked import StackedSource
from pdserve.models.sources.storage import Storage, storage_of
from pdserve.models.weights import Part, Plain, StoredMatrix, Weight, errors_named


class Linear:
    """A projection `[T, in] -> [T, out]` of this rank's rows (`parts`) and columns (`shard`).

    matrix: what ops take.
    num_inputs: columns that the rank has.
    bias: true if each part has one. If ranks share the columns, the first rank adds it.
    storage: that of all parts, if the model does not decide it.
    """

    matrix: Matrix

    def __init__(
        self,
        context: LayerContext,
        parts: list[Part],
        num_inputs: int,
        bias: bool,
        shard: Shard = WHOLE,
        storage: Storage | None = None,
    ) -> None:
        self._shard = shard
        self._collective = context.ops.collective
        self._norms = context.ops.norm
        weights = context.weights
        storages = [storage or storage_of(context.spec, part.module) for part in parts]
        scheme = _scheme_of_all(parts, storages)
        self.ops: LinearOps = scheme.ops(weights.device)
        stored = _allocate(context, parts, num_inputs, shard, storages, scheme)
        plain: dict[str, Plain] = {}
        if bias and shard.axis == "in" and shard.index:
            weights.elsewhere += tuple(f"{part.module}.bias" for part in parts)
        elif bias:
            plain["bias"] = Plain((), weights.dtype, "bias")
        finish = partial(self._finish, stored, weights.dtype)
        weights.add(Weight(parts, plain, weights.device, finish, stored))

    def __call__(self, x: Hidden) -> Tensor:
        return self.ops.linear(x, self.matrix)

    def of_norm(self, stream: Stream, norm: RmsNorm | None) -> tuple[Tensor, Tensor]:
        """Returns the projection of the normed stream, and the finished stream. If norm is None,
        the stream is not normed."""
        if norm is None:
            stream = finished(stream)
            return self.ops.linear(stream, self.matrix), stream
        return self.ops.norm_linear(stream, norm.value, self.matrix)

    def gated(
        self, stream: Stream, norm: RmsNorm | None, activation: Activation, taker: "Linear"
    ) -> tuple[Hidden, Tensor]:
        """Runs of_norm and then the gate. The projection must have gate and up, stacked. The result
        may only be given to `taker`."""
        if norm is None:
            gate_up, stream = self.of_norm(stream, None)
            return self._norms.gate(gate_up, activation), stream
        return self.ops.norm_gated(
            stream, norm.value, self.matrix, activation, may_leave_gate=taker.ops is self.ops
        )

    def add_to(self, stream: Tensor, x: Hidden, post_norm: RmsNorm | None = None) -> Stream:
        """Returns the stream with the projection of x added, normed by post_norm first if given. If
        ranks share the columns, the projections of all ranks are added."""
        if self._shard.axis != "in":
            post = post_norm.value if post_norm is not None else None
            return self.ops.add_linear(stream, x, self.matrix, post)
        if post_norm is None:
            into = self._into if self.ops.linear_into else None
            return self._collective.add_product(stream, x, self, into)
        return stream + post_norm(self._collective.sum(self(x)))

    def _into(self, x: Hidden, out: Tensor) -> None:
        assert self.ops.linear_into is not None
        self.ops.linear_into(x, self.matrix, out)

    def _finish(
        self, stored: StoredMatrix, dtype: torch.dtype, tensors: Mapping[str, Tensor]
    ) -> None:
        matrix = replace(stored.matrix, bias=tensors.get("bias"), shard=self._shard)
        self.matrix = _for_ops(stored.scheme, matrix, dtype)


class Stack:
    """Matrices of one shape.

    value: a stack `[count, rows, num_inputs]` of what this rank has.
    target: the scheme, whatever the checkpoint has; None: the scheme of the parts.
    bias: the checkpoint's name of the biases, after the module's; None: there are none. If ranks
        share the columns, the first rank has the biases.
    """

    value: Matrix

    def __init__(
        self,
        context: LayerContext,
        parts: list[Part],
        count: int,
        num_inputs: int,
        shard: Shard = WHOLE,
        target: Scheme | None = None,
        bias: str | None = None,
    ) -> None:
        self._count = count
        self._shard = shard
        self._bias = bias
        weights = context.weights
        storages = [_storage(context, part) for part in parts]
        scheme = target or _scheme_of_all(parts, storages)
        self.scheme = scheme
        self.ops: LinearOps = scheme.ops(weights.device)
        stored = _allocate(context, parts, num_inputs, shard, storages, scheme)
        finish = partial(self._finish, stored, weights.dtype)
        plain: dict[str, Plain] = {}
        if bias and shard.axis == "in" and shard.index:
            weights.elsewhere += tuple({f"{part.module}.{bias}" for part in parts})
        elif bias:
            plain[bias] = Plain((), weights.dtype, "bias")
        weights.add(Weight(parts, plain, weights.device, finish, stored))

    def _finish(
        self, stored: StoredMatrix, dtype: torch.dtype, tensors: Mapping[str, Tensor]
    ) -> None:
        bias = tensors.get(self._bias) if self._bias else None
        matrix = replace(stored.matrix, bias=bias, shard=self._shard).stacked(self._count)
        self.value = _for_ops(stored.scheme, matrix, dtype)


def _storage(context: LayerContext, part: Part) -> Storage:
    stacked = part.stacked
    if stacked is None:
        return storage_of(context.spec, part.module)
    return Storage(StackedSource(stacked.name, stacked.number, stacked.count), Dense())


def column_parts(context: LayerContext, outs: Mapping[str, int]) -> list[Part]:
    """Returns parts of modules (name -> rows) whose rows the ranks of tensor parallelism share."""
    dims = context.dims
    return [Part(module, rows, dims.tp_rank, dims.tp) for module, rows in outs.items()]


def fused_parts(parts: Sequence[Part], module: str) -> list[Part]:
    """Returns the same parts for a checkpoint that stores them below each other in one module."""
    ends = list(accumulate(part.rows for part in parts))
    return [
        replace(part, module=module, first=end - part.rows, of_rows=ends[-1])
        for part, end in zip(parts, ends, strict=True)
    ]


def row_shard(context: LayerContext) -> Shard:
    """Returns the shard of a matrix whose columns the ranks of tensor parallelism share."""
    dims = context.dims
    return Shard("in", dims.tp_rank, dims.tp) if dims.tp > 1 else WHOLE


def _scheme_of_all(parts: Sequence[Part], storages: Sequence[Storage]) -> Scheme:
    """Returns the scheme of parts that are held in one matrix. ValueError names two that differ."""
    scheme = storages[0].scheme
    for part, storage in zip(parts, storages, strict=True):
        if storage.scheme != scheme:
            raise ValueError(
                f"{parts[0].module} would be held as {scheme}, but {part.module} as "
                f"{storage.scheme}: modules that are multiplied as one must be stored in one "
                "way; use the model's 16-bit weights"
            )
    return scheme


def _allocate(
    context: LayerContext,
    parts: Sequence[Part],
    num_inputs: int,
    shard: Shard,
    storages: Sequence[Storage],
    scheme: Scheme,
) -> StoredMatrix:
    weights = context.weights
    cuts = [part.cut(num_inputs, shard) for part in parts]
    with errors_named(parts[0].module):
        matrix = scheme.allocate(cuts, weights.dtype, weights.device)
    return StoredMatrix(matrix, scheme, [storage.source for storage in storages], cuts)


def _for_ops(scheme: Scheme, matrix: Matrix, dtype: torch.dtype) -> Matrix:
    """Returns the matrix as ops take it. On CPU it is the twin, which is made once."""
    return scheme.twin(matrix, dtype) if matrix.data.device.type == "cpu" else matrix
