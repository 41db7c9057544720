"""Metrics of an engine's ranks: each other rank reports its own to rank 0, which labels them.

Metrics that all ranks have (transfers, the pool, memory, failures of threads) get the label `rank`;
the engine's own metrics get no label.
"""

import threading
from collections.abc import Iterator, Mapping
from functools import partial

import msgspec
from prometheus_client import CollectorRegistry

from pdserve.background.threads import KeptThread
from pdserve.parallel.rank_link import RankLink
from pdserve.protocol.metric_families import MetricFamily, Sample, families_of

PERIOD_S = 1.0  # the period of Snapshots
FIRST_S = 60.0

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[MetricFamily, ...])


class RankReporter:
    """Another rank's end: reports what the registry has, now and every PERIOD_S, until rank 0 is
    gone."""

    def __init__(self, link: RankLink, registry: CollectorRegistry) -> None:
        self._link = link
        self._registry = registry
        self._closing = threading.Event()
        self._thread = KeptThread("rank metrics", self._report)

    def close(self) -> None:
        self._closing.set()
        self._thread.finish()
        self._link.close()

    def _report(self) -> None:
        while True:
            try:
                self._link.send(_encoder.encode(families_of(self._registry)))
            except ConnectionError:
                return
            if self._closing.wait(PERIOD_S):
                return


class RankReports:
    """Rank 0's end, with a link to each other rank. Raises TimeoutError if a rank reports
    nothing."""

    def __init__(self, links: Mapping[int, RankLink]) -> None:
        self._links = links
        self._latest: dict[int, bytes] = {}
        self._heard = threading.Condition()
        for rank, link in links.items():
            link.read(partial(self._hear, rank), lambda: None)
        with self._heard:
            if not self._heard.wait_for(lambda: len(self._latest) == len(links), FIRST_S):
                silent = min(links.keys() - self._latest.keys())
                raise TimeoutError(f"rank {silent} has reported no metrics")

    def labelled(self, own: tuple[MetricFamily, ...]) -> tuple[MetricFamily, ...]:
        """Returns rank 0's families; those that other ranks have too also get the other ranks'
        samples."""
        theirs: dict[str, list[Sample]] = {}
        for rank, data in sorted(self._latest.items()):
            for family in _decoder.decode(data):
                samples = theirs.setdefault(family.name, [])
                samples += _of_rank(family.samples, rank)
        return tuple(
            msgspec.structs.replace(
                family, samples=(*_of_rank(family.samples, 0), *theirs[family.name])
            )
            if family.name in theirs
            else family
            for family in own
        )

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _hear(self, rank: int, data: bytes) -> None:
        with self._heard:
            self._latest[rank] = data
            self._heard.notify()


def _of_rank(samples: tuple[Sample, ...], rank: int) -> Iterator[Sample]:
    for sample in samples:
        yield Sample(sample.name, {**sample.labels, "rank": str(rank)}, sample.value)
