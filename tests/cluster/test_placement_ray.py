"""Where replicas land on several raylets with labels and resources, and what a start without room
says.

Fake engines; Ray and Serve are real. What fits where is tested without Ray in
tests/cluster/test_configuration.py.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray import serve
from ray._common.network_utils import find_free_port
from ray._private.state import actors
from ray.cluster_utils import Cluster
from ray.serve.schema import ServeDeploySchema
from ray.util import placement_group, remove_placement_group

from pdserve.cluster.app import assemble, build
from pdserve.cluster.operate import checks
from pdserve.cluster.operate.cluster_file import BUILDER
from pdserve.cluster.operate.ray_settings import settings
from pdserve.cluster.placement import capacity
from pdserve.cluster.placement.capacity import NoCapacity, await_capacity
from pdserve.configs.schema import ClusterConfig

pytestmark = pytest.mark.slow

FAKE = "fake_engine_host:FakeEngineHost"
READY_S = 120.0
SMALL = {"model": {"path": "demo/pdserve-demo", "name": "fake"}, "placement_deadline_s": 2.0}
PLACED = SMALL | {
    "router": {"replicas": 2, "labels": {"role": "ingress"}},
    "prefill": {"replicas": 2, "labels": {"role": "prefill"}},
    "decode": {
        "replicas": 3,
        "labels": {"role": "!in(ingress, prefill)"},
        "resources": {"decoder": 1},
    },
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The head has no label and no room for workers with resources; ingress, prefill, and two nodes
    for decoders."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="ray-") as folder,
    ):
        own = {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder, "WORKER_JOURNAL": folder}
        own["PYTHONPATH"] = f"{Path(__file__).parent}:{Path(__file__).parents[2]}"
        for name, value in {**settings(haproxy=False), **own}.items():
            patch.setenv(name, value)
        store: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 << 20}
        cluster = Cluster(
            initialize_head=True, connect=True, head_node_args=store | {"include_dashboard": False}
        )
        try:
            cluster.add_node(**store, labels={"role": "ingress"})
            cluster.add_node(**store, labels={"role": "prefill"}, resources={"decoder": 4})
            cluster.add_node(**store, labels={"role": "decode"}, resources={"decoder": 2})
            cluster.add_node(**store, resources={"decoder": 1})
            cluster.wait_for_nodes()
            serve.start(proxy_location="Disabled")
            yield cluster
        finally:
            serve.shutdown()
            ray.shutdown()
            cluster.shutdown()


def until(condition: Any) -> None:
    limit = time.monotonic() + READY_S
    while not condition():
        assert time.monotonic() < limit, serve.status()
        time.sleep(0.2)


def landed() -> Counter[tuple[str, str]]:
    """(deployment or class, label `role` of its node, or the node's decoders) of all living
    replicas and engines."""
    places = {}
    for node in ray.nodes():
        decoders = node["Resources"].get("decoder", 0)
        places[node["NodeID"]] = node["Labels"].get("role") or ("decoders" if decoders else "head")
    found: Counter[tuple[str, str]] = Counter()
    for actor in actors().values():
        if actor["State"] == "ALIVE" and (
            actor["Name"].startswith("SERVE_REPLICA") or "Engine" in actor["ActorClassName"]
        ):
            what = actor["Name"].split("#")[1] if "#" in actor["Name"] else "engine"
            found[what, places[actor["Address"]["NodeID"]]] += 1
    return found


def found_before_the_start(config: ClusterConfig) -> list[str]:
    return [
        text for _, text in checks.capacity(config, checks.Place(capacity.nodes(), is_here=False))
    ]


def test_replicas_land_where_labels_and_resources_say(cluster: Cluster) -> None:
    config = ClusterConfig.model_validate(PLACED)
    assert found_before_the_start(config) == []
    await_capacity(config)
    serve._run(assemble(config, FAKE), name="placed", route_prefix="/", _blocking=False)
    until(lambda: serve.status().applications["placed"].status == "RUNNING")
    assert landed() == {
        ("Router", "ingress"): 2,
        ("Prefill", "prefill"): 2,
        ("Decode", "decode"): 2,
        ("Decode", "decoders"): 1,
        ("engine", "prefill"): 2,
        ("engine", "decode"): 2,
        ("engine", "decoders"): 1,
    }
    until(
        lambda: (
            not any(
                node.free.get("decoder")
                for node in capacity.nodes()
                if node.labels.get("role") != "prefill"
            )
        )
    )
    await_capacity(config)  # of an update: what runs makes way
    serve.delete("placed")
    until(lambda: "placed" not in serve.status().applications)


def test_no_room_is_said_with_names_and_numbers(cluster: Cluster) -> None:
    config = ClusterConfig.model_validate(
        PLACED | {"prefill": {"replicas": 3, "num_cpus": 1, "num_gpus": 1}}
    )
    [said] = found_before_the_start(config)
    assert "there is no room for this cluster, even if nothing else used the nodes:" in said
    assert (
        "prefill: 3 replicas, each on one node with 1.001 CPU, 1 GPU; there is room for 0 (of 5 "
        "nodes 0" in said
    )
    assert (
        "of 2 CPU free, 2 of 2 decoder free; labels: role=decode" in said
        and "decode: 3" not in said
    )


def test_room_that_others_hold_is_waited_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ClusterConfig.model_validate(PLACED)
    held = placement_group([{"decoder": 1}] * 3, bundle_label_selector=[{"role": "!prefill"}] * 3)
    assert held.wait(10)
    until(lambda: sum(node.free.get("decoder", 0) for node in capacity.nodes()) == 4)
    assert found_before_the_start(config) == []
    began = time.monotonic()
    with pytest.raises(
        NoCapacity,
        match=r"within 2 s \(placement_deadline_s\)(.|\n)*decode: 3 replicas.*room for 0",
    ):
        await_capacity(config)
    assert 2 <= time.monotonic() - began < 6

    def free_it(seconds: float) -> None:
        remove_placement_group(held)
        monkeypatch.undo()

    monkeypatch.setattr(time, "sleep", free_it)
    await_capacity(config)
    await_capacity(
        ClusterConfig.model_validate({"decode": {"num_gpus": 9}, "placement_deadline_s": None})
    )


def test_serve_run_ends_with_what_is_missing(cluster: Cluster) -> None:
    """As `serve run cluster.yaml`: Serve calls the builder, in a process of its own, and once."""
    args = SMALL | {"decode": {"replicas": 2, "labels": {"zone": "moon"}}}
    application = {"name": "nowhere", "import_path": BUILDER, "args": args}
    began = time.monotonic()
    client = serve.context._get_global_client()
    assert client is not None
    client.deploy_apps(ServeDeploySchema(applications=[application]), _blocking=False)
    until(lambda: serve.status().applications["nowhere"].status == "DEPLOY_FAILED")
    took = time.monotonic() - began
    said = serve.status().applications["nowhere"].message
    assert (
        "there is no room for this cluster within 2 s (placement_deadline_s)" in said
        and "Traceback" not in said
    )
    assert (
        "decode: 2 replicas, each on one node with the labels {zone: moon}; there is room for 0 (0 "
        "of 5" in said
    )
    assert took < 30, took
    serve.delete("nowhere")


def test_the_builder_itself_refuses(cluster: Cluster) -> None:
    with pytest.raises(NoCapacity):
        build(ClusterConfig.model_validate(SMALL | {"decode": {"num_gpus": 1}}))


def test_doctor_asks_the_nodes_of_a_running_ray(cluster: Cluster, tmp_path: Path) -> None:
    args = SMALL | {
        "mode": "aggregated",
        "decode": {"labels": {"role": "decode"}, "resources": {"decoder": 2}},
    }
    path = tmp_path / "cluster.yaml"
    application = {"name": "x", "import_path": BUILDER, "args": args}
    http = {"host": "127.0.0.1", "port": find_free_port()}
    path.write_text(yaml.safe_dump({"http_options": http, "applications": [application]}))

    def doctor(**env: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pdserve.cluster.cli", "doctor", str(path)]
        done = subprocess.run(
            command, env=os.environ | env, capture_output=True, text=True, timeout=120
        )
        return done.returncode, done.stdout

    assert doctor(RAY_ADDRESS=cluster.address)[0] == 0
    status, said = doctor()
    assert status == 1 and "(set RAY_ADDRESS to use the nodes of a running Ray)" in said
