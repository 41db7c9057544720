"""The short ways of the hot path give what the long ones give: framed events, counters without
locks."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from pdserve.background.pace import Pacer
from pdserve.protocol.events import LegTimes
from pdserve.router.held_bytes import Held
from pdserve.router.http.body_parsing import parse
from pdserve.router.http.json_pieces import event_bytes
from pdserve.router.http.openai.chat import ChatResponder
from pdserve.router.http.openai.completions import CompletionResponder
from pdserve.router.http.openai.requests import ChatRequest, CompletionRequest
from pdserve.router.metrics import QuickCounter, QuickHistogram, RouterMetrics
from pdserve.router.request.chunks import OutputChunk
from pdserve.router.request.generation import Generation
from pdserve.text.tokenizer import Tokenizer


def responder(
    tokenizer: Tokenizer, chat: bool, options: dict[str, Any]
) -> CompletionResponder | ChatResponder:
    generation = Generation(
        'cmpl-"\\0"', 2, [], [(1, 2), (3, 4)], Pacer(), Held(1 << 20, lambda count: None).account()
    )
    body = {"model": 'a\0"b', "stream": True, "n": 2, **options}
    if chat:
        asked = parse(
            json.dumps(body | {"messages": [{"role": "user", "content": "x"}]}).encode(),
            ChatRequest,
        )
        made: CompletionResponder | ChatResponder = ChatResponder(asked, generation, tokenizer)
    else:
        made = CompletionResponder(
            parse(json.dumps(body | {"prompt": [[1, 2], [3, 4]]}).encode(), CompletionRequest),
            generation,
            tokenizer,
        )
    made._head["created"] = 7
    return made


OPTIONS: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"return_token_ids": True},
    {"return_token_ids": True, "echo": True, "stream_options": {"include_usage": True}},
    {"echo": True},
    {"max_tokens": 0, "echo": True},
]
TEXTS = st.text(max_size=4) | st.sampled_from(["", "\0", '"', "\\", "é", "\U0001f600", "\u2028"])
CHUNKS = st.lists(
    st.tuples(st.integers(0, 3), TEXTS, st.sampled_from([None, None, None, "length"])), max_size=20
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@given(sequence=CHUNKS)
def test_streamed_bytes_are_the_events_one_by_one(
    tokenizer: Tokenizer, chat: bool, options: dict[str, Any], sequence: list[tuple[int, str, Any]]
) -> None:
    if chat:
        options = {
            key: value for key, value in options.items() if key not in ("echo", "max_tokens")
        }
    quick = responder(tokenizer, chat, options)
    plain = responder(tokenizer, chat, options)
    for index, text, reason in sequence:
        chunk = OutputChunk(index, index // 2, text, (5,), (), reason, None)
        assert quick.stream(chunk) == b"".join(event_bytes(event) for event in plain.chunks(chunk))


def test_parts_of_time_add_up_over_requests_even_where_a_worker_is_half_a_step_off() -> None:
    metrics = RouterMetrics("m")
    for total in (1.0, 0.5, 1.3):  # the worker says 0.7 each time
        metrics.took(total, 0.1, [LegTimes(0.2, 0.1, 0.3, 0.25), LegTimes(0.05, 0.0, 0.05, 0.05)])
    spent = {
        part: metrics.registry.get_sample_value(
            "pdserve_router_request_time_seconds_total", {"part": part}
        )
        for part in ("admission", "queue", "engine_host", "device", "transport")
    }
    expected = {
        "admission": 0.3,
        "queue": 0.75,
        "engine_host": 0.45,
        "device": 0.9,
        "transport": 0.4,
    }
    assert spent == pytest.approx(expected)
    assert sum(expected.values()) == pytest.approx(2.8)


@given(st.lists(st.floats(0, 3) | st.sampled_from([0.1, 1.0]), max_size=30))
def test_quick_metrics_are_exposed_as_the_usual_ones(values: list[float]) -> None:
    usual = CollectorRegistry()
    quick = CollectorRegistry()
    bounds = (0.1, 0.5, 1.0)
    theirs = Histogram("x_seconds", "X.", buckets=bounds, registry=usual)
    ours = QuickHistogram("x_seconds", "X.", bounds, quick)
    count = QuickCounter("tokens", "T.", quick)
    for value in values:
        theirs.observe(value)
        ours.observe(value)
        count.inc(3)
    page = generate_latest(quick).decode()
    assert f"tokens_total {float(3 * len(values))}\n" in page
    expected = [
        line for line in generate_latest(usual).decode().splitlines() if "_created" not in line
    ]
    assert [line for line in page.splitlines() if "x_seconds" in line] == expected
