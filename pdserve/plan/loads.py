"""The load that a planned cluster must serve, at any rate, as requests of a simulation.

    --poisson RATE,IN,OUT      independent requests of fixed lengths
    --trace FILE               a window of a recorded trace, sent faster or slower

Everything follows from a seed. A higher rate sends the same requests sooner. This module knows no
layouts. `cli` and benchmarks/plan_check.py call it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.bench.replay.trace import Trace
from pdserve.bench.replay.trace_lines import BLOCK_TOKENS, TraceRequest
from pdserve.bench.replay.window import Caps, Pace, Span, Window, take_window
from pdserve.plan.simulation.jobs import Request

LEAST_REQUESTS = 300  # per point; a share of fewer requests is too uncertain


class Load(Protocol):
    """A load. `rate` is the requests per second that must be served. mean_in, mean_out and longest
    are tokens. longest counts prompt and answer."""

    @property
    def name(self) -> str: ...

    @property
    def rate(self) -> float: ...

    @property
    def mean_in(self) -> float: ...

    @property
    def mean_out(self) -> float: ...

    @property
    def longest(self) -> int: ...

    def at(self, rate: float, seconds: float) -> tuple[Request, ...]:
        """Returns requests that arrive at this rate for `seconds`, but at least LEAST_REQUESTS."""
        ...


@dataclass(frozen=True)
class Poisson:
    """Requests at random moments, with num_in and num_out tokens and no common prefix."""

    rate: float
    num_in: int
    num_out: int
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> "Poisson":
        """Reads a text such as `10,2048,128`. Raises ValueError that says what is wrong."""
        parts = text.split(",")
        try:
            rate, num_in, num_out = float(parts[0]), int(parts[1]), int(parts[2])
        except (ValueError, IndexError):
            rate = num_in = num_out = 0
        if len(parts) != 3 or not 0 < rate < 1e6 or num_in < 1 or num_out < 1:
            raise ValueError(
                "must be RATE,IN,OUT (requests per second above 0, tokens from 1 on), as in "
                f"10,2048,128, not {text!r}"
            )
        return cls(rate, num_in, num_out)

    @property
    def name(self) -> str:
        return f"Poisson, {self.rate:g} requests/s of {self.num_in}/{self.num_out} tokens"

    @property
    def mean_in(self) -> float:
        return self.num_in

    @property
    def mean_out(self) -> float:
        return self.num_out

    @property
    def longest(self) -> int:
        return self.num_in + self.num_out

    def at(self, rate: float, seconds: float) -> tuple[Request, ...]:
        count = max(LEAST_REQUESTS, round(rate * seconds))
        draw = random.Random(self.seed)
        now = 0.0
        requests = []
        for number in range(count):
            now += draw.expovariate(1.0) / rate
            prompt = ((f"own {self.seed} {number}", self.num_in),)
            requests.append(Request(now, prompt, self.num_out))
        return tuple(requests)


class Recorded:
    """A window of a trace. Raises ValueError if it has prompts of text, because only a server knows
    their tokens."""

    def __init__(self, trace: Trace, span: Span, caps: Caps) -> None:
        self._trace = trace
        self._span = span
        self._caps = caps
        whole = take_window(trace, span, Pace(speed=1.0), caps)
        if any(isinstance(request.prompt, str) for request in whole.requests):
            raise ValueError(
                f"--trace {trace.name} holds prompts of text, but only a server can count their "
                "tokens: give input_length or token ids in the trace"
            )
        self.name = f"{trace.name}, window {span}"
        self.rate = whole.rate
        self._seconds = whole.seconds
        requests = whole.requests
        self.mean_in = sum(request.input_length for request in requests) / len(requests)
        self.mean_out = sum(request.output_length for request in requests) / len(requests)
        self.longest = max(r.input_length + r.output_length for r in requests)

    def at(self, rate: float, seconds: float) -> tuple[Request, ...]:
        """Returns the window's first requests, or all of them if it has fewer than are needed."""
        wanted = max(seconds, LEAST_REQUESTS / rate)
        pace = Pace(rate=rate)
        if rate * wanted < self.rate * self._seconds:
            pace = Pace(rate=rate, duration_s=wanted)
        return requests_of(take_window(self._trace, self._span, pace, self._caps))


def requests_of(window: Window) -> tuple[Request, ...]:
    """Returns a window's requests for a simulation."""
    return tuple(
        Request(request.at_s, _prefixes(request, window.first_index + index), request.output_length)
        for index, request in enumerate(window.requests)
    )


def _prefixes(request: TraceRequest, index: int) -> tuple[tuple[str, int], ...]:
    """Returns the parts of a prompt, (name, tokens). Equal hash ids are equal blocks. Prompts of
    token ids, and prompts of which only the length is known, share nothing."""
    if request.hash_ids is None:
        return ((f"own {index}", request.input_length),)
    lengths = [BLOCK_TOKENS] * len(request.hash_ids)
    lengths[-1] = request.input_length - BLOCK_TOKENS * (len(lengths) - 1)
    return _named(request.hash_ids, lengths)


def _named(ids: Sequence[int], lengths: Sequence[int]) -> tuple[tuple[str, int], ...]:
    return tuple((f"block {name}", count) for name, count in zip(ids, lengths, strict=True))
