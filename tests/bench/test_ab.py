"""Tests benchmarks/ab.py: packing, the compared figures, when a side counts as not slower, and two
commits compared for real."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ab
from benchmarks.support.places import RESULTS
from benchmarks.targets import sides as ab_sides
from benchmarks.targets.comparison import Comparison, Figure, compared, figures_of, half_width
from benchmarks.targets.table import read_rows

TARGETS = {row.id: row for row in read_rows(ab.TARGETS)}

SIDE = """
import argparse, json, pathlib, pdserve
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path)
parser.add_argument("--status", type=int, default=0)
options = parser.parse_args()
if options.status > 1:
    print("no figures today")
ms = pdserve.MS
row = {"benchmark": "cluster_cpu", "mode": "aggregated"}
row |= {"us_per_token": {"median": ms}, "ttft_ms": {"p50": ms}}
with options.out.open("a") as out:
    out.write(json.dumps(row) + "\\n")
raise SystemExit(options.status)
"""


def git(repository: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, *arguments], cwd=repository, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tags `slow` (20 ms) and `fast` (10 ms) of a package whose benchmark writes that figure."""
    root = tmp_path / "repository"
    for name in ("pdserve", "benchmarks", "demo"):
        (root / name).mkdir(parents=True)
    (root / "benchmarks" / "cluster_cpu.py").write_text(SIDE)
    git(tmp_path, "init", "-q", str(root))
    for tag, ms in (("slow", 20.0), ("fast", 10.0)):
        (root / "pdserve" / "__init__.py").write_text(f"MS = {ms}\n")
        git(root, "add", "-A")
        git(root, "commit", "-q", "-m", tag)
        git(root, "tag", tag)
    monkeypatch.setattr(ab_sides, "REPOSITORY", root)
    return root


def compare(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ab.py", *arguments])
    return ab.main()


@pytest.mark.processes
def test_two_commits_run_by_turns_with_their_own_code(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "rows.jsonl"
    asked = ["--rows", "cluster_cpu", "--pairs", "2", "--max-pairs", "3", "--out", str(out)]
    assert compare(monkeypatch, "slow", "fast", *asked) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    runs = [
        (row["side"], row["pair"], row["us_per_token"]["median"]) for row in rows if "side" in row
    ]
    assert runs == [("old", 1, 20.0), ("new", 1, 10.0), ("old", 2, 20.0), ("new", 2, 10.0)]
    [us, ttft] = [row for row in rows if row["benchmark"] == "ab"]
    assert us["median"] == ttft["median"] == 0.5 and us["verdict"] == "not slower"
    assert "0.5000" in capsys.readouterr().out


@pytest.mark.processes
def test_a_slower_commit_gets_more_pairs_and_status_1(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    asked = ["--rows", "cluster_cpu", "--pairs", "1", "--max-pairs", "3", "--out", str(out)]
    assert compare(monkeypatch, "fast", "slow", *asked) == 1
    last = json.loads(out.read_text().splitlines()[-1])
    assert last["ratios"] == [2.0, 2.0, 2.0] and last["verdict"] == "slower"


@pytest.mark.processes
def test_packs_travel_without_git(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert compare(monkeypatch, "slow", "fast", "--pack", str(tmp_path / "packs")) == 0
    packs = capsys.readouterr().out.split()
    (repository / ".git").rename(tmp_path / "elsewhere")
    assert (
        compare(monkeypatch, *packs, "--rows", "cluster_cpu", "--pairs", "1", "--max-pairs", "1")
        == 0
    )
    assert compare(monkeypatch, "slow", "fast") == 2
    assert "neither a pack nor a commit" in capsys.readouterr().err


@pytest.mark.processes
def test_what_a_side_said_is_shown_when_it_gives_no_figures(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(monkeypatch, "slow", "fast", "--rows", "cluster_cpu --status 3") == 2
    assert "no figures today" in capsys.readouterr().err


@pytest.mark.processes
def test_a_missed_target_of_cluster_cpu_is_no_failure(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other benchmarks say by status 1 that something could not be measured."""
    asked = ["--rows", "cluster_cpu --status 1", "--pairs", "1", "--max-pairs", "1"]
    assert compare(monkeypatch, "slow", "fast", *asked) == 0
    monkeypatch.setattr(ab_sides, "REPORT_TARGETS", ())
    assert compare(monkeypatch, "slow", "fast", *asked) == 2


@pytest.mark.processes
def test_the_shipped_code_packs_below_its_bound(tmp_path: Path) -> None:
    assert ab_sides.pack("HEAD", tmp_path).stat().st_size < ab_sides.MAX_PACK_BYTES


def test_rows_of_the_table_share_a_command() -> None:
    rows = ["decode-1", "http-1", "kv_transfer --ages aged", "pair-10 --split auto"]
    assert [str(work) for work in ab.plan(rows, TARGETS, 2)] == [
        "kv_transfer --ages aged",
        "targets --only decode-1 --repeats 2",
        "targets --only http-1 --repeats 2",
        "targets --only pair-10 --repeats 2 --split auto",
    ]
    with pytest.raises(ValueError, match="--rows decode-9 is unknown"):
        ab.plan(["decode-9"], TARGETS, 1)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ((0.97, 1.2, 1.005, 1.0, 1.3), "not slower"),  # the median is at most 1.01
        # the interval holds 1 and is narrow
        ((1.012, 0.985, 1.011, 0.99, 1.013, 1.012), "not slower"),
        ((1.2, 0.7, 1.4, 0.8, 1.1), "undecided"),  # it holds 1 and is wide
        ((1.02, 1.03, 1.02, 1.025, 1.03), "slower"),
        ((1.02,), "undecided"),
    ],
)
def test_verdicts(ratios: tuple[float, ...], expected: str) -> None:
    assert Comparison(ratios, 0.02).verdict == expected


def test_the_interval_is_student_s() -> None:
    low, high = Comparison((0.98, 1.0, 1.02, 1.01, 0.99), 0.02).interval
    assert (low, high) == pytest.approx((0.98046, 1.01972), abs=1e-5)
    assert Comparison((1.0,), 0.02).interval == (0.0, math.inf)


def test_figures_that_are_better_when_higher_are_turned_over() -> None:
    slower = Figure(50.0, higher_is_better=True)
    faster = Figure(100.0, higher_is_better=True)
    assert slower.over(faster) == 2.0
    assert Figure(50.0).over(Figure(100.0)) == 0.5
    pairs = [({"a": Figure(1.0), "b": Figure(1.0)}, {"a": Figure(2.0)})]
    assert compared(pairs, {"a": 0.02}) == {"a": Comparison((2.0,), 0.02)}


def test_figures_of_saved_rows() -> None:
    """Each kind of row that is compared, as the benchmarks wrote it."""
    results = RESULTS

    def names(file: str, **fields: object) -> list[str]:
        lines = [json.loads(line) for line in (results / file).read_text().splitlines()]
        row = [line for line in lines if all(line.get(k) == v for k, v in fields.items())][-1]
        return list(figures_of(row, TARGETS))

    assert names("targets-h200.jsonl", row="decode-1") == ["decode-1 decode_ms_per_token"]
    assert names("targets-h200.jsonl", row="batch-512-out") == ["batch-512-out tokens_per_s"]
    http = ["ttft_p50", "tpot_p50", "tok_s", "request_ms"]
    assert names("targets-h200.jsonl", row="http-128") == [f"http-128 {name}" for name in http]
    assert names("targets-h200.jsonl", row="http-1") == [f"http-1 {name}" for name in http[:3]]
    assert names("targets-h200.jsonl", row="poisson-10") == [
        "poisson-10 ttft_p50",
        "poisson-10 tpot_p50",
    ]
    cpu = ["cluster_cpu disaggregated us_per_token", "cluster_cpu disaggregated ttft_p50"]
    assert names("cluster-cpu.jsonl", mode="disaggregated") == cpu
    [transfer] = names("kv-transfer-h200.jsonl", tokens=8192)
    assert transfer.startswith("kv_transfer aged 8192")
    assert "hand_off decode on_ms" in names("hand-off-h200.jsonl", part="decode")
    assert any("gap_ms" in name for name in names("hand-off-h200.jsonl", part="requests"))


def test_of_several_clients_throughput_and_whole_requests_are_judged() -> None:
    """Their TTFT and TPOT depend on which prompts happened to share a step."""
    latency = {
        "ttft_ms": {"p50": 500.0, "p99": 900.0, "mean": 600.0},
        "tpot_ms": {"p50": 20.0, "p99": 30.0, "mean": 20.0},
    }
    row = {
        "benchmark": "targets",
        "row": "http-128",
        "figures": latency | {"num_failed": 0, "output_tokens_per_s": 9.0},
    }
    figures = figures_of(row, TARGETS)
    judged = {name: figure.value for name, figure in figures.items() if figure.is_judged}
    assert judged == {"http-128 tok_s": 9.0, "http-128 request_ms": 600.0 + 127 * 20.0}
    assert Comparison((1.3, 1.4), 0.02, is_judged=False).verdict == "shown"


def test_failed_requests_are_no_figures() -> None:
    row = {
        "benchmark": "targets",
        "row": "http-1",
        "figures": {"num_failed": 1, "errors": {"HTTP 500": 1}},
    }
    with pytest.raises(ValueError, match="1 requests failed"):
        figures_of(row, TARGETS)


def test_cpu_rows_may_spread_more() -> None:
    assert half_width({"benchmark": "cluster_cpu"}, "NVIDIA H200") == 0.04
    assert half_width({"benchmark": "targets", "device": "NVIDIA H200"}, "NVIDIA H200") == 0.02
    assert half_width({"benchmark": "kv_transfer"}, "cpu") == 0.04
