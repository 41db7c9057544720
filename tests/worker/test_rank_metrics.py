"""Metrics of an engine's ranks, told over links, as rank 0 shows them."""

import pytest
from prometheus_client import CollectorRegistry, Counter
from support.pair import linked
from support.waiting import until

from pdserve.protocol.metric_families import MetricFamily, families_of
from pdserve.worker.hosts import rank_metrics
from pdserve.worker.hosts.rank_metrics import RankReporter, RankReports


def moved(registry: CollectorRegistry) -> Counter:
    return Counter("pdserve_moved_bytes", "Bytes.", ["transport"], registry=registry)


def values(families: tuple[MetricFamily, ...]) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()))): (
            sample.value
        )
        for family in families
        for sample in family.samples
    }


def test_ranks_are_told_apart_in_what_all_of_them_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_metrics, "PERIOD_S", 0.02)
    own = CollectorRegistry()
    Counter("pdserve_steps", "Steps.", registry=own).inc(3)
    moved(own).labels("rdma").inc(5)
    reporters, links, counters = [], {}, []
    for rank in (1, 2):
        near, far = linked()
        registry = CollectorRegistry()
        counters.append(moved(registry))
        counters[-1].labels("rdma").inc(rank)
        reporters.append(RankReporter(far, registry))
        links[rank] = near
    reports = RankReports(links)
    try:
        name = "pdserve_moved_bytes_total"
        assert values(reports.labelled(families_of(own))) == {
            ("pdserve_steps_total",): 3,
            (name, "rank=0", "transport=rdma"): 5,
            (name, "rank=1", "transport=rdma"): 1,
            (name, "rank=2", "transport=rdma"): 2,
        }
        counters[1].labels("tcp").inc(7)
        later = (name, "rank=2", "transport=tcp")
        until(lambda: values(reports.labelled(families_of(own))).get(later) == 7)
    finally:
        for reporter in reporters:
            reporter.close()
        reports.close()


def test_a_rank_that_tells_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_metrics, "FIRST_S", 0.05)
    near, far = linked()
    try:
        with pytest.raises(TimeoutError, match="rank 3 has reported no metrics"):
            RankReports({3: near})
    finally:
        near.close()
        far.close()
