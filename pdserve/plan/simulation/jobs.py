"""What a process that simulates is asked, and what it answers: one line of JSON each.

Torch-free. Written by `search.workers`, read by `child`.
"""

import math
from collections.abc import Sequence

import msgspec

from pdserve.plan.profile.profile import Profile

Percentiles = tuple[float, float, float] | None  # p50, p90, p99


class Request(msgspec.Struct, frozen=True, array_like=True):
    """at_s: since the start. prefixes: (name, tokens) of each part of the prompt; equal names are
    equal tokens."""

    at_s: float
    prefixes: tuple[tuple[str, int], ...]
    num_out: int


class Pool(msgspec.Struct, frozen=True):
    """Workers that are alike. profile: of one of them, with all its GPUs. degrees: names in
    EngineConfig, for what the engine itself must know."""

    role: str
    count: int
    profile: Profile
    num_kv_tokens: int
    engine: dict[str, int | bool]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster and a load. clients: so many at once, each sends its next request when the last one
    has ended; None: at their times. skip_s: requests that come sooner are not counted.
    stop_beyond: the share of missed requests from which on nothing matters any more. is_macro:
    False does every step by itself. is_paced: False has workers compute prompts as fast as they
    can, whatever is promised."""

    pools: tuple[Pool, ...]
    requests: tuple[Request, ...]
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    clients: int | None = None
    skip: int = 0
    split: str = "auto"
    max_model_len: int | None = None
    stop_beyond: float = 1.0
    links: int = 1
    is_macro: bool = True
    is_paced: bool = True
    keeps_all: bool = False


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """One request that was counted. Milliseconds; ttft_ms None: refused or failed."""

    at_s: float
    ttft_ms: float | None
    tpot_ms: float | None


class WorkerUse(msgspec.Struct, frozen=True):
    """Shares of the time. kv_peak: of the KV cache that was in use at most."""

    worker: str
    role: str
    busy: float
    prompts: float
    kv_peak: float
    num_preemptions: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """kept: the share of the requests that kept both promises. missed_ttft, missed_tpot: the shares
    of those that have ended, or are late already, that broke each. is_whole: False when it was
    stopped early. digest: equal for runs in which every request took exactly as long. asked: when
    the job keeps them all."""

    kept: float
    missed_ttft: float
    missed_tpot: float
    num_counted: int
    num_refused: int
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    output_tokens_per_s: float
    seconds: float
    uses: tuple[WorkerUse, ...]
    is_whole: bool
    digest: str
    asked: tuple[Asked, ...] = ()


def percentiles(values: Sequence[float]) -> Percentiles:
    """p50, p90 and p99, linear between neighbours; None without values."""
    if not values:
        return None
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return at(0.5), at(0.9), at(0.99)
