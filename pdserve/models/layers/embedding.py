"""The two ends of a model: one turns token ids into rows, the other turns rows into logits."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.collective.ops import Stream, normed, slice_of
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.schemes.dense import Dense
from pdserve.models.layers.context import LayerContext
from pdserve.models.layers.linear import Linear
from pdserve.models.layers.norm import RmsNorm
from pdserve.models.sources.storage import DENSE_STORAGE
from pdserve.models.step_context import StepContext
from pdserve.models.weights import Part, Plain, Weight


class Embedding:
    """The embedding of tokens. Every rank has the whole table `[vocab, hidden]`."""

    table: Tensor

    def __init__(self, context: LayerContext, module: str) -> None:
        spec = context.spec
        weights = context.weights
        plain = {"weight": Plain((spec.hidden_size,), weights.dtype, "matrix")}
        part = Part(module, spec.vocab_size)
        weights.add(Weight([part], plain, weights.device, self._finish))
        self._scale: Tensor | None = None
        if spec.embedding_scale != 1.0:  # rounded to the dtype, as in the training of models
            scale = torch.tensor(spec.embedding_scale, dtype=weights.dtype)
            self._scale = scale.to(weights.device)

    def __call__(self, ids: Tensor, step: StepContext) -> Stream:
        """Embeds `ids [T]` -> `[T, hidden]`. Rows that bring their own embedding have an id below
        0."""
        if step.given is None:
            rows = functional.embedding(ids, self.table)
        else:
            rows = functional.embedding(ids.clamp(min=0), self.table)
        if self._scale is not None:
            rows = rows * self._scale
        if step.given is not None:
            rows.index_copy_(0, step.given.rows, step.given.values.to(rows.dtype))
        return rows

    def _finish(self, tensors: Mapping[str, Tensor]) -> None:
        self.table = tensors["weight"]


class Head:
    """The last norm, and the product with the vocabulary. If `tied` is given, its table is used.
    The ranks of a stage share the vocabulary."""

    def __init__(
        self, context: LayerContext, module: str, norm: RmsNorm, tied: Embedding | None
    ) -> None:
        spec = context.spec
        self._norm = norm
        self._norms = context.ops.norm
        self._tied = tied
        self._soft_cap = spec.logit_soft_cap
        self._ops = Dense().ops(context.weights.device)
        self._exchange = context.ops.exchange
        self._vocab_size = spec.vocab_size
        dims = context.dims
        self._held = slice_of(spec.vocab_size, dims.stage_rank, dims.stage_size)
        self._linear: Linear | None = None
        if tied is None:
            part = Part(module, spec.vocab_size, dims.stage_rank, dims.stage_size, is_equal=False)
            self._linear = Linear(
                context, [part], spec.hidden_size, bias=False, storage=DENSE_STORAGE
            )

    def hidden(self, stream: Stream) -> Tensor:
        """Returns `[T, hidden]`, the normed stream."""
        return normed(stream, self._norm.value, self._norms)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes `hidden [N, hidden]` -> `[N, vocab]`, in the model's dtype. Ranks other than the
        first return the columns that they have."""
        logits = self._ops.linear(hidden, self._matrix)
        if self._soft_cap is not None:
            logits = torch.tanh(logits / self._soft_cap) * self._soft_cap
        return self._exchange.gather_columns(logits, self._vocab_size)

    @property
    def _matrix(self) -> Matrix:
        if self._linear is not None:
            return self._linear.matrix
        assert self._tied is not None
        return Matrix(self._tied.table[self._held])
