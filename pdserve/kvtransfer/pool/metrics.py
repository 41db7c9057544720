"""Counters of the KV pool, in a registry that the caller owns and exposes.

`PoolMetrics` is made by `lmcache_backend.py`, and updated by `threaded_pool.py` and
`operations.py`. The hosts register `PoolServerCollector` for a server that they keep.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector


class PoolMetrics:
    """Metrics of the KV pool. operation: retrieve or store. outcome: "done", "miss", or the reason
    of a PoolFailed or of a refusal."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "pdserve_kv_pool_requests",
            "Operations on the KV pool by how they ended.",
            ["operation", "outcome"],
            registry=registry,
        )
        self.bytes = Counter(
            "pdserve_kv_pool_bytes",
            "Bytes copied from and to the KV pool.",
            ["operation"],
            registry=registry,
        )
        self.seconds = Histogram(
            "pdserve_kv_pool_seconds",
            "Seconds from the call to the result.",
            ["operation"],
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
            registry=registry,
        )
        self.unsettled = Counter(
            "pdserve_kv_pool_unsettled",
            "Operations given up while blocks were being copied.",
            registry=registry,
        )
        self.breaker_open = Gauge(
            "pdserve_kv_pool_breaker_open",
            "1 while the KV pool is not asked, after consecutive errors.",
            registry=registry,
        )


class PoolServerCollector(Collector):
    """Collects what a server of the KV pool says of itself. evicted_chunks: its running total."""

    def __init__(self, evicted_chunks: Callable[[], int]) -> None:
        self._evicted_chunks = evicted_chunks

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(
            "pdserve_kv_pool_evicted_chunks",
            "Chunks that the KV pool's server has evicted from its memory, as it said within the "
            "last 10 s; from the worker that keeps the server",
            value=self._evicted_chunks(),
        )
