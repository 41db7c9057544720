"""Scales a profile to degrees of parallelism and models that were not measured.

Each measured point is multiplied by a ratio of the cost model (plan/costs): the time of the other
step over the time of the measured step. So constant errors of the model cancel. This module knows
no layouts. `layouts` calls it.
"""

from dataclasses import dataclass, replace

import msgspec

from pdserve.models.config import ModelSpec
from pdserve.plan.costs.step import Chunk, CostModel, Degrees, Step
from pdserve.plan.profile.profile import Profile

MESSAGE_OF_RANKS_S = 24e-6  # to write and read a step's message to other ranks; see costs/rates.py


@dataclass(frozen=True)
class Scaled:
    """A scaled profile."""

    profile: Profile
    num_kv_tokens: int  # tokens in the KV cache of each home
    is_measured: bool  # True: the profile is unchanged


def scale(profile: Profile, spec: ModelSpec, degrees: Degrees) -> Scaled:
    """Returns the profile of a model and degrees. Raises ValueError if the model does not fit that
    many GPUs, or cannot be split over them."""
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
        launch_s=profile.launch_s * spec.num_layers / profile.spec["num_layers"],
    )
    return Scaled(other, room, False)


def _decode(batch: int, context: int) -> Step:
    return Step(batch, batch * context)


def _seconds(model: CostModel, step: Step) -> float:
    """Returns the seconds of all stages in sequence. An eager step takes at least the time of its
    launches."""
    total = 0.0
    for pieces, layers in zip(model.stages(step), model.stage_layers(), strict=True):
        seconds = sum(pieces.values())
        total += max(seconds, model.launches_s(layers)) if step.chunks else seconds
    return total


def _room(profile: Profile, spec: ModelSpec, model: CostModel) -> int:
    """Returns the number of tokens in a home's KV cache. Raises ValueError if the weights do not
    fit."""
    rates = replace(model.rates, memory_bytes=profile.memory_bytes or model.rates.memory_bytes)
    return CostModel(spec, model.degrees, rates).room()


def _shape(spec: ModelSpec) -> ModelSpec:
    """Returns the parts of a spec that determine the time of a step."""
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
