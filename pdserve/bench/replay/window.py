"""Takes a window of a trace, at a rate: which requests are sent when, and how long they are.

Knows no server and no tokens. Everything follows from the trace and the options. Called by sweep.py
and commands.py.
"""

import bisect
import dataclasses
import math
import re
from dataclasses import dataclass

from pdserve.bench.replay.trace import Trace
from pdserve.bench.replay.trace_lines import BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True)
class Span:
    """The part of a trace that requests are taken from, in seconds after its first request.

    If `seconds` is None, it ends with the last request. It is written START:SECONDS, or START:
    alone for an open end.
    """

    start: float = 0.0
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Span":
        """Parses `120:60`, or `120:` for an open end. Raises a ValueError that says what is
        wrong."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)?", text.strip(), re.ASCII)
        if match is None or (match[2] and float(match[2]) == 0):
            raise ValueError(
                "a window must look like START:SECONDS (of the trace), such as 120:60, not "
                f"{text!r}; SECONDS must be above 0"
            )
        return cls(float(match[1]), float(match[2]) if match[2] else None)

    def __str__(self) -> str:
        return f"{self.start:g}:" + (f"{self.seconds:g}" if self.seconds is not None else "")


@dataclass(frozen=True)
class Caps:
    """Limits in tokens, or None.

    A longer prompt loses its end (hash blocks are cut there). Of a longer answer only this many
    tokens are asked for.
    """

    max_input: int | None = None
    max_output: int | None = None

    def cut(self, request: TraceRequest) -> TraceRequest:
        """Returns the request within the limits. Raises ValueError if its prompt is text, which is
        never cut."""
        if self.max_output is not None and request.output_length > self.max_output:
            request = dataclasses.replace(request, output_length=self.max_output)
        if self.max_input is None:
            return request
        if isinstance(request.prompt, str):
            raise ValueError(
                "--max-input cannot cut prompts of text, whose tokens only the server knows: leave "
                "it out, or give token ids in the trace"
            )
        if request.input_length <= self.max_input:
            return request
        num_blocks = math.ceil(self.max_input / BLOCK_TOKENS)
        return dataclasses.replace(
            request,
            input_length=self.max_input,
            hash_ids=None if request.hash_ids is None else request.hash_ids[:num_blocks],
            prompt=None if request.prompt is None else request.prompt[: self.max_input],
        )


@dataclass(frozen=True)
class Pace:
    """The speed of a replay: a rate (mean requests per second), or a factor (`speed`; 1 is as
    recorded).

    With a rate, `duration_s` takes only as many requests from the window's start as that rate sends
    in that time. If it is None, the whole window is sent, however long that takes.
    """

    rate: float | None = None
    speed: float | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.speed is None):
            raise ValueError("give either --rate or --speed")
        if self.duration_s is not None and self.rate is None:
            raise ValueError("--duration needs --rate or --rates to know how many requests fit")

    def __str__(self) -> str:
        return f"{self.rate:g} req/s" if self.rate is not None else f"speed {self.speed:g}"


@dataclass(frozen=True)
class Window:
    """Requests ready to be sent; their at_s are seconds on the replay's clock from the window's
    start.

    `first_index` is the first request's place in the trace. Arrivals take `seconds`.
    """

    requests: list[TraceRequest]
    first_index: int
    seconds: float

    @property
    def rate(self) -> float:
        """Mean arrivals per second."""
        return len(self.requests) / self.seconds


def take_window(trace: Trace, span: Span, pace: Pace, caps: Caps) -> Window:
    """Returns the requests of `span`, with times scaled to `pace` and lengths within `caps`.

    Raises a ValueError that names the option which leaves nothing to send.
    """
    times = [request.at_s for request in trace.requests]
    first = bisect.bisect_left(times, span.start)
    end = math.inf if span.seconds is None else span.start + span.seconds
    last = bisect.bisect_left(times, end)
    if first == last:
        raise ValueError(
            f"--window {span} holds no request: the trace lasts {trace.seconds:,.0f} s; choose "
            "another start or a longer window"
        )
    until = span.start + span.seconds if span.seconds is not None else trace.seconds
    if pace.duration_s is not None:
        assert pace.rate is not None
        wanted = max(1, round(pace.rate * pace.duration_s))
        if wanted > last - first:
            raise ValueError(
                f"--duration {pace.duration_s:g} at {pace.rate:g} requests/s needs {wanted} "
                f"requests, but --window {span} holds {last - first}: widen the window or shorten "
                "the duration"
            )
        if first + wanted < last:
            last = first + wanted
            until = times[last]
    speed = pace.speed if pace.speed is not None else _speed(pace, last - first, until - span.start)
    assert speed is not None
    requests = [
        dataclasses.replace(caps.cut(request), at_s=(request.at_s - span.start) / speed)
        for request in trace.requests[first:last]
    ]
    seconds = (until - span.start) / speed
    return Window(requests, first, seconds if seconds > 0 else 1.0)


def _speed(pace: Pace, num_requests: int, seconds: float) -> float:
    assert pace.rate is not None
    if seconds <= 0:
        raise ValueError(
            f"--rate {pace.rate:g} cannot be reached: all requests of the window arrive at the "
            "same time; take a longer --window, or --speed"
        )
    return pace.rate * seconds / num_requests
