"""A worker's own metrics: an engine's running totals and gauges as prometheus families, and their
form on the wire.

The engine's state is read when it is asked for (once per second), so counting costs a step nothing.
Metrics have the field's names where there are any. Knows no router. The connector counts its
transfers in the registry that is passed to it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.background.threads import FAILURES
from pdserve.engine.engine import Engine
from pdserve.engine.execution.expert_load import ExpertLoad
from pdserve.engine.memory.block_manager import FreeSpace
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.engine.pacing.pace import Pace
from pdserve.engine.scheduling.home import Homes
from pdserve.protocol.events import Arrived, LegTimes
from pdserve.protocol.metric_families import MetricFamily, families_of

LabelRanks = Callable[[tuple[MetricFamily, ...]], tuple[MetricFamily, ...]]
"""See RankReports.labelled."""

LATENCY_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
)
LAG_BUCKETS = (
    0.00025,
    0.0005,
    0.001,
    0.002,
    0.003,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
)
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

LEG_TIMES = {
    "queue": "From a request's arrival at this worker to its first step, or its cancel",
    "prefill": "From a request's first step to its prompt's end, or its cancel",
    "decode": "From a prompt's end to its request's last token, or its cancel",
    "device": "Part of prefill and decode in which the device was busy",
}


class EngineCollector(Collector):
    """Collects the families of one engine's totals and gauges."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        scheduler = self._engine.scheduler
        homes = self._engine.homes
        counts = homes.count_blocks()
        totals = {
            "pdserve_engine_steps": ("Engine steps", engine.stats.num_steps),
            "pdserve_engine_prompt_tokens": (
                "Prompt tokens computed here",
                engine.stats.prompt_tokens,
            ),
            "pdserve_engine_generation_tokens": (
                "Tokens sampled here",
                engine.stats.generation_tokens,
            ),
            "pdserve_engine_late_compiles": (
                "Kernels compiled while serving",
                engine.late_compiles.count,
            ),
            "pdserve_num_preemptions": (
                "Sequences preempted for lack of blocks",
                scheduler.num_preemptions,
            ),
            "pdserve_prefix_cache_queries": (
                "Tokens looked up in the prefix cache",
                scheduler.prefix_queries,
            ),
            "pdserve_prefix_cache_hits": (
                "Tokens found in the prefix cache",
                scheduler.prefix_hits,
            ),
        }
        for name, (text, value) in totals.items():
            yield CounterMetricFamily(name, text, value)
        if engine.pace is not None:
            yield from _pace(engine.pace)
        gauges = {
            "pdserve_num_requests_running": (
                "Sequences in the running batch",
                len(scheduler.running),
            ),
            "pdserve_num_requests_waiting": ("Sequences waiting", len(scheduler.waiting)),
            "pdserve_kv_cache_usage_perc": (
                "Share of KV blocks that are owned",
                counts.owned / homes.num_usable_blocks,
            ),
        }
        for name, (text, gauge) in gauges.items():
            yield GaugeMetricFamily(name, text, gauge)
        states = GaugeMetricFamily("pdserve_kv_blocks", "KV blocks by state", labels=["state"])
        for state, count in vars(counts).items():
            states.add_metric([state], count)
        yield states
        yield from _free_space([home.blocks.free_space() for home in homes])
        yield from _homes(homes)


class RankCollector(Collector):
    """Collects the families that each rank has: device memory, and the load of its experts.

    `load` is None if the rank has no experts, or another rank reports the same.
    """

    def __init__(self, kv_cache: KVCache, load: ExpertLoad | None) -> None:
        self._kv_cache = kv_cache
        self._load = load

    def collect(self) -> Iterator[Metric]:
        yield _memory(self._kv_cache)
        if self._load is not None:
            yield from _experts(self._load.latest())


def _pace(pace: Pace) -> Iterator[Metric]:
    """Yields how well an engine that has a pace keeps it."""
    totals = pace.totals
    counters = {
        "slack_seconds": (
            "Predicted time that prompts added to steps that also decoded",
            totals.slack_seconds,
        ),
        "prompt_rows_beside_decodes": (
            "Prompt tokens computed in steps that also decoded",
            totals.rows_beside_decodes,
        ),
        "late_prompts": (
            "Prompts that began too late for slo.ttft_ms (1 s where no target is set)",
            totals.late_prompts,
        ),
        "lost_promises": (
            "Streams that fell too far behind slo.tpot_ms to catch up",
            totals.given_up,
        ),
    }
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(f"pdserve_engine_{name}", text, value)
    yield GaugeMetricFamily(
        "pdserve_engine_step_model_error",
        "Mean relative error of the latest predicted step times",
        pace.model.error,
    )


def _homes(homes: Homes) -> Iterator[Metric]:
    """Yields what shows whether one home has more to do than the others."""
    running = GaugeMetricFamily(
        "pdserve_home_requests_running", "Sequences that run in each home", labels=["home"]
    )
    free = GaugeMetricFamily(
        "pdserve_home_free_blocks", "Free KV blocks of each home", labels=["home"]
    )
    for home in homes:
        running.add_metric([str(home.number)], home.num_running)
        free.add_metric([str(home.number)], home.blocks.num_free)
    yield running
    yield free


def _free_space(homes: Sequence[FreeSpace]) -> Iterator[Metric]:
    """Yields the free space of all homes."""
    gauges = {
        "pdserve_kv_cached_free_blocks": (
            "Free blocks that the prefix cache still knows",
            sum(free.num_cached for free in homes),
        ),
        "pdserve_kv_blank_runs": (
            "Runs of neighbouring free blocks that hold nothing",
            sum(free.num_runs for free in homes),
        ),
        "pdserve_kv_longest_blank_run_blocks": (
            "Blocks of the longest run of neighbouring free blocks that hold nothing",
            max(free.longest_run for free in homes),
        ),
        "pdserve_kv_fragmentation_perc": (
            "Share of free blocks that hold nothing outside their longest run",
            max(free.fragmentation for free in homes),
        ),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(name, text, value)


def _experts(load: Mapping[int, np.ndarray]) -> Iterator[Metric]:
    """Yields what shows whether some of thousands of experts are busier than others."""
    rows = CounterMetricFamily(
        "pdserve_expert_rows", "Choices of experts by tokens computed here", labels=["layer"]
    )
    busiest = CounterMetricFamily(
        "pdserve_busiest_expert_rows",
        "Choices of each layer's busiest expert since the start",
        labels=["layer"],
    )
    for layer, counts in load.items():
        rows.add_metric([str(layer)], int(counts.sum()))
        busiest.add_metric([str(layer)], int(counts.max()))
    yield rows
    yield busiest


def _memory(kv_cache: KVCache) -> Metric:
    """Returns bytes on the KV cache's device; use by torch and by anybody is known only on CUDA."""
    text = (
        "Memory of the engine's device by use: the KV cache (kv_pool), torch's allocator, used by "
        "anybody, total"
    )
    family = GaugeMetricFamily("pdserve_device_memory_bytes", text, labels=["use"])
    family.add_metric(["kv_pool"], kv_cache.data.nbytes)
    if kv_cache.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(kv_cache.device)
        family.add_metric(["torch_allocated"], torch.cuda.memory_allocated(kv_cache.device))
        family.add_metric(["torch_reserved"], torch.cuda.memory_reserved(kv_cache.device))
        family.add_metric(["used"], total - free)
        family.add_metric(["total"], total)
    return family


class WorkerMetrics:
    """Holds the registry of one worker."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self._labelled: LabelRanks = lambda families: families
        self.registry.register(EngineCollector(engine))
        self.registry.register(RankCollector(engine.kv_cache, engine.expert_load))
        self.registry.register(FAILURES)
        self.step_seconds = Histogram(
            "pdserve_engine_step_seconds",
            "Duration of engine steps",
            buckets=STEP_BUCKETS,
            registry=self.registry,
        )
        self._arrivals = Counter(
            "pdserve_kv_arrivals",
            "Arrivals of a prompt's KV at this worker, by source, and why a pull failed",
            ["source", "reason"],
            registry=self.registry,
        )
        self._lag = Histogram(
            "pdserve_kv_transfer_lag_seconds",
            "From a prompt's last row written at the prefill worker to its last byte verified "
            "here, by both hosts' clocks",
            buckets=LAG_BUCKETS,
            registry=self.registry,
        )
        self.handoffs = Counter(
            "pdserve_kv_handoffs",
            "Prompts whose blocks this worker published",
            registry=self.registry,
        )

        self._leg_times = {
            name: Histogram(
                f"pdserve_request_{name}_time_seconds",
                text,
                buckets=LATENCY_BUCKETS,
                registry=self.registry,
            )
            for name, text in LEG_TIMES.items()
        }

    def arrived(self, event: Arrived) -> None:
        """Counts KV of a prompt that came here, or a pull of it that failed."""
        self._arrivals.labels(event.source, event.reason).inc()
        if event.source == "p2p":
            self._lag.observe(max(0.0, event.lag_s))  # clocks differ, and a sum must never fall

    def leg_done(self, times: LegTimes, stages: Iterable[str]) -> None:
        """Counts a Submit that ended here or was cancelled; only the given `stages` are counted.

        A leg is cancelled when its client left, or the router found a stop string.
        """
        for name in stages:
            self._leg_times[name].observe(getattr(times, f"{name}_s"))

    def label_ranks(self, labelled: LabelRanks) -> None:
        """Adds the reports of other ranks to the families from now on."""
        self._labelled = labelled

    def families(self) -> tuple[MetricFamily, ...]:
        """Returns everything in the registry, for a Snapshot."""
        return self._labelled(families_of(self.registry))
