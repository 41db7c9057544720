"""Finds which layers have a window, for families that say it in their own way."""

from pdserve.models.hf_config import HfConfig


def alternating_windows(config: HfConfig, pattern: int) -> tuple[int | None, ...]:
    """Returns the window of each layer. Without layer_types, each pattern-th layer sees all and the
    others have a window. Returns () if there is no window."""
    kinds = config.layer_types or [
        "sliding_attention" if (layer + 1) % pattern else "full_attention"
        for layer in range(config.num_hidden_layers)
    ]
    if config.sliding_window is None or "sliding_attention" not in kinds:
        return ()
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)
