"""Our metrics on the exporter of a Ray node, beside the routers' own page, over a local Ray with
fake engines."""

import json
import time
import urllib.request
from collections.abc import Iterator

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from support.waiting import until

from pdserve.cluster import app as cluster_app
from pdserve.cluster.client import Client, connect
from pdserve.cluster.deployments.http_server import Address
from pdserve.cluster.deployments.metrics_bridge import Exposed, MetricsBridge
from pdserve.configs.schema import ClusterConfig
from pdserve.protocol.metric_families import MetricFamily, Sample
from pdserve.protocol.sampling_params import SamplingParams

FAKE = "fake_engine_host:FakeEngineHost"
APP = "sight"
PORT = 8126
RAYS_LABELS = {"Component", "NodeAddress", "SessionName", "Version", "WorkerId", "JobId"}
STEPS_S = "pdserve_engine_step_seconds"

Key = tuple[str, frozenset[tuple[str, str]]]


@pytest.fixture(scope="module")
def client(local_ray: None) -> Iterator[Client]:
    args = {"mode": "aggregated", "model": {"name": "fake"}, "decode": {"replicas": 2}}
    config = ClusterConfig.model_validate(args)
    serve.run(
        cluster_app.assemble(config, FAKE, Address("127.0.0.1", PORT)),
        name=APP,
        route_prefix="/sight",
    )
    with connect(app_name=APP) as client:
        yield client
    serve.delete(APP)


def page(url: str) -> dict[Key, float]:
    """Ours of a page: names without Ray's prefix and labels without its own -> values."""
    with urllib.request.urlopen(url, timeout=60) as response:
        text = response.read().decode()
    values: dict[Key, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("ray_")
            if name.startswith("pdserve_") and not name.endswith("_created"):
                labels = {k: v for k, v in sample.labels.items() if k not in RAYS_LABELS}
                key = name, frozenset(labels.items())
                assert key not in values, "two series look the same"
                values[key] = sample.value
    return values


def exporters() -> list[str]:
    return [
        f"http://{n['NodeManagerAddress']}:{n['MetricsExportPort']}/metrics"
        for n in ray.nodes()
        if n["Alive"]
    ]


def is_told(exporter: str) -> bool:
    """Whether the exporter shows a gauge and a counter of workers."""
    told = page(exporter)
    return all(value(told, name) for name in ("pdserve_kv_blocks", "pdserve_engine_steps_total"))


def value(values: dict[Key, float], name: str, **labels: str) -> float:
    """Sum over the series with these labels."""
    return sum(
        v
        for (known, pairs), v in values.items()
        if known == name and labels.items() <= dict(pairs).items()
    )


def by_router(values: dict[Key, float]) -> dict[Key, list[float]]:
    """Series without the label router: of this cluster's, and of routers that other tests had."""
    found: dict[Key, list[float]] = {}
    for (name, labels), number in values.items():
        found.setdefault(
            (name, frozenset(pair for pair in labels if pair[0] != "router")), []
        ).append(number)
    return found


def test_rays_exporter_shows_what_the_routers_page_shows(client: Client) -> None:
    client.generate([[10 * i, 1] for i in range(6)], SamplingParams(max_tokens=4))
    deadline = time.monotonic() + 120
    wrong = {"not looked yet"}
    while wrong and time.monotonic() < deadline:  # workers tell once a second, Ray every few
        time.sleep(1)
        own = page(f"http://127.0.0.1:{PORT}/metrics")
        router_keys = {key for key, v in own.items() if v and key[0].startswith("pdserve_router_")}
        worker_keys = {
            key for key, v in own.items() if v and not key[0].startswith("pdserve_router_")
        }
        [exporter] = exporters()
        told = page(exporter)
        routers = by_router(told)
        wrong = {str(k) for k in worker_keys if told.get(k) != own[k]}
        wrong |= {str(k) for k in router_keys if pytest.approx(own[k]) not in routers.get(k, [])}
    assert not wrong
    assert value(own, "pdserve_router_requests_total", outcome="ok") == 6
    assert len({dict(labels)["worker"] for _, labels in worker_keys}) == 2
    assert value(told, f"{STEPS_S}_count") == value(told, f"{STEPS_S}_bucket", le="0.025") > 0
    assert value(told, f"{STEPS_S}_sum") == pytest.approx(0.02 * value(told, f"{STEPS_S}_count")), (
        "sums are exact"
    )
    assert (
        6
        in routers["pdserve_router_time_to_first_token_seconds_bucket", frozenset({("le", "+Inf")})]
    )


@pytest.mark.slow
def test_a_workers_gauges_vanish_with_it(client: Client) -> None:
    [exporter] = exporters()
    client.generate([[1, 2]], SamplingParams(max_tokens=4))
    until(lambda: is_told(exporter), 120, pause_s=1)
    serve.delete(APP)
    deadline = time.monotonic() + 180
    while value(page(exporter), "pdserve_kv_blocks"):
        assert time.monotonic() < deadline, "the gauges of dead workers stay"
        time.sleep(1)
    assert value(page(exporter), "pdserve_engine_steps_total"), "what was counted stays counted"


async def test_counters_go_by_what_they_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, float, dict[str, str]]] = []

    class Instrument:
        def __init__(self, name: str, text: str, tags: tuple[str, ...]) -> None:
            self.name = name
            self.tags = tags

        def inc(self, amount: float, labels: dict[str, str]) -> None:
            assert amount > 0 and tuple(labels) == self.tags
            sent.append((self.name, amount, labels))

        set = inc

    for kind in ("Counter", "Gauge"):
        monkeypatch.setattr(f"pdserve.cluster.deployments.metrics_bridge.{kind}", Instrument)
    totals = {"a": 0.0, "b": 2.0}
    roles = ["prefill", "prefill", "decode", "decode"]

    def source() -> Exposed:
        samples = tuple(Sample("x_total", {"kind": kind}, total) for kind, total in totals.items())
        return Exposed(
            [MetricFamily("x", "counter", "X.", samples)], {"worker": "w", "role": roles.pop(0)}
        )

    bridge = MetricsBridge(source)
    bridge.publish()
    totals |= {"a": 5.0}
    bridge.publish()
    bridge.publish()
    totals |= {"b": 3.0}
    bridge.publish()
    bridge.close()
    labels = [{"kind": kind, "worker": "w", "role": "prefill"} for kind in "ba"]
    assert sent[:2] == [("x", 2.0, labels[0]), ("x", 5.0, labels[1])]
    assert sent[2:] == [("x", 1.0, labels[0] | {"role": "decode"})], (
        "under a new role only what was gained since"
    )
    assert json.dumps(sent)  # plain numbers
