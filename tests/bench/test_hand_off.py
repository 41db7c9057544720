"""Tests benchmarks/transfer/hand_off.py between two real engines on CPU, its figures for known
times, and what it refuses."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks.transfer import hand_off, hand_off_steps, hand_off_together
from benchmarks.transfer.engine_pair import Answer
from pdserve.protocol.events import Arrived, Delta
from pdserve.protocol.request_key import RequestKey

SMALL = [
    "--device",
    "cpu",
    "--max-num-batched-tokens",
    "64",
    "--batch",
    "3",
    "--context",
    "20",
    "--chunk",
    "64",
]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["hand_off.py", *map(str, arguments)])
    return hand_off.main()


@pytest.mark.processes
def test_every_part_is_measured_and_split_answers_are_those_of_one_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That answers are equal is checked by the benchmark itself: it would have failed."""
    out = tmp_path / "rows.jsonl"
    sizes = [
        "--tokens",
        40,
        200,
        "--output-len",
        5,
        "--repeats",
        2,
        "--pairs",
        2,
        "--steps",
        12,
        "--in-flight",
        2,
    ]
    assert run(monkeypatch, *SMALL, *sizes, "--out", out, "--commit", "abc") == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    requests = rows[:-2]
    [decode, prefill] = rows[-2:]
    whole = ["whole on P", "whole on D"]
    split = ["split, overlapped", "split, announced", "split, sequential"]
    assert [(row["tokens"], row["mode"]) for row in requests] == [
        *((40, mode) for mode in [*whole, split[2]]),  # one step computes it: nothing to overlap
        *((200, mode) for mode in [*whole, *split]),
    ]
    for row in requests:
        assert (row["repeats"], row["output_len"], row["num_different"]) == (2, 5, 0)
        assert all(
            0 < row[name]["p50"] <= row[name]["worst"] for name in ("ttft_ms", "gap_ms", "tpot_ms")
        )
        assert ("bytes" in row) == (row["mode"] in split)
    short, overlapped, announced, sequential = (row for row in requests if row["mode"] in split)
    assert short["bytes"] * 13 == sequential["bytes"] * 3 == overlapped["bytes"] * 3, (
        "blocks of 16 tokens"
    )
    assert (
        overlapped["early_share"] > 0.5 and sequential["early_share"] == 0 < sequential["gb_per_s"]
    )
    assert announced["bytes"] == overlapped["bytes"]
    for row in (overlapped, announced, sequential):
        assert (
            0 < row["pull_ms"]["p50"] < row["seen_ms"]["worst"]
            and row["descriptors"] >= 1
            and row["transport"]
        )
        assert 0 < row["lag_ms"]["p50"] <= row["seen_ms"]["worst"] + 5
    assert (decode["part"], decode["batch"], decode["context"]) == ("decode", 3, 20)
    assert (prefill["part"], prefill["chunk"]) == ("prefill", 64)
    for row in (decode, prefill):
        low, high = row["ratio"]["range"]
        assert (
            0 < low <= row["ratio"]["median"] <= high and row["pairs"] == 2 and row["tokens"] == 200
        )
        assert (
            row["num_transfers"] > 0
            and row["gb_per_s"] > 0
            and row["on_ms"]["p50"] > 0 < row["off_ms"]["p50"]
        )
        assert (row["device"], row["model"], row["commit"]) == ("cpu", "pdserve-demo", "abc")
        assert row["engine"]["max_num_seqs"] == 3
    shown = capsys.readouterr().out
    assert shown.count("|---|") > 3 and "| split, overlapped |" in shown and "| 3 x 20 |" in shown


@pytest.mark.slow
@pytest.mark.processes
def test_engines_of_unlike_degrees_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    sizes = ["--tokens", 200, "--output-len", 5, "--repeats", 2, "--parts", "requests"]
    degrees = ["--prefill-engine", "pipeline_parallel=2", "--decode-engine", "tensor_parallel=2"]
    assert run(monkeypatch, *SMALL, *sizes, *degrees, "--out", out) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 5 and all(row["num_different"] == 0 for row in rows)
    for row in rows:
        assert row["prefill_engine"] == {"pipeline_parallel": 2}
        assert row["decode_engine"] == {"tensor_parallel": 2}
        if row["mode"].startswith("split"):
            assert row["descriptors"] == 13 * 2 * 2, "one per block, stage and rank"


@pytest.mark.processes
def test_decode_engines_that_pull_together_are_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    sizes = ["--tokens", 200, "--output-len", 5, "--repeats", 1, "--in-flight", 1]
    parts = ["--parts", "together", "--decodes", 2]
    assert run(monkeypatch, *SMALL, *sizes, *parts, "--out", out) == 0
    alone, both = (json.loads(line) for line in out.read_text().splitlines())
    assert (alone["decodes"], both["decodes"]) == (1, 2)
    assert alone["num_transfers"] >= 10 and both["num_transfers"] >= 20
    for row in (alone, both):
        assert row["bytes"] == both["bytes"] > 0 and row["descriptors"] >= 1
        assert row["gb_per_s"] > 0 and 0 < row["pull_ms"]["p50"] <= row["pull_ms"]["worst"]
    assert "| decode engines |" in capsys.readouterr().out


def test_the_sum_is_of_what_arrived_in_the_time() -> None:
    plan: Any = SimpleNamespace(tokens=(64, 8192), in_flight=2)
    arrived = [
        Arrived(
            request_id="r",
            attempt=1,
            source="p2p",
            num_bytes=3_000_000_000,
            num_descriptors=7,
            transport="cuda_ipc",
            seconds=seconds,
        )
        for seconds in (0.01, 0.03, 0.02)
    ]
    row = hand_off_together.figures(plan, arrived, 0.03)
    assert (row["gb_per_s"], row["pull_ms"]["p50"], row["tokens"]) == (300.0, 20, 8192)
    assert (row["num_transfers"], row["bytes"], row["descriptors"]) == (3, 3_000_000_000, 7)


def test_engines_share_gpus_only_where_there_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert hand_off.find_gpus("cuda", (1, 1)) == ["0", "3"]
    assert hand_off.find_gpus("cuda", (2, 4)) == ["0,1", "0,1,2,3"]
    assert hand_off.find_gpus("cuda", (4, 2, 2)) == ["0,1,2,3", "2,3", "0,1"]
    assert hand_off.find_gpus("cuda", (1, 3, 3)) == ["0", "1,2,3", "1,2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert hand_off.find_gpus("cuda", (2, 1)) == ["4,5", "7"]
    with pytest.raises(ValueError, match="one for each rank of the larger engine, torch sees 4"):
        hand_off.find_gpus("cuda", (8, 1))


def test_figures_of_known_times() -> None:
    arrived = Arrived(
        request_id="r",
        attempt=2,
        source="p2p",
        num_bytes=4_000_000,
        num_early_bytes=1_000_000,
        num_descriptors=3,
        transport="cma",
        seconds=0.005,
        wait_s=0.002,
        lag_s=0.004,
    )
    answer = Answer(1.0, [1.5, 1.6, 1.8], [7, 8, 9], handed=1.51, arrived=(1.55, arrived))
    row = hand_off.request_row(64, "split, sequential", [answer], [[7, 8, 0]])
    middle = {name: row[name]["p50"] for name in row if name.endswith("_ms")}
    assert middle == {
        "ttft_ms": 500,
        "gap_ms": 100,
        "tpot_ms": 150,
        "lag_ms": 4,
        "seen_ms": 40,
        "pull_ms": 5,
    }
    assert (row["early_share"], row["gb_per_s"], row["num_different"]) == (0.25, 1.0, 1)


def test_a_ratio_is_of_the_means_of_neighbours() -> None:
    """One slow step of an interval counts, a slow pair does not."""
    arrived = Arrived(
        request_id="r",
        attempt=1,
        source="p2p",
        num_bytes=3_000_000_000,
        transport="cma",
        seconds=0.1,
    )
    pairs = [
        (
            hand_off_steps.Interval([0.0, 1.0, 2.0], []),
            hand_off_steps.Interval([5.0, 6.0, 8.0], [arrived]),
        ),
        (
            hand_off_steps.Interval([9.0, 10.0, 11.0], []),
            hand_off_steps.Interval([0.0, 1.0, 2.0], []),
        ),
        (
            hand_off_steps.Interval([9.0, 10.0, 11.0], []),
            hand_off_steps.Interval([0.0, 9.0, 18.0], []),
        ),
    ]
    row = hand_off_steps.step_figures(pairs)
    assert row["ratio"] == {"median": 1.5, "quarters": [1.25, 5.25], "range": [1.0, 9.0]}
    assert (row["off_ms"]["worst"], row["on_ms"]["worst"], row["num_transfers"]) == (1000, 9000, 1)
    assert row["gb_per_s"] == round(3 / 23, 2)


@pytest.mark.parametrize(
    ("deltas", "message"),
    [
        ([("stranger", None)], "a pulled request ran beside the batch"),
        ([("a", "length"), ("b", None)], "the batch ended before"),
    ],
)
async def test_steps_are_those_of_the_batch_alone(
    deltas: list[tuple[str, Any]], message: str
) -> None:
    def tokens(*of: tuple[str, Any]) -> list[Delta]:
        return [Delta(name, 1, 0, 5, (1,), finish_reason=reason) for name, reason in of]

    worker: Any = SimpleNamespace(name="decode", watch=None)
    legs: Any = [SimpleNamespace(key=RequestKey("r", 1, name)) for name in "ab"]
    steps = hand_off_steps.BatchSteps(worker, legs)
    worker.watch(0.0, tokens(("a", None), ("b", None)))  # before anybody asked
    taking = asyncio.ensure_future(steps.take(2))
    await asyncio.sleep(0)
    for now in (1.0, 2.0, 4.0):
        worker.watch(now - 0.5, [])  # no step
        worker.watch(now, tokens(("a", None), ("b", None)))
    assert await taking == [1.0, 2.0, 4.0]
    worker.watch(5.0, tokens(*deltas))
    with pytest.raises(ValueError, match=message):
        await steps.take(1)


@pytest.mark.multigpu
def test_split_answers_over_two_gpus_are_those_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    sizes = [
        "--tokens",
        40,
        700,
        "--output-len",
        20,
        "--repeats",
        5,
        "--dtype",
        "float32",
        "--parts",
        "requests",
    ]
    assert run(monkeypatch, *SMALL, "--device", "cuda", *sizes, "--out", out) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 8 and [row["num_different"] for row in rows] == [0] * 8
    assert all(row["transport"] == "cuda_ipc" for row in rows if row["mode"].startswith("split"))


async def test_answers_that_differ_are_told_where_they_must_not_and_counted_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrived = Arrived(request_id="r", attempt=2, source="p2p", num_bytes=1, num_early_bytes=1)

    async def serve(pair: object, mode: str, prompt: object, sampling: object) -> Answer:
        hand_over: dict[str, Any] = (
            {"handed": 1.0, "arrived": (2.0, arrived)} if mode.startswith("split") else {}
        )
        return Answer(0.0, [1.0, 2.0], [1, 2 if mode != "split, sequential" else 3], **hand_over)

    monkeypatch.setattr(hand_off, "serve", serve)
    hello = SimpleNamespace(parts_from=32, vocab_size=100)
    pair: Any = SimpleNamespace(p=SimpleNamespace(hello=hello))
    monkeypatch.setattr(sys, "argv", ["hand_off.py", "--repeats", "2"])
    _, options = hand_off.parse()
    with pytest.raises(
        ValueError,
        match="split, sequential, 40 tokens: 2 of 2 answers differ from those whole on P",
    ):
        await hand_off.measure_requests(
            hand_off.make_plan(options, must_agree=True), pair, 40, lambda: None
        )
    rows = await hand_off.measure_requests(
        hand_off.make_plan(options, must_agree=False), pair, 40, lambda: None
    )
    assert [row["num_different"] for row in rows] == [0, 0, 0, 0, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens: must be at least 1, not 0"),
        (["--output-len", "1"], "--output-len: must be at least 2, not 1"),
        (["--parts", "all"], "--parts"),
        (["--max-num-seqs", "8"], "--max-num-seqs is --batch"),
        (["--enable-prefix-caching", "true"], "--enable-prefix-caching"),
        (["--block-size", "17"], "--block-size"),
        (["--device", "cuda"], "two engines need two GPUs"),
        (["--decode-engine", "tensor=2"], "--decode-engine: 'tensor=2' is no field"),
        (["--prefill-engine", "block_size=17"], "block_size"),
        (["--out", "no/folder/out.jsonl"], "no/folder/out.jsonl"),
    ],
)
def test_mistakes_are_told(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, "--device", "cpu", *arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.processes
def test_no_process_is_left_when_it_is_stopped() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.transfer.hand_off",
        *SMALL,
        "--tokens",
        "64",
        "--repeats",
        "100000",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert "self-test" in process.stdout.readline()
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        time.sleep(0.2)  # requests are running
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(children, 60)
    assert not alive
