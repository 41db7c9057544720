"""Traces for replays: three formats, errors with their line, windows, rates, cuts, and prompts that
share what their hash ids share."""

import gzip
import lzma
from pathlib import Path

import pytest

from pdserve.bench.replay.prompts import Prompts, shareable_tokens
from pdserve.bench.replay.trace import Trace, read_trace
from pdserve.bench.replay.trace_lines import TraceRequest
from pdserve.bench.replay.window import Caps, Pace, Span, Window, take_window

SHIPPED = Path(__file__).parents[2] / "benchmarks/traces/mooncake_synthetic_trace.jsonl.xz"
MOONCAKE = (
    '{"timestamp": 2500, "input_length": 600, "output_length": 7, "hash_ids": [4, 9]}\n'
    '{"timestamp": 1000, "input_length": 512, "output_length": 3, "hash_ids": [4]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 23:59:59.5000000,374,44\r\n"
    "2023-11-17 00:00:01.2500000,396,109\r\n"
)
PLAIN = (
    '{"at_s": 3, "input_length": 9, "output_length": 2}\n\n'
    '{"timestamp": 3500, "prompt": [5, 6], "output_length": 1, "extra": null}\n'
    '{"at_s": 4.0, "prompt": "hello", "output_length": 4}\n'
)


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, newline="")
    return path


def test_mooncakes_lines_are_read_in_the_order_of_their_times(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, MOONCAKE)).requests == [
        TraceRequest(0.0, 512, 3, (4,)),
        TraceRequest(1.5, 600, 7, (4, 9)),
    ]


def test_azures_lines_are_read_over_midnight(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, AZURE)).requests == [
        TraceRequest(0.0, 374, 44),
        TraceRequest(1.75, 396, 109),
    ]
    aware = AZURE.replace("000000,", "0000+00:00,")
    assert read_trace(written(tmp_path, aware)).requests[1].at_s == 1.75


def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path: Path) -> None:
    marked = read_trace(written(tmp_path, "\ufeff" + AZURE))
    assert marked.requests == read_trace(written(tmp_path, AZURE)).requests


def test_plain_lines_are_read(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, PLAIN)).requests == [
        TraceRequest(0.0, 9, 2),
        TraceRequest(0.5, 2, 1, prompt=(5, 6)),
        TraceRequest(1.0, 0, 4, prompt="hello"),
    ]


def test_compressed_files_are_read_whatever_their_names(tmp_path: Path) -> None:
    plain = read_trace(written(tmp_path, MOONCAKE)).requests
    for pack in (lzma.compress, gzip.compress):
        (tmp_path / "packed").write_bytes(pack(MOONCAKE.encode()))
        assert read_trace(tmp_path / "packed").requests == plain
        (tmp_path / "packed").write_bytes(pack(MOONCAKE.encode())[:-9])
        with pytest.raises(ValueError, match=r"damaged .*: copy the file again"):
            read_trace(tmp_path / "packed")


def test_a_format_can_be_named(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, MOONCAKE), "plain").requests
    assert [request.hash_ids for request in requests] == [None, None]
    with pytest.raises(ValueError, match="line 1: the header of Azure's format is TIMESTAMP"):
        read_trace(written(tmp_path, MOONCAKE), "azure")


def test_the_shipped_trace() -> None:
    trace = read_trace(SHIPPED)
    assert len(trace.requests) == 3993 and trace.seconds == pytest.approx(1022.025)
    mean = sum(request.input_length for request in trace.requests) / 3993
    assert mean == pytest.approx(15_300, rel=0.01)
    window = take_window(trace, Span(), Pace(speed=1.0), Caps())
    shared = shareable_tokens(window)
    assert shared is not None and shared / (mean * 3993) == pytest.approx(0.64, abs=0.02)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no requests: name another file"),
        ("abc\n", "line 1: 'abc' begins no known format.*--format"),
        (MOONCAKE + MOONCAKE.replace(", 9", ""), "line 3 .*hash_ids has 1 ids, .*needs 2.*correct"),
        (MOONCAKE + "{", "line 3 .format mooncake."),
        (MOONCAKE.replace("600", "0"), r"line 1 .*>= 1 - at `\$.input_length`"),
        (
            MOONCAKE.replace('"timestamp": 1000, ', ""),
            "line 2 .*missing required field `timestamp`",
        ),
        (AZURE + "2023-11-17,5\n", "line 4 .*2 columns instead of 3"),
        (AZURE + "yesterday,5,5\n", "line 4 .*TIMESTAMP must look like 2023.*'yesterday'"),
        (AZURE + "2023-11-17,5,0\n", "line 4 .*GeneratedTokens must be .* at least 1, not '0'"),
        (AZURE.splitlines()[0], "no request follows the header"),
        (
            PLAIN + '{"prompt": "a", "output_length": 1}',
            "line 5 .*give either at_s .* or timestamp",
        ),
        (PLAIN + '{"at_s": 1, "output_length": 1}', "line 5 .*give prompt .* or input_length"),
        (PLAIN + '{"at_s": 1, "output_length": 1, "prompt": []}', "line 5 .*prompt is empty"),
        (PLAIN + '{"at_s": 1, "output_length": 1, "prompt": [-1]}', "line 5 .*>= 0"),
        (
            PLAIN + '{"at_s": 1, "output_length": 1, "prompt": [1], "input_length": 3}',
            "input_length is 3, but prompt has 1 token ids",
        ),
    ],
)
def test_a_wrong_line_is_named_with_its_cure(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_trace(written(tmp_path, text))
    assert str(caught.value).startswith(f"TRACE {tmp_path / 'trace'}")


def trace_of(*requests: TraceRequest) -> Trace:
    return Trace("t", "d", list(requests))


EVERY_2_S = trace_of(*(TraceRequest(2.0 * i, 10, 5) for i in range(50)))


def test_a_window_is_of_the_traces_seconds() -> None:
    window = take_window(EVERY_2_S, Span(10, 20), Pace(speed=1.0), Caps())
    assert [request.at_s for request in window.requests] == [2.0 * i for i in range(10)]
    assert (window.first_index, window.seconds, window.rate) == (5, 20, 0.5)
    fast = take_window(EVERY_2_S, Span(10, 20), Pace(speed=4.0), Caps())
    assert [request.at_s for request in fast.requests] == [0.5 * i for i in range(10)]
    assert fast.seconds == 5
    assert len(take_window(EVERY_2_S, Span(90), Pace(speed=1.0), Caps()).requests) == 5


def test_a_rate_is_the_mean_of_its_window() -> None:
    window = take_window(EVERY_2_S, Span(10, 20), Pace(rate=4.0), Caps())
    assert (len(window.requests), window.seconds, window.rate) == (10, 2.5, 4.0)
    assert [request.at_s for request in window.requests] == [0.25 * i for i in range(10)]


def test_a_duration_takes_as_many_requests_as_its_rate_sends() -> None:
    window = take_window(EVERY_2_S, Span(10, 60), Pace(rate=4.0, duration_s=5), Caps())
    assert (len(window.requests), window.seconds, window.rate) == (20, 5.0, 4.0)
    with pytest.raises(
        ValueError, match=r"--duration 9 at 4 requests/s needs 36 .* holds 30: widen"
    ):
        take_window(EVERY_2_S, Span(10, 60), Pace(rate=4.0, duration_s=9), Caps())
    with pytest.raises(ValueError, match="--duration needs --rate"):
        Pace(speed=1.0, duration_s=9)


def test_windows_that_hold_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--window 98.5:5 holds no request: the trace lasts 98 s"):
        take_window(EVERY_2_S, Span(98.5, 5), Pace(speed=1.0), Caps())
    with pytest.raises(ValueError, match="--rate 3 cannot be reached"):
        take_window(trace_of(TraceRequest(0, 1, 1)), Span(), Pace(rate=3.0), Caps())
    for text in ("", "5", "5:0", "-1:5", "a:5", "1:2:3"):
        with pytest.raises(ValueError, match="must look like START:SECONDS"):
            Span.parse(text)
    assert (str(Span.parse("120:60")), str(Span.parse("1.5:"))) == ("120:60", "1.5:")


def test_long_prompts_lose_their_end_and_long_answers_too() -> None:
    caps = Caps(600, 4)
    assert caps.cut(TraceRequest(0, 1500, 9, (1, 2, 3))) == TraceRequest(0, 600, 4, (1, 2))
    assert caps.cut(TraceRequest(0, 512, 3, (1,))) == TraceRequest(0, 512, 3, (1,))
    assert Caps(2).cut(TraceRequest(0, 3, 9, prompt=(7, 8, 9))).prompt == (7, 8)
    with pytest.raises(ValueError, match="--max-input cannot cut prompts of text"):
        caps.cut(TraceRequest(0, 0, 1, prompt="a"))
    uncut = TraceRequest(0, 1500, 9, (1, 2, 3))
    whole = Prompts(0, "w", 100).prompt(uncut, 0)
    assert Prompts(0, "w", 100).prompt(caps.cut(uncut), 0) == whole[:600]


def test_equal_ids_are_equal_blocks_and_others_are_not() -> None:
    prompts = Prompts(seed=3, window="w", vocab_size=50)
    first = prompts.prompt(TraceRequest(0, 1100, 1, (7, 8, 9)), 0)
    second = prompts.prompt(TraceRequest(0, 1024, 1, (7, 5)), 1)
    assert isinstance(first, list) and isinstance(second, list)
    assert (len(first), len(second)) == (1100, 1024)
    assert first[:512] == second[:512] and first[512:1024] != second[512:1024]
    assert min(first) >= 0 and max(first) == 49
    assert first == Prompts(3, "w", 50).prompt(TraceRequest(0, 1100, 1, (7, 8, 9)), 9)
    for other in (Prompts(4, "w", 50), Prompts(3, "v", 50)):
        assert other.prompt(TraceRequest(0, 1100, 1, (7, 8, 9)), 0)[:512] != first[:512]


def test_token_ids_are_the_same_everywhere() -> None:
    assert Prompts(0, "w", 1000).prompt(TraceRequest(0, 4, 1, (1,)), 0) == [
        207,
        15,
        80,
        884,
    ]


def test_prompts_without_ids_share_nothing_and_prompts_of_the_trace_are_sent_as_they_are() -> None:
    prompts = Prompts(0, "w", 1000)
    bare = TraceRequest(0, 30, 1)
    assert prompts.prompt(bare, 0) != prompts.prompt(bare, 1)
    assert prompts.prompt(TraceRequest(0, 2, 1, prompt=(5, 6)), 0) == [5, 6]
    assert prompts.prompt(TraceRequest(0, 0, 1, prompt="hi"), 0) == "hi"


def test_what_a_window_shares() -> None:
    def shared(*requests: TraceRequest) -> int | None:
        return shareable_tokens(Window(list(requests), 0, 1.0))

    first = TraceRequest(0, 1100, 1, (7, 8, 9))
    assert shared(first, first) == 1100
    assert shared(first, TraceRequest(0, 2000, 1, (7, 8, 9, 10))) == 1100
    assert shared(first, TraceRequest(0, 1024, 1, (6, 8))) == 0, "its first block is another"
    assert shared(TraceRequest(0, 9, 1), TraceRequest(0, 9, 1)) == 0
    assert shared(first, TraceRequest(0, 1, 1, prompt=(1,))) is None
