"""Finds which layers have a window, for families with a rule of their own."""

from collections.abc import Callable

from pdserve.models.hf_config import HfConfig


def _windows(config: HfConfig, has_window: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Returns the window of each layer: by layer_types, or without them by `has_window(layer)`.
    Returns () if no layer has a window."""
    kinds = config.layer_types or [
        "sliding_attention" if has_window(layer) else "full_attention"
        for layer in range(config.num_hidden_layers)
    ]
    if config.sliding_window is None or "sliding_attention" not in kinds:
        return ()
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)


def late_windows(config: HfConfig) -> tuple[int | None, ...]:
    """Qwen2 and Qwen3: layers from max_window_layers on have a window."""
    return _windows(config, lambda layer: layer >= config.max_window_layers)


def even_windows(config: HfConfig) -> tuple[int | None, ...]:
    """Qwen2-MoE: layers 0, 2, 4, ... below max_window_layers have a window."""
    return _windows(config, lambda layer: layer % 2 == 0 and layer < config.max_window_layers)


def alternating_windows(config: HfConfig, pattern: int) -> tuple[int | None, ...]:
    """Every pattern-th layer sees all tokens, and the other layers have a window."""
    return _windows(config, lambda layer: bool((layer + 1) % pattern))
