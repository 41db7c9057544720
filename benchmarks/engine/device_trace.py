"""Assigns the kernels of a profiler's trace to the parts of a step: the matrices, attention, norms
and so on, and the gaps.

cuBLAS's kernel names do not say which product they compute. So products are told apart by their
place between landmarks, whose names are known. Brackets mark the shared expert of a mixture. Over
latents, the write of a token's row is a landmark, too:

    qkv | attention | o, gate-up | activation | down, (head,) qkv of the next layer or step |
    attention ...
    qkv | attention | o | router | [gate-up | activation | down] | experts | (head,) qkv |
    attention ...
    qkv | write | into the latent's space | attention | out of it, o | router ...

Kernels that move rows between ranks, or sum them, are "between ranks", with the norms that they do
beside. All other kernels are "other". This module reads the Chrome trace that torch.profiler
writes, and needs no torch. benchmarks/engine/step_profile.py uses it.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The first match wins. A kernel without a match is "other", or sampling if it runs after the head.
NAMES: tuple[tuple[str, str], ...] = (
    ("copies", r"^memcpy|^memset"),
    (
        "between ranks",
        r"^(few|send|sum|finish|add|pull)_rows|^(send|take)_(gathered|columns|partial)",
    ),
    ("between ranks", r"^broadcast_kernel"),
    ("router", r"^router_|^route_|^choose_|^place_kernel"),
    ("experts", r"^few_(gated|down|product)|expert_|^combine_kernel"),
    ("latent write", r"^rope_write_latent"),
    ("latent attention", r"^latent_"),
    ("elementwise", r"^lay_out|^take_back"),
    ("attention", r"^gather_kv"),
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
    ("activation", r"silu|swiglu|^gate_kernel"),
    ("rope + KV write", r"rope|rotary|write_kv"),
    ("norm", r"norm"),
    ("elementwise", r"elementwise|catarray"),
)
_PATTERNS = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in NAMES]

# To start a copy takes a few microseconds. A longer call waited for the device.
BLOCKED_COPY_US = 50.0

ATTENTION = ("attention", "latent attention")
LANDMARKS = (*ATTENTION, "latent write", "activation", "router", "experts", "sampling")
PRODUCTS = ("qkv", "latents", "o", "router", "gate-up", "down", "head")
# Kinds that are not parts -> their part.
PART_OF = {
    "latent attention": "attention",
    "latent write": "rope + KV write",
    "unplaced": "other",
}
# Two landmarks of one layer -> the products between them. A shared expert may have its activation
# inside a product. It may also have a gate, which weighs it as the router weighs other experts.
INSIDE: dict[tuple[str, str], tuple[tuple[str, ...], ...]] = {
    ("attention", "activation"): (("o", "gate-up"),),
    ("attention", "router"): (("o",),),
    ("router", "activation"): (("gate-up",),),
    ("router", "experts"): (("gate-up", "down"), ("gate-up", "down", "router")),
    ("activation", "experts"): (("down",), ("down", "router")),
}
# A layer's last landmark -> the products that follow it in the layer. If that is attention, the
# activation is inside a product.
ENDS: dict[str, tuple[str, ...]] = {
    "attention": ("o", "gate-up", "down"),
    "latent attention": ("latents", "o", "gate-up", "down"),
    "activation": ("down",),
    "experts": (),
}


@dataclass(frozen=True)
class Kernel:
    """One piece of device work. Times are in microseconds."""

    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Trace:
    """Device work in order of start. `waiting_us` is the time that the host spent in calls that
    wait for the device."""

    kernels: list[Kernel]
    waiting_us: float


def read_trace(path: Path) -> Trace:
    """Reads a Chrome trace of torch.profiler with CUDA activities."""
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
    """True if a call waits for the device. Copies to pageable memory wait inside the call that
    starts them."""
    return "Synchronize" in call or ("Memcpy" in call and microseconds > BLOCKED_COPY_US)


def parts_of(names: Sequence[str]) -> list[str]:
    """Returns the part of each kernel, by name and place. The kernels are those of consecutive
    whole steps."""
    kinds = [_kind(name) for name in names]
    parts = list(kinds)
    num_qkv = _num_qkv_over_latents(kinds)
    window: list[int] = []  # products since the last landmark
    before = ""
    for i, kind in enumerate([*kinds, ""]):
        landmark = kind if kind in LANDMARKS else ""
        if kind in ("product", "product + activation"):
            window.append(i)
            landmark = "activation" if kind == "product + activation" else ""
        if (landmark and (window or landmark != before)) or i == len(kinds):
            order = _between(before, landmark, len(window), num_qkv)
            for place, part in zip(window, order, strict=True):
                parts[place] = part
            window = []
            # decodes in the latents' space and prompts that expand latents may follow each other
            if (before, landmark) != ("latent attention", "attention"):
                before = landmark
    return _resolve(parts, over_latents=num_qkv > 0)


def _kind(name: str) -> str:
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), "other")


def _num_qkv_over_latents(kinds: Sequence[str]) -> int:
    """Returns the number of a layer's products before it writes its latents. It is 2 if queries
    have latents of their own, and 0 if the model does not attend over latents."""
    if "latent write" not in kinds:
        return 0
    return kinds[: kinds.index("latent write")].count("product")


def _between(before: str, after: str, count: int, num_qkv: int) -> tuple[str, ...]:
    """Returns the parts of `count` products between two landmarks ("" is an end of the trace). They
    are "unplaced" if no order has that length."""
    over_latents = num_qkv > 0
    if over_latents and after in ATTENTION and before in (*ATTENTION, "latent write"):
        return ("latents",) * count
    for order in _orders(before, after, num_qkv):
        lead = count - len(order)  # products that bring rows out of the latents' space precede o
        may_lead = over_latents and before in ATTENTION and after in ("activation", "router")
        if lead == 0 or (lead > 0 and may_lead):
            return ("latents",) * lead + order
    return ("unplaced",) * count


def _orders(before: str, after: str, num_qkv: int) -> tuple[tuple[str, ...], ...]:
    same_layer = ("attention" if before in ATTENTION else before, after)
    if same_layer in INSIDE:
        return INSIDE[same_layer]
    starts = {"attention": ("qkv",), "latent write": ("qkv",) * num_qkv, "sampling": (), "": ()}
    if after not in starts:
        return ()
    if before in ("sampling", ""):
        return (starts[after],)
    if before not in ENDS:
        return ()
    # Over latents, a head without sampling after it looks like a product of queries.
    heads = ((),) if after == "latent write" else ((), ("head",))
    return tuple(ENDS[before] + head + starts[after] for head in heads)


def _resolve(parts: Sequence[str], over_latents: bool) -> list[str]:
    """Assigns kernels that belong to a neighbour.

    A reduction belongs to the product before it, and a merge to attention or sampling. torch's
    copies and sums belong to the kernels whose results they join. Unknown kernels after the head
    belong to sampling.
    """
    resolved: list[str] = []
    product = "other"
    behind_head = in_latents = False
    last = "other"
    merges = "sampling"
    for part in parts:
        if part in PRODUCTS or part == "unplaced":
            product = PART_OF.get(part, part)
            behind_head = part == "head"
            in_latents = over_latents and part in ("qkv", "latents")
        if part == "reduction":
            part = product
        elif part == "merge":
            part = merges
        elif part in ("elementwise", "other") and behind_head:
            part = "sampling"
        elif part == "elementwise":
            neighbour = last if last in ("router", "experts") else "other"
            part = "latents" if in_latents else neighbour
        last = PART_OF.get(part, part)
        merges = last if last in ("attention", "sampling") else merges
        resolved.append(last)
    return resolved


def added_us(kernels: Sequence[Kernel]) -> list[float]:
    """Returns the time that each kernel adds after the end of all earlier ones, without the gap
    before its start. Kernels are in order of start.

    With programmatic dependent launch, the next kernel may start while one still runs, and wait
    inside for its results. So durations add up to more than the time that passed.
    """
    added = []
    reached = float("-inf")
    for kernel in kernels:
        added.append(max(0.0, kernel.end - max(kernel.start, reached)))
        reached = max(reached, kernel.end)
    return added


def busy_us(kernels: Sequence[Kernel]) -> float:
    """Returns the time during which at least one kernel ran. Kernels are in order of start."""
    return sum(added_us(kernels))


def span_us(kernels: Sequence[Kernel]) -> float:
    """Returns the time from the first start to the last end."""
    return max(kernel.end for kernel in kernels) - kernels[0].start if kernels else 0.0
