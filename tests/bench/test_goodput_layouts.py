"""Tests benchmarks/goodput.py without a cluster: what it starts, sends and shows."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.served import DEMO

from benchmarks import goodput
from pdserve.bench.replay.trace import read_trace
from pdserve.configs.schema import ClusterConfig


@pytest.mark.parametrize("layout", goodput.LAYOUTS)
@pytest.mark.parametrize("load", goodput.LOADS.values(), ids=goodput.LOADS)
def test_clusters_are_valid_and_have_two_workers(load: goodput.Load, layout: str) -> None:
    made = goodput.document(load, layout, DEMO, 1, 8123)
    args = made["applications"][0]["args"]
    config = ClusterConfig.model_validate(args)
    roles = config.worker_keys
    assert sum(config.deployment(role).replicas for role in roles) == goodput.NUM_WORKERS == 2
    assert ("prefill" in roles) == (layout in ("auto", "always"))
    assert (config.slo.tpot_ms is None) == (layout == goodput.BEFORE)


def test_arrivals_are_a_trace_of_one_request_per_second(tmp_path: Path) -> None:
    trace = read_trace(goodput.poisson(tmp_path / "poisson.trace"))
    assert len(trace.requests) == goodput.NUM_ARRIVALS
    assert trace.requests[-1].at_s / goodput.NUM_ARRIVALS == pytest.approx(1.0, rel=0.05)
    assert {(each.input_length, each.output_length) for each in trace.requests} == {(2048, 128)}


@pytest.mark.processes
def test_every_layout_is_replayed_by_options_that_exist_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = subprocess.run(
        [*goodput.CLI, "bench", "replay", "--help"], capture_output=True, text=True, check=True
    ).stdout
    served: list[Any] = []
    sent: list[list[str]] = []

    @contextmanager
    def serving(document: Any, port: int, **options: Any) -> Iterator[SimpleNamespace]:
        served.append(options["tree"])
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}")

    def run(words: list[str]) -> bool:
        sent.append(words)
        if "replay" in words:
            with Path(words[words.index("--out") + 1]).open("a") as lines:
                lines.write(json.dumps({"label": words[words.index("--label") + 1]}) + "\n")
        return True

    monkeypatch.setattr(goodput, "serving", serving)
    monkeypatch.setattr(goodput, "run_command", run)
    monkeypatch.setattr(goodput, "await_workers", lambda *_: None)
    out = tmp_path / "out"
    options = ["--out", str(out), "--before", str(tmp_path), "--model", str(DEMO)]
    monkeypatch.setattr(sys, "argv", ["goodput.py", *options, "--commit", "abc"])
    assert goodput.main() == 0
    replays = [words for words in sent if "replay" in words]
    assert [words[words.index("--label") + 1] for words in replays] == [*goodput.LAYOUTS] * 2
    assert served == [None, None, None, tmp_path] * 2
    for words in replays:
        flags = {word for word in words if word.startswith("--")}
        assert all(flag in known for flag in flags)
    pages = [words[words.index("--page") + 1] for words in sent if "replay-page" in words]
    assert pages == [str(out / "trace.html"), str(out / "poisson.html")]


def test_a_cluster_that_does_not_start_is_told_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(name: str, layout: str, options: Any) -> bool:
        if layout == "auto":
            raise ValueError("no GPU")
        return True

    monkeypatch.setattr(goodput, "measure", measure)
    only = ["--only", "poisson-auto", "--only", "poisson-whole"]
    monkeypatch.setattr(sys, "argv", ["goodput.py", "--out", str(tmp_path), *only])
    assert goodput.main() == 1
    assert "poisson-auto: no GPU" in capsys.readouterr().err
