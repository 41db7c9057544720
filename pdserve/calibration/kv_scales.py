"""Finds scales for a model's keys and values in e4m3, and measures what such a cache costs.

The scales follow from the largest keys and values of a text. The cost is how far next-token
distributions move from those over unrounded rows: the Kullback-Leibler divergence
KL(unrounded || fp8) of each position, in nats.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.calibration.whole_prompts import WholePrompts
from pdserve.calibration.windows import Window
from pdserve.engine.memory.kv_cache import FP8, KVCache
from pdserve.kernels.ops import Ops
from pdserve.models.kv_scales import KvScales
from pdserve.models.registry import CausalLM

ROWS_AT_ONCE = 256  # rows of logits; with a vocabulary of 128k they take 128 MiB in float32
Progress = Callable[[], None]
"""A function that is called after each window of each of the two passes."""


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration.

    - scales: Scales of keys and values.
    - largest: Largest magnitudes by layer, of K and V by KV head, float32 `[heads, 2]`.
    - kl: Divergence of each position, in the order of the text.
    """

    scales: KvScales
    largest: tuple[Tensor, ...]
    kl: Tensor


def calibrate(
    model: CausalLM,
    ops: Ops,
    dtype: str,
    windows: Sequence[Window],
    block_size: int,
    progress: Progress = lambda: None,
) -> Calibration:
    """Runs the windows with an unrounded cache and with a cache in fp8. `dtype` is the dtype of the
    unrounded cache, as LayerGroup names it."""
    longest = max(len(window.ids) for window in windows)
    exact = WholePrompts(model, ops, dtype, longest, block_size)
    largest = _largest(exact.kv_cache)
    for window in windows:
        exact.hidden(window.ids)
        largest = [
            torch.maximum(*both) for both in zip(largest, _largest(exact.kv_cache), strict=True)
        ]
        progress()
    scales = KvScales.of_largest(*([each[:, x].tolist() for each in largest] for x in range(2)))
    rounded = WholePrompts(model, ops, FP8, longest, block_size, scales)
    kl = []
    for window in windows:
        hidden = (each.hidden(window.ids)[window.first :] for each in (exact, rounded))
        kl.append(divergence(model, *hidden))
        progress()
    return Calibration(scales, tuple(largest), torch.cat(kl))


@torch.inference_mode()
def divergence(model: CausalLM, exact: Tensor, other: Tensor) -> Tensor:
    """Returns the divergence between the distributions of two hidden states `[T, hidden]`, as
    float32 `[T]` on CPU."""
    found = []
    for rows, others in zip(exact.split(ROWS_AT_ONCE), other.split(ROWS_AT_ONCE), strict=True):
        p, q = (model.logits(x).float().log_softmax(-1) for x in (rows, others))
        found.append((p.exp() * (p - q)).sum(-1).clamp(min=0).cpu())
    return torch.cat(found)


def _largest(kv_cache: KVCache) -> list[Tensor]:
    """Returns the largest magnitudes of each layer, in order, as `[heads, 2]`. The null block is
    left out."""
    layers = sorted(kv_cache.layers.items())
    return [rows[1:].abs().float().amax((0, 3, 4)).cpu() for _, rows in layers]
