"""Profiles of what was not measured: other degrees of parallelism, other models.

Each measured point is multiplied by what the cost model (plan/costs) says the other step takes,
over what it says of the measured one: so its constant errors cancel. Knows no layouts. Called by
`layouts`.
"""

from dataclasses import dataclass, replace

import msgspec

from pdserve.models.config import ModelSpec
from pdserve.plan.costs.step import Chunk, CostModel, Degrees, Step
from pdserve.plan.profile.profile import Profile

MESSAGE_OF_RANKS_S = 24e-6  # the step's message to other ranks, written and read: costs/rates.py


@dataclass(frozen=True)
class Scaled:
    """num_kv_tokens: of each home. is_measured: the profile is as it was measured."""

    profile: Profile
    num_kv_tokens: int
    is_measured: bool


def scale(profile: Profile, spec: ModelSpec, degrees: Degrees) -> Scaled:
    """ValueError when the model does not fit so many GPUs, or cannot be shared by them."""
    measured_spec = ModelSpec.model_validate(profile.spec)
    wanted = CostModel(spec, degrees)
    room = _room(profile, spec, wanted)
    same_model = _shape(measured_spec) == _shape(spec)
    if same_model and degrees == Degrees():
        tokens = room if profile.num_kv_tokens is None else profile.num_kv_tokens
        return Scaled(profile, tokens, True)
    measured = CostModel(measured_spec)

    def ratio(step: Step) -> float:
        return _seconds(wanted, step) / _seconds(measured, step)

    host_s = profile.host_s + MESSAGE_OF_RANKS_S * (degrees.num_gpus > 1)
    other = msgspec.structs.replace(
        profile,
        spec=spec.model_dump(mode="json"),
        decodes=tuple(
            msgspec.structs.replace(p, seconds=p.seconds * ratio(_decode(p.batch, p.context)))
            for p in profile.decodes
        ),
        prompts=tuple(
            msgspec.structs.replace(
                p, seconds=p.seconds * ratio(Step(chunks=(Chunk(p.start, p.rows),)))
            )
            for p in profile.prompts
        ),
        mixed=tuple(
            msgspec.structs.replace(
                p,
                seconds=p.seconds * ratio(Step(p.batch, p.batch * p.context, (Chunk(0, p.rows),))),
            )
            for p in profile.mixed
        ),
        host_s=host_s,
    )
    return Scaled(other, room, False)


def _decode(batch: int, context: int) -> Step:
    return Step(batch, batch * context)


def _seconds(model: CostModel, step: Step) -> float:
    """Of all stages, one after another; an eager step takes no less than its launches."""
    total = 0.0
    for pieces, layers in zip(model.stages(step), model.stage_layers(), strict=True):
        seconds = sum(pieces.values())
        total += max(seconds, model.launches_s(layers)) if step.chunks else seconds
    return total


def _room(profile: Profile, spec: ModelSpec, model: CostModel) -> int:
    """Tokens of a home's KV cache. ValueError when there is no room for weights."""
    rates = replace(model.rates, memory_bytes=profile.memory_bytes or model.rates.memory_bytes)
    return CostModel(spec, model.degrees, rates).room()


def _shape(spec: ModelSpec) -> ModelSpec:
    """What a step's time follows from."""
    return spec.model_copy(
        update={
            "weights": "",
            "eos_token_ids": (),
            "max_position": 0,
            "rope": None,
            "local_rope": None,
            "rms_eps": 0.0,
        }
    )
