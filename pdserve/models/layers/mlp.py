"""Gated MLPs (Shazeer 2020), which compute `down(activation(gate(x)) * up(x))`. One matrix holds
gate and up."""

from torch import Tensor

from pdserve.kernels.collective.ops import Stream
from pdserve.models.layers.context import LayerContext
from pdserve.models.layers.linear import Linear, column_parts, fused_parts, row_shard
from pdserve.models.layers.norm import RmsNorm
from pdserve.models.step_context import StepContext
from pdserve.models.weights import Part


class GatedMlp:
    """The gated MLP of a layer.

    norm: is applied to the stream before the products; None: no norm.
    post_norm: is applied to the output before it is added.
    size: width of the MLP; None: the model's intermediate_size.
    is_fused: gate and up are one module of the checkpoint.
    """

    def __init__(
        self,
        context: LayerContext,
        module: str,
        norm: RmsNorm | None,
        post_norm: RmsNorm | None = None,
        size: int | None = None,
        is_fused: bool = False,
    ) -> None:
        spec = context.spec
        size = size or spec.intermediate_size
        self._norms = context.ops.norm
        self._activation = spec.activation
        self._norm = norm
        self._post_norm = post_norm
        outs = {f"{module}.gate_proj": size, f"{module}.up_proj": size}
        parts = column_parts(context, outs)
        if is_fused:
            parts = fused_parts(parts, f"{module}.gate_up_proj")
        self._gate_up = Linear(context, parts, spec.hidden_size, spec.mlp_bias)
        self._down = Linear(
            context,
            [Part(f"{module}.down_proj", spec.hidden_size)],
            size // context.dims.tp,
            spec.mlp_bias,
            row_shard(context),
        )

    def __call__(self, stream: Stream, step: StepContext) -> Stream:
        hidden, stream = self._gate_up.gated(stream, self._norm, self._activation, self._down)
        return self._down.add_to(stream, hidden, self._post_norm)

    def of_rows(self, x: Tensor) -> Tensor:
        """Returns the MLP of rows that are already normed. If ranks share the columns, it is this
        rank's part of the sum."""
        return self._down(self._norms.gate(self._gate_up(x), self._activation))
