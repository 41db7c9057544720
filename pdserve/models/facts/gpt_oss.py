"""Facts of gpt-oss's code for which its config.json has no field."""

from typing import Any

from pdserve.models.facts.experts import gpt_oss_experts
from pdserve.models.facts.windows import alternating_windows
from pdserve.models.hf_config import HfConfig

SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # as in kernels.norm.ops


def gpt_oss_facts(config: HfConfig) -> dict[str, Any]:
    for name, known in SWIGLU.items():
        if getattr(config, name) != known:
            raise ValueError(
                f"{name}={getattr(config, name)} is not supported: kernels compute {known} alone; "
                "use a model that was trained with it"
            )
    return {
        "windows": alternating_windows(config, 2),
        "experts": gpt_oss_experts(config),
        "activation": "clamped_swiglu",
        "has_sinks": True,
        "mlp_bias": False,
    }
