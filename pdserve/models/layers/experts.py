"""Mixtures of experts (Shazeer 2017): each row goes to a few of many gated MLPs. If a model has a
shared one, each row goes to that, too."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from pdserve.kernels.collective.ops import Stream, normed
from pdserve.kernels.experts.dispatch import Brought, Dispatch, GatheredRows
from pdserve.kernels.experts.ops import (
    KINDS_ON_GPU,
    Choice,
    Experts,
    Router,
    Share,
    share_of,
)
from pdserve.kernels.linear.matrix import WHOLE, Shard
from pdserve.kernels.norm.reference import sigmoid
from pdserve.models.facts.experts import ExpertSpec
from pdserve.models.layers.context import LayerContext
from pdserve.models.layers.linear import Linear, Stack
from pdserve.models.layers.mlp import GatedMlp
from pdserve.models.layers.norm import RmsNorm
from pdserve.models.sources.storage import DENSE_STORAGE
from pdserve.models.step_context import StepContext
from pdserve.models.weights import Part, Plain, Stacked, Weight

CORRECTION = "e_score_correction_bias"
GATE_UP, DOWN = "gate_up_proj", "down_proj"  # tensors of all experts, where they are stacked
# Rows at a time, where experts are on several ranks. The results of each row take memory for all of
# its choices.
MIXED_ROWS = 16_384


@dataclass(frozen=True)
class ExpertNames:
    """Names of modules in the checkpoint, below the layer's.

    experts: the module that has one module for each expert, by number.
    gate, up, down: modules in each expert.
    shared: the module of all shared experts, one after another, or of the gated one.
    is_stacked: instead, the tensors GATE_UP and DOWN of `experts` hold all experts, with rows of
        gate and up in turns.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"
    is_stacked: bool = False


class ExpertMlp:
    """A mixture of experts as the MLP of a layer.

    module: the layer's module.
    norm: is applied to the stream before everything else.
    """

    def __init__(
        self, context: LayerContext, layer: int, module: str, names: ExpertNames, norm: RmsNorm
    ) -> None:
        spec = context.spec.experts
        assert spec is not None, "the model has no mixtures of experts"
        self._ops = context.ops
        self._norm = norm
        count = spec.routing.num_experts
        self._load = torch.zeros(count, dtype=torch.int64, device=context.weights.device)
        context.expert_load[layer] = self._load
        self._router = _RouterWeight(context, spec, f"{module}.{names.router}")
        self._experts = _ExpertWeights(context, spec, names, module, layer)
        self._gated: _GatedExpert | None = None
        if spec.gated_size:
            self._gated = _GatedExpert(context, module, names, norm, spec.gated_size)
        self._share: Share | None = None
        if context.placements is not None:
            dims = context.dims
            num_shared = spec.routing.num_shared
            placed = context.placements[layer]
            self._share = share_of(
                placed, dims.ep_rank, dims.tp, num_shared, context.weights.device
            )
        self._dispatch: Dispatch = GatheredRows(context.ops.exchange)

    def __call__(self, stream: Stream, step: StepContext) -> Stream:
        x, finished = normed(stream, self._norm.value, self._ops.norm)
        choice = self._ops.experts.route(x, self._router.value, step.live, self._load)
        gated = None if self._gated is None else self._gated(x)
        if self._share is None:
            return self._add_mix(finished, x, choice, gated)
        brought = self._dispatch.bring(x, choice, step.home_rows)
        made = self._mix_here(brought, self._share)
        if gated is not None:
            made[brought.own.start : brought.own.stop] += gated
        return self._dispatch.take_back(finished, made, step.home_rows)

    def _add_mix(self, stream: Tensor, x: Tensor, choice: Choice, gated: Tensor | None) -> Stream:
        """Adds the results of all experts for x to the stream. This rank holds a part of each
        expert."""
        mix = partial(self._ops.experts.mix, x, choice, self._experts.value)
        if gated is None and self._ops.collective.size == 1:
            return mix(stream)
        return self._ops.collective.add(stream, mix(gated))

    def _mix_here(self, brought: Brought, share: Share) -> Tensor:
        """Returns `[T, hidden]`: the results of this rank's experts for the rows, MIXED_ROWS at a
        time."""
        ops, experts = self._ops.experts, self._experts.value
        made = []
        for start in range(0, len(brought.x), MIXED_ROWS):
            rows = slice(start, start + MIXED_ROWS)
            x = brought.x[rows]
            choice = Choice(brought.choice.experts[rows], brought.choice.weights[rows])
            own = range(
                min(max(brought.own.start - start, 0), len(x)),
                min(max(brought.own.stop - start, 0), len(x)),
            )
            made.append(ops.mix(x, ops.place(choice, share, own), experts))
        return made[0] if len(made) == 1 else torch.cat(made)


class _GatedExpert:
    """An MLP that every row goes to, scaled by a sigmoid of the row."""

    def __init__(
        self, context: LayerContext, module: str, names: ExpertNames, norm: RmsNorm, size: int
    ) -> None:
        self._mlp = GatedMlp(context, f"{module}.{names.shared}", norm, size=size)
        part = Part(f"{module}.{names.shared_gate}", 1)
        self._gate = Linear(
            context, [part], context.spec.hidden_size, bias=False, storage=DENSE_STORAGE
        )

    def __call__(self, x: Tensor) -> Tensor:
        return sigmoid(self._gate(x)) * self._mlp.of_rows(x)


class _RouterWeight:
    """The router of a mixture. Every rank has all of it."""

    value: Router

    def __init__(self, context: LayerContext, spec: ExpertSpec, module: str) -> None:
        self._routing = spec.routing
        weights = context.weights
        num_experts = spec.routing.num_experts
        plain = {"weight": Plain((context.spec.hidden_size,), weights.dtype, "matrix")}
        if spec.has_bias:
            plain[CORRECTION] = Plain((), torch.float32, "bias")
        if spec.has_biases:
            plain["bias"] = Plain((), torch.float32, "bias")
        part = Part(module, num_experts)
        weights.add(Weight([part], plain, weights.device, self._finish))

    def _finish(self, tensors: Mapping[str, Tensor]) -> None:
        self.value = Router(
            tensors["weight"], self._routing, tensors.get(CORRECTION), tensors.get("bias")
        )


class _ExpertWeights:
    """The weights of the experts on this rank. If the context places experts, the rank holds some
    whole. Otherwise it holds its rows of each expert's gate and up, and its columns of down."""

    def __init__(
        self, context: LayerContext, spec: ExpertSpec, names: ExpertNames, module: str, layer: int
    ) -> None:
        hidden = context.spec.hidden_size
        self._activation = context.spec.activation
        held, index, count = _held(context, spec, layer)
        shard = Shard("in", index, count) if count > 1 else WHOLE
        if names.is_stacked:
            num_held = len(held)
            wide, narrow = _stacked_parts(
                spec, f"{module}.{names.experts}", hidden, held, index, count
            )
        else:
            each = _each_expert(spec, names, module, held, index, count)
            num_held = len(each)
            wide = [
                Part(f"{expert}.{name}", rows, index, count)
                for expert, rows, index, count in each
                for name in (names.gate, names.up)
            ]
            narrow = [
                Part(f"{expert}.{names.down}", hidden, columns=Shard("in", index, count))
                for expert, _, index, count in each
            ]
        biases = [f"{name}_bias" if spec.has_biases else None for name in (GATE_UP, DOWN)]
        self._gate_up = Stack(context, wide, num_held, hidden, bias=biases[0])
        self._down = Stack(context, narrow, num_held, spec.size // count, shard, bias=biases[1])
        schemes = self._gate_up.scheme, self._down.scheme
        if schemes[0] != schemes[1]:
            raise ValueError(
                f"{wide[0].module} would be held as {schemes[0]}, but {narrow[0].module} as "
                f"{schemes[1]}: experts held in two ways are not supported; use the model's "
                "16-bit weights"
            )
        if context.weights.device.type == "cuda" and schemes[0].name not in KINDS_ON_GPU:
            raise ValueError(
                f"experts held as {schemes[0]} are computed on CPU alone so far: use the model's "
                "16-bit weights, or set engine.device to cpu"
            )
        context.weights.elsewhere += tuple(
            f"{module}.{names.experts}.{number}."
            for number in sorted(set(range(spec.routing.num_experts)) - set(held))
        )

    @cached_property
    def value(self) -> Experts:
        return Experts(self._gate_up.value, self._down.value, self._activation, self._gate_up.ops)


def _held(context: LayerContext, spec: ExpertSpec, layer: int) -> tuple[tuple[int, ...], int, int]:
    """Returns the experts that the rank holds, whole or in part, and which part of how many it has
    of each."""
    dims = context.dims
    if context.placements is None:
        return tuple(range(spec.routing.num_experts)), dims.tp_rank, dims.tp
    placement = context.placements[layer]
    assert placement.num_ranks == dims.ep, "the placement is for another number of ranks"
    assert len(placement.copies) == spec.routing.num_experts, "the placement is for other experts"
    return placement.experts[dims.ep_rank], 0, 1


def _stacked_parts(
    spec: ExpertSpec, module: str, hidden: int, held: tuple[int, ...], index: int, count: int
) -> tuple[list[Part], list[Part]]:
    """Returns the parts of gate and up together, and those of down, for experts that share one
    tensor each. There, rows of gate and up come in turns; the rank holds its own with gate first.
    """
    num_experts = spec.routing.num_experts
    rows = 2 * spec.size
    own = rows // count
    order = (*range(0, own, 2), *range(1, own, 2))
    wide = [
        Part(module, rows, index, count, order=order, stacked=Stacked(GATE_UP, n, num_experts))
        for n in held
    ]
    columns = Shard("in", index, count)
    narrow = [
        Part(module, hidden, columns=columns, stacked=Stacked(DOWN, n, num_experts)) for n in held
    ]
    return wide, narrow


def _each_expert(
    spec: ExpertSpec,
    names: ExpertNames,
    module: str,
    held: tuple[int, ...],
    index: int,
    count: int,
) -> list[tuple[str, int, int, int]]:
    """Returns for each expert its module, the module's width, and which part of how many the rank
    has of it. Shared experts, which every rank has, are parts of one module."""
    experts = [(f"{module}.{names.experts}.{number}", spec.size, index, count) for number in held]
    num_shared = spec.routing.num_shared
    shared = [
        (f"{module}.{names.shared}", spec.size * num_shared, i * count + index, num_shared * count)
        for i in range(num_shared)
    ]
    return experts + shared
