"""The state of one prefix fetch, and the metrics of a worker's fetches.

This is plain state: `fetch_phase.FetchPhase` changes it.
"""

import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram

from pdserve.engine.scheduling.sequence import Request
from pdserve.protocol.commands import Start
from pdserve.protocol.handoff import KVCacheMeta

SECONDS_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
# A fetch may always take this share of the time that computing would take. On busy hosts fetches
# are later than predicted, and all the time of a fetch that is given up is lost.
COMPUTING_SHARE = 0.25


@dataclass(eq=False)
class Waiter:
    """A request that waits for the prefix."""

    request: Request
    starts: tuple[Start, ...]


@dataclass(eq=False)
class Fetch:
    """A prefix on its way from the worker that holds it.

    - `name`: digest of the prefix's last block, of this worker's block size.
    - `num_tokens`: length of the prefix, in whole blocks of both sides' sizes.
    - `digests`: digests of the holder's blocks.
    - `num_bytes`: expected number of bytes.
    - `began`, `deadline`: monotonic seconds.
    - `is_pulling`: blocks are reserved, and rows are coming.
    - `gave_way`: it was cancelled because others needed its blocks.
    """

    pull_id: int
    name: bytes
    holder: KVCacheMeta
    num_tokens: int
    digests: list[bytes]
    num_bytes: float
    deadline: float
    waiters: list[Waiter]
    began: float = field(default_factory=time.monotonic)
    is_pulling: bool = False
    num_cached: int = 0
    home: int = 0
    gave_way: bool = False


class FetchMetrics:
    """Counters of the fetches of one worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._outcomes = Counter(
            "pdserve_prefix_fetches",
            "Prefixes asked for at other workers, by outcome: done, miss, deadline, no-blocks, "
            "gave-way, left, or why the pull failed",
            ["outcome"],
            registry=registry,
        )
        self._bytes = Counter(
            "pdserve_prefix_fetch_bytes",
            "Bytes of prefixes that came from other workers",
            registry=registry,
        )
        self._tokens = Counter(
            "pdserve_prefix_fetch_tokens",
            "Prompt tokens whose rows came from other workers' prefix caches",
            registry=registry,
        )
        self._seconds = Histogram(
            "pdserve_prefix_fetch_seconds",
            "From the question to the end of a fetch",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )

    def ended(self, outcome: str, num_tokens: int, num_bytes: float, seconds: float) -> None:
        """Counts a fetch. `num_tokens` were verified, even if the fetch failed."""
        self._outcomes.labels(outcome).inc()
        self._tokens.inc(num_tokens)
        self._bytes.inc(num_bytes)
        self._seconds.observe(seconds)


def patience_s(predicted_s: float, computing_s: float | None, least_s: float) -> float:
    """Returns how many seconds a fetch may take.

    It is twice the prediction, or a share of the time that computing would take if that is more. It
    is never longer than computing, and at least least_s. `computing_s` is None if unknown.
    """
    patience = max(2 * predicted_s, least_s)
    if computing_s is None:
        return patience
    return min(max(patience, COMPUTING_SHARE * computing_s), max(computing_s, least_s))
