"""From a profiler's trace to parts of a step: which kernel belongs to which matrix, attention, norm
... and the gaps.

cuBLAS's kernel names do not say which product they compute, so products are told apart by where
they stand between attention and activation, whose names are known:

    qkv | attention | o, gate-up | activation | down, (head,) qkv of the next layer or step |
    attention ...

Reads the Chrome trace that torch.profiler writes; no torch. Used by
benchmarks/engine/step_profile.py.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# First match wins. What none matches is "other": sampling when it runs behind the head.
NAMES: tuple[tuple[str, str], ...] = (
    ("copies", r"^memcpy|^memset"),
    ("sampling", r"sampl|argmax|draw|penalt|score|group_stats|cut_kernel|best_of|topk|softmax"),
    ("inputs", r"gather|update_tables|store_tokens|embedding|indexselect"),
    ("merge", r"^merge"),
    ("attention", r"attention|attend|paged|flash|fmha|sdpa|^decode_|^prefill_"),
    (
        "product + activation",
        r"(gemm|gemv|linear|matmul|product).*silu|silu.*(gemm|gemv|linear|matmul|product)",
    ),
    ("reduction", r"splitk.*reduce|reduce.*splitk"),
    ("product", r"gemm|gemv|nvjet|xmma|cutlass|linear|matmul|product|splitk"),
    ("activation", r"silu|swiglu"),
    ("rope + KV write", r"rope|rotary|write_kv"),
    ("norm", r"norm"),
)
_PATTERNS = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in NAMES]

# starting a copy takes a few microseconds; a longer call waited for the device
BLOCKED_COPY_US = 50.0

# Landmarks around -> what stands between them. Attention on both sides: the activation is inside a
# product.
ORDERS: dict[tuple[str, str], tuple[tuple[str, ...], ...]] = {
    ("", "attention"): (("qkv",),),
    ("attention", "activation"): (("o", "gate-up"),),
    ("activation", "attention"): (("down", "qkv"), ("down", "head", "qkv")),
    ("activation", ""): (("down",), ("down", "head")),
    ("attention", "attention"): (
        ("o", "gate-up", "down", "qkv"),
        ("o", "gate-up", "down", "head", "qkv"),
    ),
    ("attention", ""): (("o", "gate-up", "down"), ("o", "gate-up", "down", "head")),
}


@dataclass(frozen=True)
class Kernel:
    """One piece of device work; microseconds."""

    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Trace:
    """Device work in order of start; waiting_us: what the host spent in calls that wait for the
    device."""

    kernels: list[Kernel]
    waiting_us: float


def read_trace(path: Path) -> Trace:
    """A Chrome trace of torch.profiler with CUDA activities."""
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    on_device = ("kernel", "gpu_memcpy", "gpu_memset")
    kernels = [
        Kernel(e["name"], float(e["ts"]), float(e["dur"]))
        for e in events
        if e.get("cat") in on_device
    ]
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    waiting = [float(e["dur"]) for e in calls if _waits(e["name"], e["dur"])]
    return Trace(sorted(kernels, key=lambda kernel: kernel.start), sum(waiting))


def _waits(call: str, microseconds: float) -> bool:
    """Copies to pageable memory wait inside the call that starts them."""
    return "Synchronize" in call or ("Memcpy" in call and microseconds > BLOCKED_COPY_US)


def parts_of(names: Sequence[str]) -> list[str]:
    """The part of each kernel of whole steps that follow each other, by name and place."""
    kinds = [_kind(name) for name in names]
    parts = list(kinds)
    window: list[int] = []  # products since the last attention or activation
    before = ""
    for i, kind in enumerate(kinds):
        if kind == "product":
            window.append(i)
        elif kind == "product + activation":
            _name_products(parts, [*window, i], "attention", "activation")
            window = []
            before = "activation"
        elif kind in ("attention", "activation") and not (kind == before and not window):
            _name_products(parts, window, before, kind)
            window = []
            before = kind
    _name_products(parts, window, before, "")
    return _resolve(parts)


def _kind(name: str) -> str:
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), "other")


def _name_products(parts: list[str], window: list[int], before: str, after: str) -> None:
    """window: indices of products between two landmarks ("": an end of the trace)."""
    orders = ORDERS.get((before, after), ())
    whole = next((order for order in orders if len(order) == len(window)), None)
    for place, index in enumerate(window):
        parts[index] = whole[place] if whole else "other"


def _resolve(parts: list[str]) -> list[str]:
    """A reduction belongs to the product before it, a merge to attention or sampling, the unknown
    behind the head to sampling.
    """
    resolved: list[str] = []
    product = "other"
    behind_head = False
    last = "other"
    for part in parts:
        if part == "reduction":
            part = product
        elif part == "merge":
            part = "attention" if last == "attention" else "sampling"
        elif part == "other" and behind_head:
            part = "sampling"
        if part in ("qkv", "o", "gate-up", "down", "head"):
            product = part
            behind_head = part == "head"
        last = part
        resolved.append(part)
    return resolved


def busy_us(kernels: Sequence[Kernel]) -> float:
    """Time during which at least one kernel ran; kernels in order of start."""
    busy = 0.0
    reached = float("-inf")
    for kernel in kernels:
        busy += max(0.0, kernel.end - max(kernel.start, reached))
        reached = max(reached, kernel.end)
    return busy


def span_us(kernels: Sequence[Kernel]) -> float:
    """From the first start to the last end."""
    return max(kernel.end for kernel in kernels) - kernels[0].start if kernels else 0.0
