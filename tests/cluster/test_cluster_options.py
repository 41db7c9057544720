"""`pdserve up` without a file, or with options beside one: the document that they stand for."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.cluster import cli
from pdserve.cluster.operate.checks import Place
from pdserve.cluster.operate.cluster_file import ClusterFile, load
from pdserve.cluster.operate.cluster_options import ClusterOptions, setting
from pdserve.cluster.operate.ray_settings import settings
from pdserve.cluster.operate.up import file_of
from pdserve.cluster.placement.placement import Node

ROOT = Path(__file__).parents[2]
MODEL = "demo/pdserve-demo"
CPUS = Place([Node("a", {"CPU": 2}, {"CPU": 2}, {})], is_here=True)
GPUS = Place([Node("a", {"CPU": 2, "GPU": 2}, {"CPU": 2, "GPU": 2}, {})], is_here=True)


def of(*sets: str, place: Place = CPUS, path: Path | None = None, **said: Any) -> ClusterFile:
    options = ClusterOptions(**said, settings=tuple(map(setting, sets)))
    return file_of(path, options, place)


def args_of(file: ClusterFile) -> dict[str, Any]:
    args: dict[str, Any] = file.application["args"]
    return args


def test_a_model_alone_is_one_worker() -> None:
    file = of(model=MODEL)
    assert file.config.mode == "aggregated" and file.config.decode.replicas == 1
    assert file.config.model.path == MODEL and file.config.decode.num_gpus == 0
    assert file.http_options == {"host": "127.0.0.1", "port": 8000}
    assert of(model=MODEL, place=GPUS).config.decode.num_gpus == 1


def test_nothing_at_all_is_the_demo() -> None:
    config = of().config
    assert config.mode == "disaggregated" and config.model.served_name == "pdserve-demo"
    assert of(place=GPUS).config.decode.num_gpus == 0 and config.engine.device == "cpu"


def test_a_host_is_for_the_demo_too() -> None:
    open_demo = of(host="0.0.0.0")
    assert open_demo.http_options["host"] == "0.0.0.0"
    assert open_demo.config == of().config
    model = of(model=MODEL, host="0.0.0.0")
    assert model.http_options["host"] == "0.0.0.0"
    assert model.document["proxy_location"] == "EveryNode"
    assert of(model=MODEL).document["proxy_location"] == "HeadOnly"


def test_kinds_of_workers_and_their_numbers() -> None:
    split = of(model=MODEL, prefill=2, decode=3, place=GPUS).config
    assert split.mode == "disaggregated"
    assert (split.prefill.replicas, split.decode.replicas) == (2, 3)
    assert split.prefill.num_gpus == split.decode.num_gpus == 1
    whole = of(model=MODEL, decode=4, names=("m",)).config
    assert (whole.mode, whole.decode.replicas, whole.model.served_name) == ("aggregated", 4, "m")
    assert of(model=MODEL, prefill=0).config.mode == "aggregated"


def test_names_stand_instead_of_the_files() -> None:
    path = ROOT / "cluster.yaml"
    several = of(path=path, names=("a", "b"))
    assert several.config.model.all_names == ("a", "b")
    assert of("model.served_names=[a, b]", model=MODEL).config.model.all_names == ("a", "b")
    assert args_of(of(model=MODEL, names=("a",)))["model"] == {"path": MODEL, "name": "a"}


def test_settings_are_keys_below_args() -> None:
    file = of(
        "engine.max_model_len=96",
        "decode.engine.kv_cache_dtype=fp8",
        "router.split=always",
        "transfer={overlap: false}",
        model=MODEL,
        prefill=1,
    )
    config = file.config
    assert config.worker("decode").engine.kv_cache_dtype == "fp8"
    assert config.worker("prefill").engine.max_model_len == 96
    assert config.router.split == "always" and not config.transfer.overlap


def test_options_change_a_file() -> None:
    path = ROOT / "cluster.yaml"
    file = of("engine.block_size=32", path=path, decode=2, names=("other",))
    config = file.config
    assert config.mode == "disaggregated" and config.decode.replicas == 2
    assert config.model.served_name == "other" and config.engine.block_size == 32
    assert config.model_copy(update={}) != load(path).config
    assert of(path=path, prefill=0).config.mode == "aggregated"
    assert of(path=path).document == load(path).document


@pytest.mark.parametrize(
    "said,sets,complaint",
    [
        ({"decode": 2}, (), "name what to serve: a cluster file"),
        ({"names": ("x",)}, (), "name what to serve"),
        ({"model": MODEL, "names": ("x", "x")}, (), "model.served_names has 'x' twice"),
        ({"model": MODEL}, ("engine.blok_size=1",), "did you mean 'block_size'"),
        ({"model": MODEL}, ("engine.block_size=x",), "options of pdserve up: .*engine.block_size"),
        ({"model": MODEL}, ("mode.x=1",), "--set mode.x: mode is 'aggregated', which has no keys"),
        ({"model": MODEL, "prefill": 1}, ("prefill.engine.kv_cache_dtype=fp8",), "never back"),
    ],
)
def test_what_cannot_be_is_named(said: Any, sets: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        of(*sets, **said)


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[int, str, str]:
    for name, value in settings(haproxy=False).items():  # which `up` sets for good
        monkeypatch.setenv(name, value)
    try:
        status = cli.main(["up", *words])
    except SystemExit as end:
        assert isinstance(end.code, int)
        status = end.code
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_the_printed_file_says_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["--model", MODEL, "--prefill", "1", "--set", "engine.device=cpu", "--port", "8123"]
    status, printed, _ = run(capsys, monkeypatch, *words, "--print-yaml")
    assert status == 0
    path = tmp_path / "cluster.yaml"
    path.write_text(printed)
    again = load(path)
    assert again.http_options["port"] == 8123
    assert again.config == of("engine.device=cpu", model=MODEL, prefill=1).config
    assert list(yaml.safe_load(printed)) == ["proxy_location", "http_options", "applications"]
    assert run(capsys, monkeypatch, str(path), "--print-yaml")[1] == printed


@pytest.mark.parametrize(
    "words,complaint",
    [
        (["--set", "engine.block_size"], "is not KEY=VALUE: write a key below args:"),
        (["--set", "a..b=1"], "is not KEY=VALUE"),
        (["--set", "a={"], "is not YAML"),
        (["--prefill", "-1"], "must be from 0 to"),
        (
            ["--decode", "1"],
            "name what to serve: a cluster file (`pdserve up cluster.yaml`) or a model",
        ),
    ],
)
def test_wrong_words_end_with_a_sentence(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    complaint: str,
) -> None:
    status, _, said = run(capsys, monkeypatch, *words)
    assert status == 2 and complaint in said


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("pdserve 0.")
