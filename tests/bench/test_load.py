"""The load generator against a small server: what it counts, what it times, and every way a stream
can fail."""

import re
from typing import Any

import pytest
from sse_server import Behaviour, served

from pdserve.bench.cli import serve_report
from pdserve.bench.load import LoadConfig, LoadResult, run_load
from pdserve.bench.sse_client import Outcome, ServerError, StreamParser
from pdserve.bench.workload import Lengths, Shape

FIVE = Lengths(5, 5)


def load(
    behaviour: Behaviour, num_requests: int = 6, output_len: Lengths = FIVE, **options: Any
) -> LoadResult:
    options = {"clients": 2, "timeout_s": 120.0, "num_warmups": 0} | options
    with served(behaviour) as url:
        shape = Shape(num_requests, Lengths(3, 3), output_len)
        return run_load(LoadConfig(url=url, shape=shape, **options), progress=False)


def test_closed_loop_keeps_as_many_requests_in_flight_as_clients() -> None:
    behaviour = Behaviour(gap_s=0.01)
    result = load(behaviour, num_requests=9, clients=3)
    assert behaviour.most_in_flight == 3
    assert len(result.finished) == 9 and not result.errors
    assert [outcome.num_tokens for outcome in result.outcomes] == [5] * 9
    assert result.lateness == []


def test_what_is_asked_for() -> None:
    behaviour = Behaviour()
    load(behaviour, num_warmups=2, vocab_size=50, extra_body={"top_k": 1, "ignore_eos": None})
    assert len(behaviour.bodies) == 2 + 6
    body = behaviour.bodies[0]
    assert (body["model"], body["stream"], body["temperature"], body["max_tokens"]) == (
        "fake",
        True,
        0,
        5,
    )
    assert body["top_k"] == 1 and "ignore_eos" not in body
    prompts = [tuple(body["prompt"]) for body in behaviour.bodies]
    assert all(len(prompt) == 3 and max(prompt) < 50 for prompt in prompts)
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize(("late_s", "warns"), [(0.001, False), (0.2, True)])
def test_requests_that_were_sent_late_are_reported(late_s: float, warns: bool) -> None:
    result = load(Behaviour())
    result.lateness = [late_s] * 6
    config = LoadConfig(
        url="http://x", shape=Shape(6, Lengths(3, 3), Lengths(5, 5)), rate=1.0, timeout_s=1.0
    )
    assert ("requests were sent late: the arrivals" in serve_report(config, result)) == warns


def test_the_api_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    behaviour = Behaviour()
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    load(behaviour, num_requests=1)
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    load(behaviour, num_requests=1)
    assert behaviour.keys == [None, "Bearer s3cret"]


def test_times_are_those_the_server_made() -> None:
    result = load(Behaviour(first_s=0.1, gap_s=0.03), num_requests=4, clients=1)
    figures = result.figures()
    # Never shorter; longer on a busy machine, but half of the requests took so long at least, one
    # after the other.
    total_ms = 1000 * result.seconds
    assert 95 <= figures["ttft_ms"]["p50"] <= total_ms / 2
    assert 28 <= figures["tpot_ms"]["p50"] <= total_ms / 8
    assert 28 <= figures["itl_ms"]["p50"] <= total_ms / 8
    assert 28 <= figures["gap_ms"]["p50"] <= total_ms / 2
    assert figures["num_output_tokens"] == 20
    assert figures["output_tokens_per_s"] == pytest.approx(20 / result.seconds, rel=0.01)
    assert figures["requests_per_s"] == pytest.approx(4 / result.seconds, rel=0.01)
    assert 0 < figures["client_cpu_share"] < 1


def test_open_loop_does_not_wait_for_answers() -> None:
    behaviour = Behaviour(gap_s=0.2)
    result = load(behaviour, num_requests=20, clients=None, rate=100.0)
    assert behaviour.most_in_flight > 5
    # timers tick in ms
    assert len(result.lateness) == 20 and all(-0.01 < late < 60 for late in result.lateness)
    assert result.figures()["client_late_ms"]["p99"] is not None


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refuse", "400: .*max_tokens is wrong"),
        ("drop", "connection failed"),
        ("hang", "not finished within 3 s"),
        ("garbage", "an event is no completion chunk"),
        ("error", "error in the stream: .*the worker died"),
        ("end", "ended after 2 tokens without a finish_reason"),
    ],
)
def test_a_failed_request_is_counted_with_its_message_and_the_others_go_on(
    fault: str, message: str
) -> None:
    result = load(Behaviour(fault=fault, every=3), timeout_s=3.0 if fault == "hang" else 120.0)
    assert len(result.finished) == 4
    assert sum(result.errors.values()) == 2
    assert all(re.search(message, error) for error in result.errors), result.errors
    figures = result.figures()
    assert figures["num_failed"] == 2 and figures["num_output_tokens"] == 20


def test_when_all_fail_there_are_figures_without_latencies() -> None:
    figures = load(Behaviour(fault="refuse")).figures()
    assert figures["num_finished"] == 0 and figures["num_failed"] == 6
    assert figures["ttft_ms"] == {"p50": None, "p99": None, "mean": None}


def test_a_failing_warm_up_ends_it() -> None:
    with pytest.raises(ServerError, match="a warm-up request failed: 400"):
        load(Behaviour(fault="refuse"), num_warmups=1)


def test_no_server() -> None:
    with pytest.raises(ServerError, match="no server at http"):
        run_load(
            LoadConfig(url="http://127.0.0.1:9/v1", shape=Shape(1, FIVE, FIVE), clients=1),
            progress=False,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either --clients"),
        ({"clients": 1, "rate": 1.0}, "either --clients"),
        ({"clients": 0}, "--clients must be at least 1, not 0"),
        ({"rate": 0.0}, "--rate must be"),
        ({"rate": float("nan")}, "--rate must be"),
    ],
)
def test_bad_loads_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoadConfig(url="http://x", shape=Shape(1, FIVE, FIVE), **options)


def test_an_url_without_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="must start with http"):
        run_load(
            LoadConfig(url="localhost:8000", shape=Shape(1, FIVE, FIVE), clients=1), progress=False
        )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("token_ids", "usage"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_tokens_are_counted_whatever_the_server_tells(
    token_ids: bool, usage: bool, line_end: str
) -> None:
    result = load(Behaviour(token_ids=token_ids, usage=usage, line_end=line_end), num_requests=2)
    assert [(o.num_tokens, len(o.arrivals), o.finish_reason) for o in result.outcomes] == [
        (5, 5, "length")
    ] * 2


def test_events_cut_anywhere_and_several_tokens_an_event() -> None:
    stream = b"".join(
        [
            b'data: {"choices": [{"text": "", "token_ids": [1, 2]}]}\n\n: ping\n\n',
            b'data:{"choices":[{"text":"x","token_ids":[3],"finish_reason":"stop"}]}\r\n\r\n',
            b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n',
        ]
    )
    outcome = Outcome()
    parser = StreamParser(outcome)
    for i in range(len(stream)):
        parser.feed(stream[i : i + 1], float(i))
    assert outcome.error is None
    assert (outcome.num_tokens, len(outcome.arrivals), outcome.finish_reason) == (3, 2, "stop")


def test_figures_of_known_times() -> None:
    outcome = Outcome(
        sent_at=1.0, arrivals=[1.5, 1.6, 1.8], num_tokens=5, finish_reason="length", ended_at=2.0
    )
    assert outcome.ttft == pytest.approx(0.5)
    assert outcome.tpot == pytest.approx(0.3 / 4)
    assert outcome.itls == pytest.approx([0.1, 0.2])
    alone = Outcome(arrivals=[1.0], num_tokens=1)
    assert alone.tpot is None
    figures = LoadResult(
        [outcome, alone], seconds=2.0, cpu_share=0.1, lateness=[], model="m"
    ).figures()
    assert figures["gap_ms"]["mean"] == pytest.approx(100), "the first gap of those that have one"
    assert figures["itl_ms"]["mean"] == pytest.approx(150)
