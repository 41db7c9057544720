"""Jobs and outcomes, the messages of a process that simulates: one line of JSON each.

This module needs no torch. `search.simulators` writes jobs, and `child` reads them.
"""

import math
from collections.abc import Sequence

import msgspec

from pdserve.plan.profile.profile import Profile

Percentiles = tuple[float, float, float] | None  # p50, p90, p99


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One request of a load."""

    at_s: float  # seconds since the start
    # (name, number of tokens) of each part of the prompt; equal names are equal tokens
    prefixes: tuple[tuple[str, int], ...]
    num_out: int


class Pool(msgspec.Struct, frozen=True):
    """A number of equal workers."""

    role: str
    count: int
    profile: Profile  # that of one worker with all its GPUs
    num_kv_tokens: int
    engine: dict[str, int | bool]  # fields of EngineConfig that the engine itself must know


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster and a load."""

    pools: tuple[Pool, ...]
    requests: tuple[Request, ...]
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    # Number of clients, each of which sends its next request when its last one has ended. None:
    # requests are sent at their times.
    clients: int | None = None
    skip: int = 0  # Number of first requests that are not counted.
    split: str = "auto"
    max_model_len: int | None = None
    stop_beyond: float = 1.0  # Share of missed requests at which the simulation stops.
    links: int = 1  # Number of links over which a hand-off's bytes go.
    is_macro: bool = True  # False simulates every step by itself.
    is_paced: bool = True  # False: workers compute prompts at full speed, whatever is promised.
    keeps_all: bool = False  # True: the outcome has every counted request.


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """One request that was counted, with its latencies in milliseconds."""

    at_s: float
    ttft_ms: float | None  # None: the request was refused or failed
    tpot_ms: float | None


class WorkerUse(msgspec.Struct, frozen=True):
    """How one worker was used."""

    worker: str
    role: str
    busy: float  # Share of the time in steps.
    prompts: float  # Share of the time in steps with prompts.
    kv_peak: float  # Largest share of the KV cache in use.
    num_preemptions: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a simulation."""

    kept: float  # Share of the requests that kept both promises.
    # Shares of the requests that broke each promise, of those that have ended or are late already.
    missed_ttft: float
    missed_tpot: float
    num_counted: int
    num_refused: int
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    output_tokens_per_s: float
    seconds: float
    uses: tuple[WorkerUse, ...]
    is_whole: bool  # False: it was stopped early.
    digest: str  # Equal for runs in which every request had exactly the same times.
    asked: tuple[Asked, ...] = ()  # All counted requests if the job's keeps_all is set.


def percentiles(values: Sequence[float]) -> Percentiles:
    """Returns p50, p90 and p99, interpolated linearly. None: there are no values."""
    if not values:
        return None
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return at(0.5), at(0.9), at(0.99)
