"""Facts of Gemma's code for which its config.json has no field."""

from typing import Any

from pdserve.models.facts.rope import rope_of
from pdserve.models.facts.windows import alternating_windows
from pdserve.models.hf_config import HfConfig


def gemma2_facts(config: HfConfig) -> dict[str, Any]:
    """Returns the facts of Gemma 2. Every other layer has a window."""
    return _facts(config) | {"windows": alternating_windows(config, 2)}


def gemma3_facts(config: HfConfig) -> dict[str, Any]:
    """Returns the facts of Gemma 3. Five of six layers have a window, and a rotation base of their
    own."""
    windows = alternating_windows(config, config.sliding_window_pattern)
    facts = _facts(config) | {"windows": windows, "qk_norm": True}
    if windows and config.local_rope_parameters is not None:
        facts["local_rope"] = rope_of(config, config.local_rope_parameters)
    elif "sliding_attention" in (config.layer_types or ()):
        raise ValueError(
            "sliding_window=null with layers of sliding_attention in layer_types: they would "
            "rotate as layers with a window and have none; restore both from the model's source"
        )
    return facts


def _facts(config: HfConfig) -> dict[str, Any]:
    if config.use_bidirectional_attention:
        raise ValueError(
            "use_bidirectional_attention=true is not supported: such a model embeds texts and "
            "cannot generate; use a model that was trained to generate"
        )
    return {
        "embedding_scale": config.hidden_size**0.5,
        "plus_one_norms": True,
        "mlp_bias": False,
    }
