"""Tests `pdserve bench replay` and `replay-page` as a user types them, against a small server in
this process."""

import json
from pathlib import Path

import pytest
from sse_server import Behaviour, served

from pdserve.cluster.cli import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twenty requests in two seconds, all with the same first block."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": 100 * i,
            "input_length": 700,
            "output_length": 4,
            "hash_ids": [0, i + 1],
        }
        for i in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path: Path, kind: str) -> list[dict]:
    rows = map(json.loads, path.read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


EASY = ["--ttft-ms", "60000", "--tpot-ms", "60000"]


def replay(trace: Path, url: str, *options: str) -> int:
    # --commit, so that no git is started
    command = ["bench", "replay", str(trace), "--url", url, "--commit", "abc", *options]
    return main(command if "--rates" in options else [*command, "--speed", "20"])


def test_what_is_sent_and_what_comes_back(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour = Behaviour(gap_s=0.005, cached_tokens=16)
    out, shown = tmp_path / "out.jsonl", tmp_path / "page.html"
    options = ["--out", str(out), "--page", str(shown), *EASY]
    with served(behaviour) as url:
        assert replay(trace, url, *options, "--seed", "7", "--max-input", "600") == 0
    warm_up, *bodies = behaviour.bodies
    wanted = {"model": "fake", "max_tokens": 4, "temperature": 0, "seed": 7, "ignore_eos": True}
    assert all(body.items() >= wanted.items() for body in [warm_up, *bodies])
    assert len(bodies) == 20 and {len(body["prompt"]) for body in bodies} == {600}
    assert len({tuple(body["prompt"][:512]) for body in bodies}) == 1
    assert len({tuple(body["prompt"]) for body in bodies}) == 20
    assert warm_up["prompt"][:16] != bodies[0]["prompt"][:16], "caches stay cold"
    requests, [window] = lines(out, "request"), lines(out, "window")
    assert [row["at_s"] for row in requests] == [round(0.005 * i, 4) for i in range(20)]
    assert [row["output_tokens"] for row in requests] == [4] * 20
    assert window["attainment"] == 1.0 and window["num_finished"] == 20
    assert window["tpot_ms"]["p50"] >= 4.9 and window["late_ms"]["p50"] is not None
    assert (window["cached_tokens"], window["shareable_tokens"]) == (20 * 16, 19 * 512)
    assert window["circumstances"]["commit"] == "abc"
    assert "<svg" in shown.read_text() and "100.0%" in capsys.readouterr().out


def test_the_loop_is_open_and_refused_requests_miss(trace: Path, tmp_path: Path) -> None:
    behaviour = Behaviour(first_s=0.2, fault="busy", every=5)
    out = tmp_path / "out.jsonl"
    with served(behaviour) as url:
        assert replay(trace, url, "--out", str(out), "--warmups", "0", *EASY) == 0
        assert behaviour.most_in_flight > 8, "requests do not wait for answers"
        behaviour.most_in_flight = 0
        assert replay(trace, url, "--clients", "3", "--salt", "b", "--out", str(out)) == 0
    assert behaviour.most_in_flight == 3
    opened, bound = lines(out, "window")
    assert (opened["num_refused"], opened["num_failed"], opened["num_finished"]) == (4, 0, 16)
    assert opened["attainment"] == 0.8
    assert bound["late_ms"]["p99"] > 200, "what a bound holds back is late"


def test_a_sweep_resumes_where_it_stopped(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour = Behaviour()
    out = tmp_path / "out.jsonl"
    sweep = ["--window", "0:2", "--warmups", "0", "--out", str(out), *EASY]
    with served(behaviour) as url:
        assert replay(trace, url, *sweep, "--rates", "200,100") == 0
        assert [row["settings"]["rate"] for row in lines(out, "window")] == [100, 200]
        first = [body["prompt"] for body in behaviour.bodies]
        assert len(first) == 40 and first[0][:16] != first[20][:16], "each window is cold"
        text = out.read_text().splitlines(keepends=True)
        out.write_text("".join(text[:-3]))  # killed in the second window
        behaviour.bodies.clear()
        assert replay(trace, url, *sweep, "--rates", "100,200,400") == 0
        second = [body["prompt"] for body in behaviour.bodies]
        assert len(second) == 40, "two windows: that which was cut off, and the new one"
        assert second[0][:16] not in [prompt[:16] for prompt in first], "it is cold once more"
    assert [row["num_begun"] for row in lines(out, "window")] == [1, 2, 1]
    capsys.readouterr()
    assert replay(trace, "http://127.0.0.1:9", *sweep, "--rates", "100,200,400") == 0
    assert "at least 400 requests/s" in capsys.readouterr().out


def test_other_promises_need_no_other_requests_and_files_are_shown_together(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    with served(Behaviour()) as url:
        for path in files:
            assert replay(trace, url, "--out", str(path), *EASY) == 0
    assert replay(trace, "http://127.0.0.1:9", "--out", str(files[0]), "--ttft-ms", "1e-6") == 0
    assert "0.0%" in capsys.readouterr().out
    together = tmp_path / "both.html"
    names = list(map(str, files))
    assert main(["bench", "replay-page", *names, "--page", str(together)]) == 0
    text = together.read_text()
    assert "<h2>a</h2>" in text and "<h2>b</h2>" in text and text.count("<polyline") == 2


def test_nothing_that_is_read_is_written_over(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a name with brackets is shown as it is."""
    out, page = tmp_path / "out.jsonl", tmp_path / "page.html"
    before = trace.read_bytes()
    nobody = "http://127.0.0.1:9"
    for words in (
        ("--page", str(trace)),
        ("--out", str(trace)),
        ("--out", str(out), "--page", f"{tmp_path}/../{tmp_path.name}/out.jsonl"),
    ):
        assert replay(trace, nobody, *words) == 2
        assert "also a file that is read or written" in capsys.readouterr().err
    with served(Behaviour()) as url:
        label = ("--label", "fp8 [tuned] [/x]")
        assert replay(trace, url, "--out", str(out), "--page", str(page), *label) == 0
    assert "fp8 [tuned] [/x]" in capsys.readouterr().out
    results = out.read_bytes()
    assert main(["bench", "replay-page", str(out), "--page", str(out)]) == 2
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes")
    assert main(["bench", "replay-page", str(notes), "--page", str(page)]) == 2
    assert (trace.read_bytes(), out.read_bytes()) == (before, results)
    assert notes.read_text() == "my notes"


def test_failures_have_status_1(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(Behaviour(fault="error", every=4)) as url:
        assert replay(trace, url, "--warmups", "0") == 1
    assert "5 x error in the stream" in capsys.readouterr().out


def test_a_failing_warm_up_sends_nothing_else(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour = Behaviour(fault="refuse")
    with served(behaviour) as url:
        assert replay(trace, url) == 2
    assert len(behaviour.bodies) == 1
    assert "(700 tokens in, 4 out) failed: 400" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--window", "90:10"], "--window 90:10 holds no request"),
        (["--duration", "3"], "--duration needs --rate"),
        (["--out", "no/folder/out.jsonl"], "no/folder/out.jsonl"),
        (["--page", "no/folder/page.html"], "no/folder/page.html"),
        (["--out", "TRACE"], "is also a file that is read or written"),
        (["--format", "azure"], "line 1: the header of Azure's format"),
        (["--rate", "1e-300"], "days, more than 31: take a higher rate or speed"),
        ([], "no server at http://127.0.0.1:9"),
    ],
)
def test_mistakes_are_told(
    options: list[str], message: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(trace) if word == "TRACE" else word for word in options]
    assert main(["bench", "replay", str(trace), "--url", "http://127.0.0.1:9", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rates", "1,,2"], "--rates: rates must look like 1,1.5,2"),
        (["--rates", "1,0"], "--rates: rates must look like 1,1.5,2"),
        (["--rate", "1", "--speed", "2"], "not allowed with"),
        (["--window", "5"], "--window: a window must look like START:SECONDS"),
        (["--attainment", "90"], "--attainment: a share must be above 0 and at most 1"),
        (["--max-input", "0"], "--max-input: must be at least 1, not 0"),
        (["--format", "csv"], "--format"),
    ],
)
def test_unreadable_options_are_told(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "replay", "trace", *options])
    assert message in capsys.readouterr().err
