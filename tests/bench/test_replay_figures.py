"""The arithmetic of a replay on known numbers, its file, its page."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.bench.replay.charts import Guide, histogram, ticks
from pdserve.bench.replay.figures import (
    Promises,
    RequestRecord,
    Run,
    Settings,
    WindowResult,
    judgement,
    limit,
    record_of,
    summary,
)
from pdserve.bench.replay.page import page
from pdserve.bench.replay.series import series_of
from pdserve.bench.replay.store import Store
from pdserve.bench.sse_client import Outcome

PROMISES = Promises(ttft_ms=500, tpot_ms=20)
SETTINGS = Settings(
    "", "trace.jsonl", "d", "0:60", 2.0, None, None, 15000, 600, 0, "", 1000, None, None
)


def outcome(ttft: float, tpot: float, num_tokens: int = 5, **fields: Any) -> Outcome:
    arrivals = [1 + ttft + tpot * i for i in range(num_tokens)]
    return Outcome(
        1.0, arrivals, num_tokens, "length", ended_at=arrivals[-1] + 0.001, status=200, **fields
    )


def record(answer: Outcome, at_s: float = 0.0, asked: int = 5) -> RequestRecord:
    return record_of(answer, index=0, at_s=at_s, late_s=0.002, input_tokens=100, asked=asked)


ANSWERS = [
    record(outcome(0.5, 0.02, cached_tokens=64)),
    record(outcome(0.501, 0.01, cached_tokens=0)),
    record(outcome(0.1, 0.021)),
    record(outcome(0.1, 0.0, num_tokens=1), asked=1),
    record(Outcome(1.0, error="429: busy", status=429)),
    record(Outcome(1.0, [1.1], 1, error="connection failed", status=200)),
]


def run_of(answers: list[RequestRecord] = ANSWERS, settings: Settings = SETTINGS) -> Run:
    result = WindowResult(
        settings=settings,
        promises=PROMISES,
        num_begun=1,
        model="m",
        shareable_tokens=64,
        client_cpu_share=0.1,
        **judgement(answers, PROMISES, 4.0),
        **summary(answers, [0.01, 0.03], 5.0, 4.0),
    )
    return Run(result, answers)


def rate_run(rate: float, attained: int, **changes: Any) -> Run:
    """A run with `attained` of ten requests within both promises."""
    good, late = record(outcome(0.1, 0.01)), record(outcome(0.9, 0.01))
    settings = msgspec.structs.replace(SETTINGS, rate=rate, **changes)
    return run_of([good] * attained + [late] * (10 - attained), settings)


def test_a_record_has_its_times() -> None:
    first, *_, alone, refused, failed = ANSWERS
    assert (first.ttft_ms, first.tpot_ms, first.e2e_ms) == (500.0, 20.0, 581.0)
    assert (first.status, first.late_ms, first.cached_tokens) == ("finished", 2.0, 64)
    assert alone.tpot_ms is None
    assert (refused.status, refused.ttft_ms, refused.e2e_ms) == ("refused", None, None)
    assert (failed.status, failed.tpot_ms, failed.error) == ("failed", None, "connection failed")


def test_both_promises_must_be_kept_and_refused_and_failed_requests_keep_none() -> None:
    assert [answer.keeps(PROMISES) for answer in ANSWERS] == [
        True,
        False,
        False,
        True,
        False,
        False,
    ]
    result = run_of().result
    assert (result.num_requests, result.num_attained) == (6, 2)
    assert result.attainment == pytest.approx(2 / 6, abs=1e-6)
    assert result.goodput_per_s == 2 / 4.0, "over the seconds in which requests arrive"
    assert (result.num_finished, result.num_refused, result.num_failed) == (4, 1, 1)
    assert result.errors == {"429: busy": 1, "connection failed": 1}


def test_other_promises_judge_the_same_answers() -> None:
    result = run_of().judged(Promises(600, 30)).result
    assert (result.num_attained, result.promises.tpot_ms) == (4, 30)


def test_percentiles_and_rates() -> None:
    records = [record(outcome(ms / 1e3, 0.01)) for ms in range(1, 102)]
    figures = summary(records, [0.01, 0.03], seconds=50.0, arrivals_s=40.0)
    assert figures["ttft_ms"] == {"p50": 51.0, "p90": 91.0, "p99": 100.0, "mean": 51.0}
    assert figures["itl_ms"]["p50"] == 20.0 and figures["late_ms"]["p90"] == 2.0
    assert figures["prompt_tokens_per_s"] == 101 * 100 / 50
    assert figures["output_tokens_per_s"] == 101 * 5 / 50
    assert figures["cached_tokens"] is None, "no usage says so"
    assert run_of().result.cached_tokens == 64
    nothing = summary([ANSWERS[4]], [], seconds=1.0, arrivals_s=1.0)
    assert nothing["ttft_ms"]["p90"] is None and nothing["prompt_tokens"] == 0


def test_doubtful_figures_are_named() -> None:
    assert not run_of().result.warnings
    warm = msgspec.structs.replace(run_of().result, shareable_tokens=63)
    assert "64 prompt tokens were cached, but the window shares only 63" in warm.warnings[0]
    short = run_of([record(outcome(0.1, 0.01), asked=6)]).result
    assert "1 answers ended early" in short.warnings[0]
    late = msgspec.structs.replace(run_of().result, late_ms={"p99": 51.0})
    assert "sent late" in late.warnings[0]


def results(*attained: tuple[float, int]) -> list[WindowResult]:
    return [rate_run(*one).result for one in attained]


def test_the_highest_rate_is_interpolated() -> None:
    found = limit(results((3, 5), (1, 10), (2, 9)), 0.9)
    assert (found.rate, found.at_least) == (2, False)
    assert limit(results((1, 10), (2, 6)), 0.9).rate == pytest.approx(1.25)
    assert limit(results((1, 10), (2, 8), (3, 10), (4, 0)), 0.9).rate == pytest.approx(1.5)


def test_a_limit_outside_the_measured_rates_is_said() -> None:
    assert str(limit(results((1, 10), (2, 9)), 0.9)) == "at least 2 requests/s"
    assert str(limit(results((1, 8), (2, 9)), 0.9)) == "below the lowest rate"
    with pytest.raises(ValueError, match="no window"):
        limit([], 0.9)


def test_a_file_gives_back_what_was_finished(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    store = Store(path)
    assert store.begin(SETTINGS) == 1
    store.add(run_of())
    other = msgspec.structs.replace(SETTINGS, rate=3.0)
    assert store.begin(other) == 1
    with path.open("ab") as out:  # killed while it wrote
        out.write(msgspec.json.encode(ANSWERS[0]) + b'\n{"kind":"requ')
    again = Store(path)
    assert again.find(SETTINGS) == run_of() and again.find(other) is None
    assert again.begin(other) == 2, "a window that was cut off counts"
    again.add(run_of(ANSWERS[:2], other))
    found = Store(path).find(other)
    assert found is not None and found.records == ANSWERS[:2]


def test_another_file_is_not_taken_for_results(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"benchmark": "serve"}\n')
    said = r"out.jsonl, line 1 was not written by .*does not exist yet for --out"
    for content in (
        b'{"benchmark": "serve"}\n',
        b"key: value",
        b'{"benchmark": "serve"}\n{"benchmark"',
        b'{"benchmark"',
        b"\x00\xff\n\x01",
    ):
        path.write_bytes(content)
        for is_read_only in (False, True):
            with pytest.raises(ValueError, match=said):
                Store(path, is_read_only)
        assert path.read_bytes() == content
    with pytest.raises(ValueError, match="is not a file"):
        Store(tmp_path)


def test_reading_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    store = Store(path)
    assert not path.exists(), "nothing was sent"
    store.begin(SETTINGS)
    store.add(run_of())
    whole = path.read_bytes()
    for torn in (b"", b'{"kind":"requ'):
        path.write_bytes(whole + torn)
        assert Store(path, True).find(SETTINGS) == run_of()
        assert path.read_bytes() == whole + torn
    path.write_bytes(whole[:20])  # killed while it wrote the first line
    assert Store(path).runs == [] and path.read_bytes() == b""


def test_requests_that_arrive_at_once_have_a_rate() -> None:
    run = run_of()
    assert judgement(run.records, run.result.promises, 0.0)["goodput_per_s"] > 0
    settings = msgspec.structs.replace(SETTINGS, rate=None)
    made = summary(run.records, [], 1.0, 1e-9)
    assert msgspec.structs.replace(run.result, settings=settings, **made).rate > 0


def test_each_load_has_tokens_of_its_own() -> None:
    names = {
        msgspec.structs.replace(SETTINGS, **change).window_name(1)
        for change in ({}, {"rate": 3.0}, {"window": "60:60"}, {"salt": "a"}, {"max_input": 9})
    }
    assert len(names | {SETTINGS.window_name(2)}) == 6
    assert msgspec.structs.replace(SETTINGS, label="x").window_name(1) in names


def test_series_are_named_by_label_file_and_differences() -> None:
    runs = [rate_run(2, 9), rate_run(1, 10), rate_run(2, 8), rate_run(2, 7, window="60:60")]
    first, second = series_of(runs, "file")
    assert [run.result.rate for run in first.runs] == [1, 2]
    assert first.runs[1].result.num_attained == 8, "the newest counts"
    assert (first.name, second.name) == ("file, window 0:60", "file, window 60:60")
    assert series_of([rate_run(1, 9, label="1P1D")], "file")[0].name == "1P1D"


def test_the_page_has_all_plots_and_needs_nothing_else() -> None:
    a, b = rate_run(1, 10), rate_run(2, 7)
    text = page([*series_of([a, b], "<one>"), *series_of([run_of()], "two")], 0.9)
    assert len(re.findall("<svg", text)) == 1 + 3 * 4
    assert text.count("over arrival</text>") == 6 and text.count(">Histogram of") == 6
    assert not re.search(r"https?:|src=|href=|@import|url\(|<script", text)
    assert "&lt;one&gt;" in text and "<one>" not in text
    assert "1.33 requests/s" in text
    line = re.findall(r'<polyline class="line c0" points="([^"]*)"', text)[0].split()
    (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in line)
    assert x1 < x2 and y1 < y2, "attainment falls as the rate rises"
    assert len(re.findall('class="kept"', text)) == (10 + 10) + (7 + 10) + (3 + 2)


def test_bars_hold_every_value() -> None:
    text = histogram("t", [0.0, 1.0, 39.0, 40.0], "ms", Guide(20.0, "20 ms"))
    assert [int(n) for n in re.findall(r"<title>(\d+) from", text)] == [1, 1, 2]
    assert text.count('class="bad"') == 1


def test_ticks_are_round_and_reach_the_top() -> None:
    assert ticks(1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(730)[-1] >= 730 and ticks(0) == [0.0, 1.0]
