"""Tests what is read from YAML, what Ray is asked for, and what the command line says; no Ray is
started.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import ValidationError

from pdserve.cluster import cli
from pdserve.cluster.deployments.http_server import Address
from pdserve.cluster.links.framing import PIECE_BYTES, Joiner, cut
from pdserve.cluster.links.membership import Members, listen, publish
from pdserve.cluster.operate.cluster_file import load
from pdserve.cluster.operate.ray_settings import settings
from pdserve.cluster.operate.readiness import last_error
from pdserve.cluster.operate.up import greeting, own_address, serve_options
from pdserve.cluster.placement.placement import (
    CRUMB,
    Node,
    described,
    has_labels,
    strategy,
    unplaceable,
    worker_bundles,
)
from pdserve.configs.engine import EngineConfig
from pdserve.configs.schema import ClusterConfig, DeploymentConfig

ROOT = Path(__file__).parents[2]


def node(resources: dict[str, float], labels: Mapping[str, str] | None = None) -> Node:
    return Node("node", resources, resources, labels or {})


def test_the_shipped_cluster_of_many_nodes_fits_nodes_with_its_labels_only() -> None:
    config = load(ROOT / "pdserve/configs/many-nodes.yaml").config
    roles = ["ingress", "prefill", "prefill", "decode", "decode"]
    nodes = [
        Node(role, has, has, {"role": role}) for role in roles if (has := {"CPU": 8.0, "GPU": 1.0})
    ]
    assert unplaceable(config, nodes) == []
    [complaint] = unplaceable(config, nodes[:-1])
    assert complaint.startswith(
        "decode: 2 replicas, each on one node with 1 GPU, the labels {role: decode}; there is room"
    )
    assert len(unplaceable(config, [node({"CPU": 8.0, "GPU": 8.0})])) == 3


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--timeout", "nan", "--timeout: must be a finite number above 0, not 'nan'"),
        ("--timeout", "inf", "above 0, not 'inf'"),
        ("--timeout", "-5", "above 0, not '-5'"),
        ("--port", "0", "--port: must be from 1 to 65535, not 0"),
        ("--port", "70000", "from 1 to 65535, not 70000"),
    ],
)
def test_impossible_numbers_are_refused(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["up", "none.yaml", option, value])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_without_haproxy_the_proxy_is_kept() -> None:
    assert settings(haproxy=False)["RAY_SERVE_ENABLE_DIRECT_INGRESS"] == "0"
    assert "RAY_SERVE_ENABLE_DIRECT_INGRESS" not in settings(haproxy=True)


def test_a_worker_has_a_bundle_for_each_stage_and_a_gpu_for_each_rank() -> None:
    asked = DeploymentConfig(num_gpus=1, num_cpus=2, resources={"decode": 1})
    stage = {"CPU": 2, "GPU": 2, "decode": 1}
    with_replica = stage | {"CPU": 2 + CRUMB}
    assert worker_bundles(asked, EngineConfig(tensor_parallel=2)) == [with_replica]
    staged = EngineConfig(tensor_parallel=2, pipeline_parallel=3)
    assert worker_bundles(asked, staged) == [with_replica, stage, stage]
    whole = EngineConfig(tensor_parallel=2)
    assert strategy(DeploymentConfig(), whole) == strategy(asked, whole) == "STRICT_PACK"
    assert strategy(DeploymentConfig(), staged) == strategy(asked, staged) == "PACK"
    [least] = worker_bundles(DeploymentConfig(), EngineConfig())
    assert all(amount > 0 for amount in least.values()), "Ray refuses empty bundles"


def test_stages_with_parts_of_gpus_are_on_one_node() -> None:
    def config(num_gpus: float) -> ClusterConfig:
        decode = {"num_gpus": num_gpus, "engine": {"pipeline_parallel": 2}}
        return ClusterConfig.model_validate({"mode": "aggregated", "decode": decode})

    one, two = (node({"CPU": 8.0, "GPU": count}) for count in (1.0, 2.0))
    assert unplaceable(config(1), [two]) == unplaceable(config(1), [one, one]) == []
    [complaint] = unplaceable(config(1), [one])
    assert "each of 2 stages, each on a node with 1 GPU" in complaint
    assert unplaceable(config(0.5), [one]) == []
    [complaint] = unplaceable(config(0.5), [node({"CPU": 8.0, "GPU": 0.5})] * 2)
    assert "each on one node with 1 GPU" in complaint


def test_stages_may_be_on_several_nodes_and_one_stage_may_not() -> None:
    stages = {"device": "cpu", "tensor_parallel": 2, "pipeline_parallel": 2}
    config = ClusterConfig.model_validate(
        {
            "mode": "aggregated",
            "decode": {
                "resources": {"slot": 2},
                "labels": {"role": "d"},
                "replicas": 2,
                "engine": stages,
            },
        }
    )
    large = node({"CPU": 8.0, "slot": 4.0}, labels={"role": "d"})
    small = node({"CPU": 8.0, "slot": 2.0}, labels={"role": "d"})
    other = node({"CPU": 8.0, "slot": 8.0})
    assert unplaceable(config, [large, large]) == []
    assert unplaceable(config, [small, large, small]) == []
    [complaint] = unplaceable(config, [small, large, other])
    assert complaint == (
        "decode: 2 replicas, each of 2 stages, each on a node with 2 slot, the labels {role: d}; "
        "there is room for 1 (2 of 3 nodes have the labels, 2 could hold a stage if nothing else "
        "used them)"
    )
    odd = node({"CPU": 8.0, "slot": 3.0}, labels={"role": "d"})
    [complaint] = unplaceable(config, [odd, odd, odd])
    assert "there is room for 1 " in complaint


def test_what_cannot_be_placed_is_named() -> None:
    config = ClusterConfig.model_validate(
        {"prefill": {"num_gpus": 1}, "decode": {"num_gpus": 1, "replicas": 2}}
    )
    gpu_node = node({"CPU": 8.0, "GPU": 2.0})
    assert unplaceable(config, [gpu_node, node({"CPU": 8.0, "GPU": 1.0})]) == []
    [complaint] = unplaceable(config, [gpu_node])
    assert complaint in (
        "prefill: 1 replicas, each on one node with 1 GPU; there is room for 0 (of 1 nodes 1 could "
        "hold one if nothing "
        "else used them)",
        "decode: 2 replicas, each on one node with 1 GPU; there is room for 1 (of 1 nodes 1 could "
        "hold one if nothing "
        "else used them)",
    )
    assert len(unplaceable(config, [node({"CPU": 8.0})])) == 2
    used = Node("x", {"CPU": 8.0, "GPU": 3.0}, {"CPU": 8.0, "GPU": 1.0}, {})
    assert unplaceable(config, [used]) != [] == unplaceable(config, [used.emptied()])


def test_what_fits_in_some_order_fits() -> None:
    """There are two GPUs, with 4 and 16 processors; D would take the second."""
    args = {"prefill": {"num_gpus": 1, "num_cpus": 8}, "decode": {"num_gpus": 1, "num_cpus": 2}}
    nodes = [node({"CPU": 16.0, "GPU": 1.0}), node({"CPU": 4.0, "GPU": 1.0})]
    assert unplaceable(ClusterConfig.model_validate(args), nodes) == []
    assert unplaceable(ClusterConfig.model_validate(args), nodes[::-1]) == []


@pytest.mark.parametrize(
    ("selector", "values"), [("a", "a"), ("!a", "bc-"), ("in(a,b)", "ab"), ("!in(a,b)", "c-")]
)
def test_labels_select_as_ray_does(selector: str, values: str) -> None:
    """`values` are those of the label `zone` that match, with - for a node without it.

    They were tried with Ray's own placement groups.
    """
    labels = {value: {} if value == "-" else {"zone": value} for value in "abc-"}
    assert [
        v for v in "abc-" if has_labels(Node("x", {}, {}, labels[v]), {"zone": selector})
    ] == list(values)


@pytest.mark.parametrize(
    "labels",
    [{"zone": "-a"}, {"zone": "in()"}, {"zone": ""}, {"": "a"}, {"a b": "c"}, {"z": "in(a"}],
)
def test_labels_that_ray_would_not_take_are_refused(labels: dict[str, str]) -> None:
    for key in ("prefill", "decode", "router"):
        with pytest.raises(ValidationError, match="is no label selector"):
            ClusterConfig.model_validate({key: {"labels": labels}})


def test_values_of_a_selector_may_be_written_with_spaces() -> None:
    config = ClusterConfig.model_validate({"decode": {"labels": {"ray.io/zone": "!in(a, b,c)"}}})
    assert config.decode.labels == {"ray.io/zone": "!in(a,b,c)"}


def test_labels_that_no_node_has_are_named_with_what_nodes_have() -> None:
    config = ClusterConfig.model_validate(
        {
            "router": {"labels": {"role": "ingress"}},
            "decode": {"replicas": 3, "resources": {"decode": 1}},
        }
    )
    nodes = [
        Node(
            "a",
            {"CPU": 2.0, "decode": 1.0},
            {"CPU": 1.5, "decode": 1.0},
            {"role": "x", "ray.io/node-id": "0"},
        )
    ]
    router, decode = unplaceable(config, nodes)
    assert (
        "router: 1 replicas, each on one node with the labels {role: ingress}; there is room for 0"
        in router
    )
    assert "0 of 1 nodes have the labels" in router
    assert "decode: 3 replicas, each on one node with 1 decode; there is room for 1" in decode
    assert (
        described(nodes, ["decode"]) == "a: 1.5 of 2 CPU free, 1 of 1 decode free; labels: role=x"
    )
    assert described(nodes * 20, []).endswith("and 4 more nodes")


def test_room_is_counted_and_not_tried_replica_by_replica() -> None:
    args = {"mode": "aggregated", "decode": {"num_cpus": 0.1, "num_gpus": 0.1}}
    config = ClusterConfig.model_validate(args)
    huge = config.model_copy(
        update={"decode": config.decode.model_copy(update={"replicas": 10**9})}
    )
    [complaint] = unplaceable(huge, [node({"CPU": 8.0, "GPU": 0.3})] * 1000)
    assert "there is room for 3000 " in complaint
    with pytest.raises(ValidationError, match="1024"):
        ClusterConfig.model_validate({"decode": {"replicas": 200_000}})


def test_a_worker_is_not_spread_over_nodes() -> None:
    config = ClusterConfig.model_validate(
        {"mode": "aggregated", "decode": {"num_gpus": 1, "num_cpus": 4}}
    )
    assert len(unplaceable(config, [node({"CPU": 8.0}), node({"GPU": 1.0, "CPU": 1.0})])) == 1


def test_the_demo_fits_two_cores() -> None:
    config = load(ROOT / "cluster.yaml").config
    assert unplaceable(config, [node({"CPU": 2.0})]) == []


@pytest.mark.parametrize(
    "size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES, 3 * PIECE_BYTES + 7]
)
def test_messages_survive_being_cut(size: int) -> None:
    message = bytes(range(256)) * (size // 256 + 1)
    message = message[:size]
    pieces = list(cut(message))
    assert max(map(len, pieces)) <= PIECE_BYTES + 1
    joiner = Joiner()
    for _ in range(2):
        joined = [joiner.feed(piece) for piece in pieces]
        assert joined[:-1] == [None] * (len(pieces) - 1)
        assert joined[-1] == message


def test_listeners_hear_the_present_and_each_change_once() -> None:
    heard: list[Members] = []
    publish("app#X", frozenset({"a"}))
    stop = listen("app#X", heard.append)
    publish("app#X", frozenset({"a"}))
    publish("app#X", frozenset({"a", "b"}))
    publish("app#Y", frozenset({"c"}))
    stop()
    publish("app#X", frozenset())
    assert heard == [frozenset({"a"}), frozenset({"a", "b"})]


@pytest.mark.processes
def test_processes_without_an_engine_import_no_torch() -> None:
    modules = [
        "client",
        "app",
        "cli",
        "deployments.worker_replica",
        "deployments.router_replica",
        "links.serve_links",
    ]
    imports = ", ".join(f"pdserve.cluster.{name}" for name in modules)
    check = (
        f"import {imports}, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


@pytest.mark.processes
def test_the_command_line_sets_what_ray_reads_before_importing_it() -> None:
    check = "import pdserve.cluster.cli, sys; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_with_haproxy_a_stopping_router_does_not_wait_for_half_a_minute() -> None:
    assert float(settings(haproxy=True)["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"]) <= 5


def test_rays_token_authentication_is_on_by_default() -> None:
    assert settings(False)["RAY_AUTH_MODE"] == settings(True)["RAY_AUTH_MODE"] == "token"


def test_of_a_replicas_traceback_the_last_error_is_shown() -> None:
    message = (
        "Deployment failed:\nOSError: first\n\nThe above ...:\n  File x\nValueError: model path "
        "'a'\nis nowhere\n"
    )
    assert last_error(message) == "ValueError: model path 'a'\nis nowhere"
    assert last_error("plain words") == "plain words"


def test_routers_serve_http_themselves_unless_the_file_asks_for_what_only_serve_does() -> None:
    http = {"host": "127.0.0.1", "port": 8009, "keep_alive_timeout_s": 7}
    assert serve_options(http, "/") == []
    assert own_address(http) == Address("127.0.0.1", 8009, 7)
    more = http | {"request_timeout_s": 5, "root_path": "/x"}
    assert serve_options(more, "/llm") == [
        "http_options.request_timeout_s",
        "http_options.root_path",
        "route_prefix /llm",
    ]


def test_the_greeting_names_what_brought_serves_slower_server() -> None:
    assert "proxy" not in greeting("http://x:1", ClusterConfig(), 1.0, [])
    assert "in a browser" not in greeting("http://x:1", ClusterConfig(), 1.0, [])
    assert "Or open http://x:1/ in a browser" in greeting(
        "http://x:1", ClusterConfig(), 1.0, [], True
    )
    shown = greeting(
        "http://x:1", ClusterConfig(), 1.0, ["http_options.root_path", "route_prefix /llm"]
    )
    assert (
        "Serve's Python proxy" in shown
        and "does not know http_options.root_path, route_prefix /llm." in shown
    )
