"""Makes the two workers of a simulated cluster: 1P + 1D, or two whole workers.

goodput_check.py and plan_check.py compare their simulation with measurements.
"""

from collections.abc import Mapping

from pdserve.models.config import ModelSpec
from pdserve.plan.costs.step import Degrees
from pdserve.plan.profile.profile import Profile
from pdserve.plan.profile.scaled import scale
from pdserve.plan.simulation.jobs import Pool


def simulated_pair(
    profile: Profile, is_split: bool, engine: Mapping[str, int | bool]
) -> tuple[Pool, ...]:
    """Returns the pools of two workers of one GPU each.

    Parameters:
    - profile: Profile of one worker.
    - is_split: True for 1P + 1D, False for two whole workers.
    - engine: Fields of EngineConfig, as in `Pool.engine`.
    """
    spec = ModelSpec.model_validate(profile.spec)
    num_kv_tokens = scale(profile, spec, Degrees()).num_kv_tokens
    counts = {"prefill": 1, "decode": 1} if is_split else {"both": 2}
    return tuple(
        Pool(role, count, profile, num_kv_tokens, dict(engine)) for role, count in counts.items()
    )
