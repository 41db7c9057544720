"""Computes and holds the results of a replayed window: records of its requests, the share that
keeps both promises, and the highest rate at which enough do.

Goodput is DistServe's: requests per second that keep their promises for the first token and for the
next ones. Pure arithmetic; knows no server and no files. Called by send.py, store.py, sweep.py and
the modules that show results.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from pdserve.bench.load import LATE_MS
from pdserve.bench.record import Json, percentiles
from pdserve.bench.sse_client import Outcome

POINTS = (50, 90, 99)  # percentiles in a result
TOO_MANY = 429  # HTTP status of a refusal
SHORTEST_S = 1e-4  # arrivals within less count as this long

Status = Literal["finished", "refused", "failed"]
Percentiles = dict[str, float | None]  # keys "p50", "p90", "p99" and "mean"; values in ms


class Promises(msgspec.Struct, frozen=True):
    """Limits in ms that a request must keep, both included: TTFT, and TPOT after the first
    token."""

    ttft_ms: float
    tpot_ms: float


class Settings(msgspec.Struct, frozen=True):
    """Everything that makes two windows the same load, except the promises.

    With equal settings, one result stands for both. Fields are those of the command line; `digest`
    is the trace's.
    """

    label: str
    trace: str
    digest: str
    window: str
    rate: float | None
    speed: float | None
    duration_s: float | None
    max_input: int | None
    max_output: int | None
    seed: int
    salt: str
    vocab_size: int
    clients: int | None
    model: str | None

    def window_name(self, num_begun: int) -> str:
        """Returns the text that the tokens of the window's prompts depend on, besides the seed.

        If any of its parts changes, no block is one that a server has cached before.
        """
        load = (self.digest, self.window, self.rate, self.speed, self.duration_s)
        return "/".join(map(str, (*load, self.max_input, self.max_output, self.salt, num_begun)))


class RequestRecord(msgspec.Struct, frozen=True, tag="request", tag_field="kind"):
    """One request. Times are in ms, and None if there was no such token; lengths are in tokens.

    `at_s` is when it was due, in seconds from the window's start. `late_ms` is how much later it
    was sent, by the client's own fault. `cached_tokens` is what the server's usage says.
    """

    index: int
    at_s: float
    late_ms: float
    input_tokens: int
    asked_tokens: int
    output_tokens: int
    status: Status
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    cached_tokens: int | None
    error: str | None

    def keeps(self, promises: Promises) -> bool:
        """True if it finished within both limits. An answer of one token has no TPOT, and keeps
        that promise."""
        if self.status != "finished" or self.ttft_ms is None:
            return False
        return self.ttft_ms <= promises.ttft_ms and (
            self.tpot_ms is None or self.tpot_ms <= promises.tpot_ms
        )


class WindowResult(msgspec.Struct, frozen=True, tag="window", tag_field="kind"):
    """Figures of one window. Percentiles are in ms, over finished requests; those of late_ms are
    over all."""

    settings: Settings
    promises: Promises
    num_begun: int  # How often this window was begun, including the last time.
    model: str
    num_requests: int
    num_attained: int
    attainment: float  # Share of all requests that keep both promises.
    goodput_per_s: float  # Requests that keep both promises, per second of arrivals.
    num_finished: int
    num_refused: int
    num_failed: int
    num_short: int  # Requests that finished with fewer tokens than asked for.
    errors: dict[str, int]
    arrivals_s: float  # Seconds in which the requests arrived.
    seconds: float  # From the first request sent to the last answer; rates of tokens are over it.
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    e2e_ms: Percentiles
    late_ms: Percentiles
    prompt_tokens: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    cached_tokens: int | None  # None if the server's usage does not say.
    # What an endless cache, cold at the start, could save; None if unknown.
    shareable_tokens: int | None
    client_cpu_share: float
    circumstances: Json = {}

    @property
    def rate(self) -> float:
        """Requests per second: the rate asked for, or else the mean of those that arrived."""
        if self.settings.rate is not None:
            return self.settings.rate
        return self.num_requests / self.arrivals_s

    @property
    def warnings(self) -> list[str]:
        """Sentences about what makes these figures doubtful."""
        found = []
        late = self.late_ms["p99"]
        if late is not None and late > LATE_MS:
            found.append(
                f"requests were sent late, p99 {late:,.0f} ms: the client was busy, or --clients "
                "held them back"
            )
        cached, shareable = self.cached_tokens, self.shareable_tokens
        if cached is not None and shareable is not None and cached > shareable:
            found.append(
                f"{cached:,} prompt tokens were cached, but the window shares only {shareable:,}: "
                "the server had seen this window before; give another --salt"
            )
        if self.num_short:
            found.append(f"{self.num_short} answers ended early: does the server know ignore_eos?")
        return found


class Run(msgspec.Struct, frozen=True):
    """One window that was replayed to its end."""

    result: WindowResult
    records: list[RequestRecord]

    def judged(self, promises: Promises) -> "Run":
        """Returns the same answers, measured by other promises."""
        changed = judgement(self.records, promises, self.result.arrivals_s)
        result = msgspec.structs.replace(self.result, promises=promises, **changed)
        return Run(result, self.records)


def judgement(records: Sequence[RequestRecord], promises: Promises, arrivals_s: float) -> Json:
    """Returns the fields of a WindowResult that follow from the promises.

    Refused and failed requests keep none. The requests arrived within arrivals_s seconds.
    """
    num_attained = sum(record.keeps(promises) for record in records)
    return {
        "num_attained": num_attained,
        "attainment": round(num_attained / len(records), 6),
        "goodput_per_s": round(num_attained / max(arrivals_s, SHORTEST_S), 4),
    }


def record_of(
    outcome: Outcome, *, index: int, at_s: float, late_s: float, input_tokens: int, asked: int
) -> RequestRecord:
    """Returns the record of one outcome. `input_tokens` is 0 if only the server's usage says it."""
    done = outcome.error is None
    status: Status = "finished" if done else "failed"
    if outcome.status == TOO_MANY:
        status = "refused"
    tpot = outcome.tpot if done else None
    return RequestRecord(
        index=index,
        at_s=round(at_s, 4),
        late_ms=round(late_s * 1e3, 3),
        input_tokens=input_tokens or outcome.prompt_tokens or 0,
        asked_tokens=asked,
        output_tokens=outcome.num_tokens,
        status=status,
        ttft_ms=round(outcome.ttft * 1e3, 3) if outcome.arrivals else None,
        tpot_ms=None if tpot is None else round(tpot * 1e3, 4),
        e2e_ms=round((outcome.ended_at - outcome.sent_at) * 1e3, 3) if done else None,
        cached_tokens=outcome.cached_tokens,
        error=outcome.error,
    )


def summary(
    records: Sequence[RequestRecord], itls: Sequence[float], seconds: float, arrivals_s: float
) -> Json:
    """Returns the fields of a WindowResult that follow from its requests, except those of promises.

    `itls` are the seconds between tokens of finished requests.
    """
    finished = [record for record in records if record.status == "finished"]
    prompt_tokens = sum(record.input_tokens for record in finished)
    output_tokens = sum(record.output_tokens for record in finished)
    cached = [r.cached_tokens for r in finished if r.cached_tokens is not None]
    statuses = Counter(record.status for record in records)
    errors = Counter(record.error for record in records if record.error is not None)
    return {
        "num_requests": len(records),
        "num_finished": len(finished),
        "num_refused": statuses["refused"],
        "num_failed": statuses["failed"],
        "num_short": sum(record.output_tokens < record.asked_tokens for record in finished),
        "errors": dict(errors.most_common(10)),
        "arrivals_s": max(round(arrivals_s, 4), SHORTEST_S),
        "seconds": round(seconds, 3),
        "ttft_ms": _of_ms(record.ttft_ms for record in finished),
        "tpot_ms": _of_ms(record.tpot_ms for record in finished),
        "itl_ms": percentiles(itls, POINTS),
        "e2e_ms": _of_ms(record.e2e_ms for record in finished),
        "late_ms": _of_ms(record.late_ms for record in records),
        "prompt_tokens": prompt_tokens,
        "prompt_tokens_per_s": round(prompt_tokens / seconds, 1),
        "output_tokens_per_s": round(output_tokens / seconds, 1),
        "cached_tokens": sum(cached) if cached else None,
    }


def _of_ms(values: Iterable[float | None]) -> Percentiles:
    return percentiles([value / 1e3 for value in values if value is not None], POINTS)


class Limit(msgspec.Struct, frozen=True):
    """The highest rate (requests per second) at which the wanted share keeps both promises.

    `rate` is None if not even the lowest measured rate does. `at_least` means that the highest
    measured rate still does, so the limit lies above it.
    """

    rate: float | None
    at_least: bool = False

    def __str__(self) -> str:
        if self.rate is None:
            return "below the lowest rate"
        return (
            f"at least {self.rate:g} requests/s" if self.at_least else f"{self.rate:.2f} requests/s"
        )


def limit(results: Sequence[WindowResult], wanted: float) -> Limit:
    """Interpolates between the last rate that attains `wanted` (a share) and the first that does
    not.

    Rates ascend: a higher rate that attains it again, by chance, is ignored. Raises ValueError if
    there are no results.
    """
    if not results:
        raise ValueError("no window was replayed: there is no rate to choose from")
    below: WindowResult | None = None
    for result in sorted(results, key=lambda result: result.rate):
        if result.attainment < wanted:
            if below is None:
                return Limit(None)
            share = (below.attainment - wanted) / (below.attainment - result.attainment)
            return Limit(below.rate + share * (result.rate - below.rate))
        below = result
    assert below is not None
    return Limit(below.rate, at_least=True)
