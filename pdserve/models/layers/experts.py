"""Mixtures of experts (Shazeer 2017): each row goes to a few of many gated MLPs, and, where a model
has one, to another that all share."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from pdserve.kernels.collective.ops import Stream, normed
from pdserve.kernels.experts.ops import Experts, Router
from pdserve.kernels.linear.schemes.scheme import TensorSpec
from pdserve.models.facts.experts import ExpertSpec
from pdserve.models.layers.context import LayerContext
from pdserve.models.layers.linear import Linear, Stack, row_shard
from pdserve.models.layers.mlp import GatedMlp
from pdserve.models.layers.norm import RmsNorm
from pdserve.models.step_context import StepContext
from pdserve.models.weights import Init, Part, Weight

CORRECTION = "e_score_correction_bias"


@dataclass(frozen=True)
class ExpertNames:
    """Modules of the checkpoint, below the layer's. experts: has one for each, by number; gate, up,
    down: in each of them."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"


class ExpertMlp:
    """module: of the layer. norm: of the stream, before everything."""

    def __init__(
        self, context: LayerContext, layer: int, module: str, names: ExpertNames, norm: RmsNorm
    ) -> None:
        spec = context.spec.experts
        assert spec is not None, "a mixture of experts in a model that has none"
        self._ops = context.ops
        self._norm = norm
        count = spec.routing.num_experts
        self._load = torch.zeros(count, dtype=torch.int64, device=context.weights.device)
        context.expert_load[layer] = self._load
        self._router = _RouterWeight(context, spec, f"{module}.{names.router}")
        self._experts = _ExpertWeights(context, spec, names, f"{module}.{names.experts}")
        self._shared: GatedMlp | None = None
        self._shared_gate: Linear | None = None
        if spec.shared_size:
            shared = f"{module}.{names.shared}"
            self._shared = GatedMlp(context, shared, norm, size=spec.shared_size)
        if spec.has_shared_gate:
            part = Part(f"{module}.{names.shared_gate}", 1)
            self._shared_gate = Linear(context, [part], context.spec.hidden_size, bias=False)

    def __call__(self, stream: Stream, step: StepContext) -> Stream:
        x, finished = normed(stream, self._norm.value, self._ops.norm)
        choice = self._ops.experts.route(x, self._router.value, step.live, self._load)
        mix = partial(self._ops.experts.mix, x, choice, self._experts.value)
        shared = None if self._shared is None else self._shared.of_rows(x)
        if shared is not None and self._shared_gate is not None:
            shared = self._shared_gate(x).sigmoid() * shared
        if shared is None and self._ops.collective.size == 1:
            return mix(finished)
        return self._ops.collective.add(finished, mix(shared))


class _RouterWeight:
    """Every rank has all of it."""

    value: Router

    def __init__(self, context: LayerContext, spec: ExpertSpec, module: str) -> None:
        self._routing = spec.routing
        weights = context.weights
        num_experts = spec.routing.num_experts
        shape = (num_experts, context.spec.hidden_size)
        specs = {"weight": TensorSpec(shape, weights.dtype, out_axis=0)}
        inits: dict[str, Init] = {"weight": "matrix"}
        if spec.has_bias:
            specs[CORRECTION] = TensorSpec((num_experts,), torch.float32, out_axis=0)
            inits[CORRECTION] = "bias"
        part = Part(module, num_experts)
        weights.add(Weight([part], specs, inits, weights.device, self._finish))

    def _finish(self, tensors: Mapping[str, Tensor]) -> None:
        self.value = Router(tensors["weight"], self._routing, tensors.get(CORRECTION))


class _ExpertWeights:
    """The rank's rows of each expert's gate and up, and its columns of down."""

    def __init__(
        self, context: LayerContext, spec: ExpertSpec, names: ExpertNames, module: str
    ) -> None:
        hidden = context.spec.hidden_size
        dims = context.dims
        self._activation = context.spec.activation
        experts = [f"{module}.{number}" for number in range(spec.routing.num_experts)]
        wide = [
            Part(f"{expert}.{name}", spec.size, dims.tp_rank, dims.tp)
            for expert in experts
            for name in (names.gate, names.up)
        ]
        self._gate_up = Stack(context, wide, len(experts), hidden)
        narrow = [Part(f"{expert}.{names.down}", hidden) for expert in experts]
        size = spec.size // dims.tp
        self._down = Stack(context, narrow, len(experts), size, row_shard(context))

    @cached_property
    def value(self) -> Experts:
        return Experts(self._gate_up.value, self._down.value, self._activation)
