"""Every level's keys of cluster.yaml are known, and errors name their place in the file."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.cluster import cli
from pdserve.cluster.operate.cluster_file import BUILDER, load
from pdserve.cluster.operate.ray_settings import settings

ROOT = Path(__file__).parents[2]
CLUSTERS = [ROOT / "cluster.yaml", *sorted((ROOT / "pdserve/configs").glob("*.yaml"))]
MODEL = {"model": {"path": "demo/pdserve-demo"}}


def application(**changes: object) -> dict[str, Any]:
    return {"name": "x", "import_path": BUILDER, "args": MODEL} | changes


def written(folder: Path, document: object) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


def complaint(folder: Path, document: object) -> str:
    path = written(folder, document)
    with pytest.raises(ValueError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.name)
def test_every_shipped_cluster_is_valid_and_listens_on_loopback(path: Path) -> None:
    file = load(path)
    assert file.document["http_options"]["host"] == "127.0.0.1"
    assert file.config.decode.replicas >= 1 and not file.unused


def test_the_shipped_clusters_are_known_by_name() -> None:
    names = [
        "cpu-demo",
        "cpu-2p2d",
        "cpu-pool",
        "aggregated",
        "one-gpu",
        "1p1d-gpu",
        "many-nodes",
        "pool",
    ]
    assert {path.stem for path in CLUSTERS[1:]} == set(names)


def test_a_misspelt_args_serves_nothing(tmp_path: Path) -> None:
    misspelt = {"name": "x", "import_path": BUILDER, "arguments": MODEL}
    said = complaint(tmp_path, {"applications": [misspelt]})
    assert said == "applications[0]: unknown key 'arguments': did you mean 'args'?"


@pytest.mark.parametrize(
    ("place", "key", "near"),
    [
        ("", "http_option", "http_options"),
        ("", "proxy_locations", "proxy_location"),
        ("http_options", "hosts", "host"),
        ("grpc_options", "prt", "port"),
        ("logging_config", "log_levl", "log_level"),
        ("applications.0", "args_", "args"),
        ("applications.0.logging_config", "encodin", "encoding"),
        ("applications.0.deployments.0", "num_replica", "num_replicas"),
        ("applications.0.deployments.0.ray_actor_options", "num_cpu", "num_cpus"),
        ("applications.0.deployments.0.autoscaling_config", "max_replica", "max_replicas"),
    ],
)
def test_an_unknown_key_of_any_level_names_the_nearest(
    tmp_path: Path, place: str, key: str, near: str
) -> None:
    deployment = {"name": "Decode", "ray_actor_options": {}, "autoscaling_config": {}}
    document: dict[str, Any] = {
        "http_options": {},
        "grpc_options": {},
        "logging_config": {},
        "applications": [application(deployments=[deployment], logging_config={})],
    }
    inner: Any = document
    for step in filter(None, place.split(".")):
        inner = inner[int(step) if step.isdigit() else step]
    inner[key] = 1
    where = place.replace(".0", "[0]") or "the file"
    assert complaint(tmp_path, document) == f"{where}: unknown key {key!r}: did you mean {near!r}?"


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("", "is empty"),
        ("# nothing but this", "is empty"),
        ("- a", "must be a mapping with `applications:`"),
        ("a: [", "is not YAML"),
        ("{}", "`applications:` must be a list of one application, but is no list"),
        ("applications: foo", "but is no list"),
        ("applications: &all [*all]", "contains itself through an alias"),
        ("applications: []", "but is a list of 0"),
        ({"applications": [application(), application(name="y")]}, "but is a list of 2"),
        ("applications: [foo]", "applications[0] must be a mapping with import_path and args, not"),
        ("applications: [{name: x}]", f"applications[0].import_path must be {BUILDER}, not None"),
        ({"applications": [application(import_path="other:app")]}, "not 'other:app'"),
        ({"applications": [application(args=None)]}, "applications[0]: `args:` is missing"),
        ({"applications": [{"import_path": BUILDER}]}, "applications[0]: `args:` is missing"),
        ({"applications": [application(args=[MODEL])]}, "applications[0]: `args:` is missing"),
        ({"applications": [application(args={})]}, "args.model.path is missing"),
        ({"applications": [application(args={"model": {"name": "x"}})]}, "args.model.path is miss"),
        ({"applications": [application(route_prefix="llm")]}, "route_prefix must begin with /"),
        ({"applications": [application(route_prefix=None)]}, "route_prefix must begin with /"),
        ({"applications": [application(port=8000)]}, "remove it and set port in the top level"),
        ({"applications": [application()], "http_options": None}, "http_options: Input should be"),
        ({"applications": [application()], "http_options": {"port": "x"}}, "http_options.port: In"),
        ({"applications": [application()], "proxy_location": "Head"}, "proxy_location: Input shou"),
        ("off: 1", "the file: unknown key false: YAML reads on, off, yes and no so, unless quoted"),
        ("applications:\n- args: {}\n  args: {}", "line 3: the key 'args' appears twice"),
        ("a: {b: 1, b: 2}", "line 1: the key 'b' appears twice"),
    ],
)
def test_what_is_wrong_around_args_is_said(tmp_path: Path, document: object, said: str) -> None:
    assert said in complaint(tmp_path, document)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"decod": {"replicas": 1}}, "applications[0].args: unknown key 'decod' in ClusterConfig"),
        ({"engine": {"block_size": 17}}, "applications[0].args.engine.block_size: Input should be"),
        ({"prefill": {"replicas": 0}}, "prefill.replicas must be at least 1"),
        ({"mode": False}, "applications[0].args.mode: mode is false here: YAML reads an unquoted"),
        ({"router": {"split": True}}, "args.router.split: split is true here: YAML reads"),
    ],
)
def test_mistakes_in_args_are_named(tmp_path: Path, args: dict[str, Any], said: str) -> None:
    assert said in complaint(tmp_path, {"applications": [application(args=MODEL | args)]})


def test_merge_keys_of_yaml_are_no_duplicates(tmp_path: Path) -> None:
    text = f"""
    http_options: {{port: 8001}}
    applications:
      - import_path: {BUILDER}
        args:
          model: {{path: demo/pdserve-demo}}
          prefill: &worker {{num_cpus: 1, engine: {{device: cpu}}}}
          decode: {{<<: *worker, num_cpus: 2}}
          transfer: {{pool: {{mode: off}}}}
    """
    config = load(written(tmp_path, text)).config
    assert (config.decode.num_cpus, config.worker("decode").engine.device) == (2, "cpu")
    assert config.transfer.pool.mode == "off"


def test_what_up_takes_where_the_file_says_nothing(tmp_path: Path) -> None:
    file = load(written(tmp_path, {"applications": [application()]}))
    assert file.http_options == {"host": "127.0.0.1", "port": 8000}
    assert (file.name, file.route_prefix, file.names_host) == ("x", "/", False)
    more = {"applications": [application(runtime_env={})], "target_capacity": 50}
    assert load(written(tmp_path, more)).unused == [
        "target_capacity",
        "applications[0].runtime_env",
    ]


def test_a_bad_file_ends_up_with_a_message_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings(haproxy=False).items():  # which `up` sets for good
        monkeypatch.setenv(name, value)
    assert cli.main(["up", str(tmp_path / "none.yaml")]) == 2
    path = written(tmp_path, {"applications": [application(args={"modell": {}})]})
    assert cli.main(["up", str(path)]) == 2
    assert "did you mean 'model'" in capsys.readouterr().err
