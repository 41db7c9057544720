"""What is read from YAML, what Ray is asked for, and what the command line finds wrong: no Ray is started."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from pdserve.cluster import cli
from pdserve.cluster.framing import PIECE_BYTES, Joiner, cut
from pdserve.cluster.membership import Members, listen, publish
from pdserve.cluster.placement import Node, described, has_labels, unplaceable, worker_bundles
from pdserve.configs.schema import ClusterConfig, DeploymentConfig

ROOT = Path(__file__).parents[2]
CLUSTERS = [ROOT / "cluster.yaml", *sorted((ROOT / "pdserve/configs").glob("*.yaml"))]


def node(resources: dict[str, float]) -> Node:
    return Node("node", resources, resources, {})


def write(folder: Path, args: object, **changes: object) -> Path:
    application = {"name": "x", "import_path": cli.BUILDER, "args": args} | changes
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.name)
def test_every_shipped_cluster_is_valid_and_listens_on_loopback(path: Path) -> None:
    document, config = cli.load(path)
    assert document["http_options"]["host"] == "127.0.0.1"
    assert config.decode.replicas >= 1


def test_the_shipped_clusters_are_known_by_name() -> None:
    names = {"cpu-demo", "cpu-2p2d", "cpu-pool", "aggregated", "one-gpu", "1p1d-gpu", "many-nodes", "pool"}
    assert {path.stem for path in CLUSTERS[1:]} == names


def test_the_shipped_cluster_of_many_nodes_fits_nodes_with_its_labels_only() -> None:
    _, config = cli.load(ROOT / "pdserve/configs/many-nodes.yaml")
    roles = ["ingress", "prefill", "prefill", "decode", "decode"]
    nodes = [Node(role, has, has, {"role": role}) for role in roles if (has := {"CPU": 8.0, "GPU": 1.0})]
    assert unplaceable(config, nodes) == []
    [complaint] = unplaceable(config, nodes[:-1])
    assert complaint.startswith(
        "decode: 2 replicas, each on one node with 1 GPU, the labels {role: decode}; there is room"
    )
    assert len(unplaceable(config, [node({"CPU": 8.0, "GPU": 8.0})])) == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"decod": {"replicas": 1}}, "did you mean 'decode'"),
        ({"engine": {"block_size": 17}}, "engine.block_size"),
        ({"prefill": {"replicas": 0}}, "prefill.replicas must be at least 1"),
    ],
)
def test_mistakes_in_args_are_named(tmp_path: Path, args: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cli.load(write(tmp_path, args))


def test_another_application_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="import_path"):
        cli.load(write(tmp_path, {}, import_path="other:app"))


def test_a_bad_file_ends_up_with_a_message_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", str(tmp_path / "none.yaml")]) == 2
    assert cli.main(["up", str(write(tmp_path, {"modell": {}}))]) == 2
    assert "did you mean 'model'" in capsys.readouterr().err


def test_doctor_names_the_unset_settings_and_the_broken_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1")
    assert cli.main(["doctor", str(write(tmp_path, {"modell": {}}))]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("hint") and "RAY_AUTH_MODE is not set" in line for line in lines)
    assert any(line.startswith("ok") and "RAY_SERVE_THROUGHPUT_OPTIMIZED=1" in line for line in lines)
    assert any(line.startswith("error") and "did you mean 'model'" in line for line in lines)
    assert cli.main(["doctor", str(ROOT / "cluster.yaml")]) == 0


def test_of_a_replicas_traceback_the_last_error_is_shown() -> None:
    message = "Deployment failed:\nOSError: first\n\nThe above ...:\n  File x\nValueError: model path 'a'\nis nowhere\n"
    assert cli.last_error(message) == "ValueError: model path 'a'\nis nowhere"
    assert cli.last_error("plain words") == "plain words"


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} .* choose another"):
            cli.check_port("127.0.0.1", port)
    cli.check_port("127.0.0.1", port)


@pytest.mark.parametrize("port", [0, 65536, "80", None])
def test_a_port_in_the_file_must_be_one(port: object) -> None:
    with pytest.raises(ValueError, match=r"http_options\.port must be from 1 to 65535, not"):
        cli.check_port("127.0.0.1", port)  # type: ignore[arg-type]


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
    assert cli.settings(haproxy=False)["RAY_SERVE_ENABLE_DIRECT_INGRESS"] == "0"
    assert "RAY_SERVE_ENABLE_DIRECT_INGRESS" not in cli.settings(haproxy=True)


def test_a_workers_gpu_is_in_the_bundle_of_its_engine() -> None:
    shell, rank = worker_bundles(DeploymentConfig(num_gpus=1, num_cpus=2, resources={"decode": 1}))
    assert "GPU" not in shell
    assert rank == {"CPU": 2, "GPU": 1, "decode": 1}
    assert all(amount > 0 for bundle in worker_bundles(DeploymentConfig()) for amount in bundle.values())


def test_what_cannot_be_placed_is_named() -> None:
    config = ClusterConfig.model_validate({"prefill": {"num_gpus": 1}, "decode": {"num_gpus": 1, "replicas": 2}})
    gpu_node = node({"CPU": 8.0, "GPU": 2.0})
    assert unplaceable(config, [gpu_node, node({"CPU": 8.0, "GPU": 1.0})]) == []
    [complaint] = unplaceable(config, [gpu_node])
    assert complaint in (
        "prefill: 1 replicas, each on one node with 1 GPU; there is room for 0 (of 1 nodes 1 could hold one if nothing "
        "else used them)",
        "decode: 2 replicas, each on one node with 1 GPU; there is room for 1 (of 1 nodes 1 could hold one if nothing "
        "else used them)",
    )
    assert len(unplaceable(config, [node({"CPU": 8.0})])) == 2
    used = Node("x", {"CPU": 8.0, "GPU": 3.0}, {"CPU": 8.0, "GPU": 1.0}, {})
    assert unplaceable(config, [used]) != [] == unplaceable(config, [used.emptied()])


def test_what_fits_in_some_order_fits() -> None:
    """Of two GPUs with 4 and 16 processors, D would take the second."""
    args = {"prefill": {"num_gpus": 1, "num_cpus": 8}, "decode": {"num_gpus": 1, "num_cpus": 2}}
    nodes = [node({"CPU": 16.0, "GPU": 1.0}), node({"CPU": 4.0, "GPU": 1.0})]
    assert unplaceable(ClusterConfig.model_validate(args), nodes) == []
    assert unplaceable(ClusterConfig.model_validate(args), nodes[::-1]) == []


@pytest.mark.parametrize(("selector", "values"), [("a", "a"), ("!a", "bc-"), ("in(a,b)", "ab"), ("!in(a,b)", "c-")])
def test_labels_select_as_ray_does(selector: str, values: str) -> None:
    """values: those of the label `zone` that match, - for a node without it; tried with Ray's own placement groups."""
    labels = {value: {} if value == "-" else {"zone": value} for value in "abc-"}
    assert [v for v in "abc-" if has_labels(Node("x", {}, {}, labels[v]), {"zone": selector})] == list(values)


@pytest.mark.parametrize(
    "labels", [{"zone": "-a"}, {"zone": "in()"}, {"zone": ""}, {"": "a"}, {"a b": "c"}, {"z": "in(a"}]
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
        {"router": {"labels": {"role": "ingress"}}, "decode": {"replicas": 3, "resources": {"decode": 1}}}
    )
    nodes = [Node("a", {"CPU": 2.0, "decode": 1.0}, {"CPU": 1.5, "decode": 1.0}, {"role": "x", "ray.io/node-id": "0"})]
    router, decode = unplaceable(config, nodes)
    assert "router: 1 replicas, each on one node with the labels {role: ingress}; there is room for 0" in router
    assert "0 of 1 nodes have the labels" in router
    assert "decode: 3 replicas, each on one node with 1 decode; there is room for 1" in decode
    assert described(nodes, ["decode"]) == "a: 1.5 of 2 CPU free, 1 of 1 decode free; labels: role=x"
    assert described(nodes * 20, []).endswith("and 4 more nodes")


def test_room_is_counted_and_not_tried_replica_by_replica() -> None:
    args = {"mode": "aggregated", "decode": {"num_cpus": 0.1, "num_gpus": 0.1}}
    config = ClusterConfig.model_validate(args)
    huge = config.model_copy(update={"decode": config.decode.model_copy(update={"replicas": 10**9})})
    [complaint] = unplaceable(huge, [node({"CPU": 8.0, "GPU": 0.3})] * 1000)
    assert "there is room for 3000 " in complaint
    with pytest.raises(ValidationError, match="1024"):
        ClusterConfig.model_validate({"decode": {"replicas": 200_000}})


def test_a_worker_is_not_spread_over_nodes() -> None:
    config = ClusterConfig.model_validate({"mode": "aggregated", "decode": {"num_gpus": 1, "num_cpus": 4}})
    assert len(unplaceable(config, [node({"CPU": 8.0}), node({"GPU": 1.0, "CPU": 1.0})])) == 1


def test_the_demo_fits_two_cores() -> None:
    _, config = cli.load(ROOT / "cluster.yaml")
    assert unplaceable(config, [node({"CPU": 2.0})]) == []


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES, 3 * PIECE_BYTES + 7])
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


def test_processes_without_an_engine_import_no_torch() -> None:
    modules = ["worker_replica", "router_replica", "client", "app", "cli", "addressing", "links"]
    imports = ", ".join(f"pdserve.cluster.{name}" for name in modules)
    check = f"import {imports}, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_the_command_line_sets_what_ray_reads_before_importing_it() -> None:
    check = "import pdserve.cluster.cli, sys; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_routers_serve_http_themselves_unless_the_file_asks_for_what_only_serve_does() -> None:
    http = {"host": "127.0.0.1", "port": 8009, "keep_alive_timeout_s": 7}
    assert cli.serve_options(http, "/") == []
    assert cli.own_address(http) == cli.Address("127.0.0.1", 8009, 7)
    more = http | {"request_timeout_s": 5, "root_path": "/x"}
    assert cli.serve_options(more, "/llm") == [
        "http_options.request_timeout_s",
        "http_options.root_path",
        "route_prefix /llm",
    ]


def test_the_greeting_names_what_brought_serves_slower_server() -> None:
    assert "proxy" not in cli.greeting("http://x:1", ClusterConfig(), 1.0, [])
    shown = cli.greeting("http://x:1", ClusterConfig(), 1.0, ["http_options.root_path", "route_prefix /llm"])
    assert "Serve's Python proxy" in shown and "does not know http_options.root_path, route_prefix /llm." in shown


def test_with_haproxy_a_stopping_router_does_not_wait_for_half_a_minute() -> None:
    assert float(cli.settings(haproxy=True)["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"]) <= 5


def test_rays_token_authentication_is_on_by_default() -> None:
    assert cli.settings(False)["RAY_AUTH_MODE"] == cli.settings(True)["RAY_AUTH_MODE"] == "token"


def test_an_address_that_strangers_reach_without_keys_is_remarked() -> None:
    keyed = ClusterConfig.model_validate({"router": {"api_key_env": "KEYS"}})
    for host in ("0.0.0.0", "::", "10.1.2.3", "node-7"):
        (line,) = cli.open_doors(host, ClusterConfig())
        assert host in line and "router.api_keys_file" in line
        assert not list(cli.open_doors(host, keyed))
    for host in ("127.0.0.1", "localhost", "::1"):
        assert not list(cli.open_doors(host, ClusterConfig()))
    assert "authorization: Bearer KEY" in cli.greeting("http://x:1", keyed, 1.0, [])
