"""`doctor` and `up` report the parameter and the cure before anything starts; no Ray is started."""

import json
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.ports import free_port

from pdserve.cluster import cli
from pdserve.cluster.app import Refused, build_at
from pdserve.cluster.operate import checks
from pdserve.cluster.operate.checks import Place
from pdserve.cluster.operate.cluster_file import BUILDER, ClusterFile
from pdserve.cluster.operate.ray_settings import settings
from pdserve.cluster.placement.placement import Node
from pdserve.configs.schema import ClusterConfig

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "pdserve-demo"


def here(**resources: float) -> Place:
    has = {"CPU": 8.0, **resources}
    return Place([Node("this machine", has, has, {})], is_here=True)


def configured(**args: Any) -> ClusterConfig:
    model = {"path": str(DEMO)} | args.pop("model", {})
    return ClusterConfig.model_validate({"model": model} | args)


def found(config: ClusterConfig, place: Place, **http: object) -> list[tuple[str, str]]:
    document = {"http_options": {"host": "127.0.0.1", "port": free_port()} | http}
    return list(checks.findings(ClusterFile(document, {}, config), None, place))


def the_one(config: ClusterConfig, place: Place, **http: object) -> tuple[str, str]:
    [finding] = found(config, place, **http)
    return finding


def test_of_a_cluster_that_works_nothing_is_found() -> None:
    assert found(configured(), here()) == []
    assert found(configured(engine={"device": "cpu"}), here(GPU=1)) == []
    one_gpu = {"num_gpus": 0.5}
    assert found(configured(prefill=one_gpu, decode=one_gpu), here(GPU=1)) == []


def test_traces_whose_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    config = configured(traces={"endpoint": "http://collector:4317"})
    kind, said = the_one(config, here())
    assert kind == "error" and "pip install opentelemetry-sdk" in said
    elsewhere = Place(here().nodes, is_here=False)
    kind, said = the_one(config, elsewhere)
    assert kind == "hint" and said.startswith("wrong on this node")
    with pytest.raises(Refused, match="pip install opentelemetry-sdk"):
        build_at(config, None)


@pytest.mark.parametrize(
    ("args", "resources", "kind", "said"),
    [
        (
            {"mode": "aggregated", "engine": {"device": "cuda"}},
            {"GPU": 1},
            "error",
            "decode.num_gpus is 0, but its engine.device is cuda: .* Set decode.num_gpus: 1",
        ),
        (
            {"mode": "aggregated"},
            {"GPU": 1},
            "hint",
            "decode.num_gpus is 0 and its engine.device is auto: .* Set decode.num_gpus: 1",
        ),
        (
            {"engine": {"device": "cpu"}, "prefill": {"num_gpus": 1}},
            {"GPU": 1},
            "hint",
            "prefill.num_gpus is 1, but its engine.device is cpu",
        ),
        (
            {"mode": "aggregated", "decode": {"num_gpus": 2}},
            {"GPU": 2},
            "hint",
            "decode.num_gpus is 2, but a rank uses one GPU: set it to 1, and choose "
            "engine.tensor_parallel, engine.data_parallel and engine.pipeline_parallel so that "
            "their product is the number of GPUs",
        ),
        (
            {
                "mode": "aggregated",
                "decode": {"num_gpus": 0.5, "engine": {"tensor_parallel": 2}},
            },
            {"GPU": 2},
            "hint",
            "decode.num_gpus is 0.5, and its engines have 2 ranks: rank 0 of each worker takes the",
        ),
        (
            {"mode": "aggregated", "decode": {"num_gpus": 1, "replicas": 2}},
            {"GPU": 1},
            "error",
            "no room for this cluster.*decode: 2 replicas, each on one node with 1 GPU; there is "
            "room for 1",
        ),
        (
            {"mode": "aggregated", "decode": {"num_gpus": 1, "autoscaling": {"max": 4}}},
            {"GPU": 3},
            "hint",
            "as many workers as autoscaling.max allows.*decode: 4 replicas.*there is room for 3",
        ),
        (
            {"mode": "aggregated", "router": {"labels": {"role": "ingress"}}},
            {},
            "error",
            "router: 1 replicas, each on one node with the labels {role: ingress}",
        ),
    ],
)
def test_devices_and_room(args: dict[str, Any], resources: Any, kind: str, said: str) -> None:
    given, text = the_one(configured(**args), here(**resources))
    assert given == kind
    assert re.search(said, text, re.DOTALL), text


def test_a_cluster_that_an_autoscaler_makes_larger_may_lack_room() -> None:
    waiting = configured(mode="aggregated", decode={"num_gpus": 1}, placement_deadline_s=None)
    elsewhere = Place(here().nodes, is_here=False)
    assert [kind for kind, _ in found(waiting, elsewhere)] == ["hint"]
    assert [kind for kind, _ in found(waiting, here())] == ["error"], "this machine does not grow"


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        kind, text = the_one(configured(), here(), port=port)
        assert kind == "error" and f"port {port} of 127.0.0.1 cannot be used" in text
        assert "choose another port by http_options.port or --port" in text
        file = ClusterFile({"http_options": {"host": "127.0.0.1", "port": port}}, {}, configured())
        assert list(checks.findings(file, free_port(), here())) == [], "--port decides"
    assert found(configured(), here(), port=port) == []


@pytest.mark.parametrize("port", [0, 65536, "80", None])
def test_a_port_in_the_file_must_be_one(port: object) -> None:
    kind, text = the_one(configured(), here(), port=port)
    assert kind == "error" and f"http_options.port must be from 1 to 65535, not {port!r}" in text


def test_an_address_that_strangers_reach_without_keys_is_remarked(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-the-test")
    keys.chmod(0o600)
    keyed = configured(router={"api_keys_file": str(keys)})
    for host in ("0.0.0.0", "10.1.2.3", "node-7"):
        assert checks.is_open(host)
    for host in ("127.0.0.1", "localhost", "::1"):
        assert not checks.is_open(host)
    kind, text = the_one(configured(), here(), host="0.0.0.0")
    assert kind == "hint" and "0.0.0.0" in text and "router.api_keys_file" in text
    assert found(keyed, here(), host="0.0.0.0") == []


def test_a_host_that_the_file_does_not_name_is_remarked() -> None:
    file = ClusterFile({}, {}, configured())
    [(kind, text)] = checks.findings(file, free_port(), here())
    assert kind == "hint" and "`serve run` on every interface; set it" in text


def test_keys_that_are_not_there_are_missed(tmp_path: Path) -> None:
    config = configured(router={"api_keys_file": str(tmp_path / "keys")})
    kind, text = the_one(config, here())
    assert kind == "error" and str(tmp_path / "keys") in text
    elsewhere = Place(here().nodes, is_here=False)
    kind, text = the_one(config, elsewhere)
    assert kind == "hint" and "each node with a router needs it" in text
    assert the_one(configured(router={"api_key_env": "NOBODY_SETS_THIS"}), here())[0] == "error"


def test_a_model_that_is_not_there_or_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kind, text = the_one(configured(model={"path": "no/such-model"}), here())
    assert kind == "error" and "'no/such-model' is not a local folder" in text
    broken = tmp_path / "model"
    shutil.copytree(DEMO, broken)
    given = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(given | {"architectures": ["MambaForCausalLM"]}))
    kind, text = the_one(configured(model={"path": str(broken)}), here())
    assert kind == "error" and "architecture 'MambaForCausalLM' is not known" in text
    (broken / "config.json").write_text(json.dumps(given))
    assert found(configured(model={"path": str(broken)}), here()) == []
    [weights] = broken.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    kind, text = the_one(configured(model={"path": str(broken)}), here())
    assert kind == "error" and "is cut short" in text
    weights.unlink()
    kind, text = the_one(configured(model={"path": str(broken)}), here())
    assert kind == "error" and "has no weights in safetensors" in text
    kind, text = the_one(
        configured(model={"path": str(broken)}), Place(here().nodes, is_here=False)
    )
    assert (
        kind == "hint"
        and "each node reads its own" in text
        and "has no weights in safetensors" in text
    )
    assert found(configured(model={"path": str(broken), "load_format": "dummy"}), here()) == []
    (broken / "tokenizer.json").unlink()
    kind, text = the_one(configured(model={"path": str(broken), "load_format": "dummy"}), here())
    assert kind == "error" and "holds no tokenizer.json" in text


def test_activations_that_do_not_go_with_the_weights_are_named() -> None:
    kind, text = the_one(configured(model={"activation_dtype": "fp8"}), here())
    assert kind == "error"
    assert text.startswith("model: model.activation_dtype: fp8 needs weights that are quantised")


def test_a_length_above_the_models_is_named_for_each_deployment() -> None:
    config = configured(decode={"engine": {"max_model_len": 10**6}})
    kind, text = the_one(config, here())
    assert kind == "error"
    assert text.startswith(
        "decode: engine.max_model_len (1000000) must not be above what the model"
    )


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (
            {"tensor_parallel": 3},
            "prefill: engine.tensor_parallel (3) does not fit the model: that many ranks cannot "
            "share its num_attention_heads",
        ),
        (
            {"expert_parallel": True, "tensor_parallel": 2},
            "prefill: engine.expert_parallel is true, but the model has no experts",
        ),
        (
            {"pipeline_parallel": 64},
            "prefill: engine.pipeline_parallel (64) does not fit the model",
        ),
    ],
    ids=["heads", "experts", "layers"],
)
def test_degrees_that_do_not_fit_the_model_are_named_for_each_deployment(
    engine: dict[str, object], said: str
) -> None:
    kind, text = the_one(configured(prefill={"engine": engine}), here(CPU=1000.0))
    assert kind == "error"
    assert text.startswith(said)


def test_an_address_of_ray_where_nobody_answers_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray itself tries for minutes."""
    for name, value in settings(haproxy=False).items():  # which `up` sets for good
        monkeypatch.setenv(name, value)
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    path = str(written(tmp_path, {"model": {"path": str(DEMO)}}))
    assert (cli.main(["doctor", path]), cli.main(["up", path])) == (1, 2)
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert f"RAY_ADDRESS is {address}, but nothing answers there" in text
    checks.ray_answers("auto", "--address")
    checks.ray_answers("ray://127.0.0.1:1", "--address")
    assert cli.main(["workers", "--address", address]) == 2
    assert f"--address is {address}, but nothing answers there" in capsys.readouterr().err


def test_what_this_machine_has_is_asked_of_rays_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"CPU": 3, "decode": 2}')
    [node] = checks.this_machine().nodes
    assert (node.total["CPU"], node.total["decode"]) == (3, 2)


def written(folder: Path, args: object, **http: object) -> Path:
    document = {
        "http_options": {"host": "127.0.0.1", "port": free_port()} | http,
        "applications": [{"name": "x", "import_path": BUILDER, "args": args}],
    }
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_doctor_names_the_unset_settings_and_the_broken_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1")
    assert cli.main(["doctor", str(written(tmp_path, {"modell": {}}))]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("hint") and "RAY_AUTH_MODE is not set" in line for line in lines)
    assert any(
        line.startswith("ok") and "RAY_SERVE_THROUGHPUT_OPTIMIZED=1" in line for line in lines
    )
    assert any(line.startswith("error") and "did you mean 'model'" in line for line in lines)
    assert cli.main(["doctor", str(written(tmp_path, {"model": {"path": str(DEMO)}}))]) == 0


def test_doctor_and_up_refuse_for_the_same_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in settings(haproxy=False).items():  # which `up` sets for good
        monkeypatch.setenv(name, value)
    wrong = {"model": {"path": str(DEMO)}, "engine": {"device": "cuda", "max_model_len": 10**6}}
    path = written(tmp_path, wrong, host="0.0.0.0")
    assert cli.main(["doctor", str(path)]) == 1
    printed = capsys.readouterr().out
    errors = [line[6:] for line in printed.splitlines() if line.startswith("error")]
    assert len(errors) == 4, "two deployments, two mistakes"
    assert cli.main(["up", str(path)]) == 2
    said = capsys.readouterr()
    assert said.err.removeprefix("pdserve: ").splitlines() == errors
    assert "pdserve: http_options.host 0.0.0.0 can be reached from other machines" in said.out
