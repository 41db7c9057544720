"""CPU time of looking: counting a token and a prompt, a request's log line, a /metrics page, the
bridge to Ray.

One process, no Ray cluster: the bridge's calls end in Ray's recorder, which sends nothing. What the
node's agent pays is in docs/metrics.md. Beside it, what a streamed token costs a bare uvicorn on
this machine.

    python -m benchmarks.router.observability
"""

import argparse
import asyncio
import json
import logging
import tempfile
import time
from collections.abc import Callable

from ray.util.metrics import Gauge

from benchmarks.support.yardstick import bare_us_per_token
from pdserve.configs.router import LogConfig
from pdserve.protocol.events import LegTimes
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.metrics import RouterMetrics
from pdserve.router.metrics_page import exposition
from pdserve.router.request.record import RequestRecord
from pdserve.router.request.request_clock import RequestClock
from pdserve.router.request.request_log import RequestLog
from pdserve.router.request.timeline import PromptTimeline, Timeline

REPEATS = 7


def cost_us(work: Callable[[], object], count: int) -> float:
    """CPU microseconds of one call; the best of several rounds."""
    best = float("inf")
    for _ in range(REPEATS):
        began = time.process_time()
        for _ in range(count):
            work()
        best = min(best, time.process_time() - began)
    return round(best / count * 1e6, 2)


def report() -> PromptTimeline:
    timeline = Timeline()
    for attempt, (role, phase) in enumerate((("prefill", "prefill"), ("decode", "decode"))):
        timeline.opened(attempt, f"{role}#1", role, phase)  # type: ignore[arg-type]
        timeline.submitted(attempt, 1.0)
        timeline.told(attempt, LegTimes(0.1, 0.1, 0.1, 0.1))
        timeline.ended(attempt, "finished", 2.0)
    return PromptTimeline(
        request_id="cmpl-x-0",
        prompt=0,
        outcome="ok",
        prompt_tokens=100,
        cached_tokens=0,
        generated_tokens=128,
        admission_s=0.001,
        first_token_s=0.05,
        total_s=1.0,
        transport_s=0.1,
        unreported_s=None,
        failovers=0,
        legs=timeline.legs(1.0),
    )


def log_line_us(form: str) -> float:
    """The report, the line's making and its writing to a file."""
    log = RequestLog("m", LogConfig.model_validate({"format": form}))
    ours = logging.getLogger("pdserve")
    with tempfile.NamedTemporaryFile("w") as file:
        handler = logging.FileHandler(file.name)
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
        cost = cost_us(lambda: log.ended(report(), ["length"], 0.005), 2000)
        ours.removeHandler(handler)
    return cost


async def measure() -> dict[str, float]:
    metrics = RouterMetrics("m")
    fleet = Fleet()
    record = RequestRecord(1)
    clock = RequestClock(metrics, 1, time.perf_counter())
    gauge = Gauge("pdserve_bench_seconds_bucket", "", ("le", "worker", "role"))

    def prompt() -> None:
        clock = RequestClock(metrics, 1, time.perf_counter())
        clock.begin(100)
        clock.end("ok", record)

    return {
        "token": cost_us(lambda: clock.accepted(0, 1), 100_000),
        "prompt": cost_us(prompt, 10_000),
        "log line, text": log_line_us("text"),
        "log line, json fields": log_line_us("json"),
        "page of a router without workers": cost_us(lambda: exposition(metrics, fleet), 50),
        "bridge, one series": cost_us(
            lambda: gauge.set(1.0, {"le": "1", "worker": "w", "role": "decode"}), 10_000
        ),
    }


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(json.dumps({"cpu_us": asyncio.run(measure()), "bare_us_per_token": bare_us_per_token()}))


if __name__ == "__main__":
    main()
