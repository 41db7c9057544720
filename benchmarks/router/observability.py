"""CPU time of observability: counting a token and a prompt, a request's log line, its trace, a
/metrics page, the bridge to Ray.

It runs in one process without a Ray cluster. The bridge's calls end in Ray's recorder, which sends
nothing. The cost for the node's agent is in docs/use/metrics.md. For comparison, it also prints
what a streamed token costs a bare uvicorn on this machine.

    python -m benchmarks.router.observability
"""

import argparse
import asyncio
import json
import logging
import tempfile
import time
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from prometheus_client import CollectorRegistry, Counter
from ray.util.metrics import Gauge

from benchmarks.support.yardstick import bare_us_per_token
from pdserve.configs.router import LogConfig
from pdserve.configs.traces import TracesConfig
from pdserve.protocol.events import LegTimes
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.metrics import RouterMetrics
from pdserve.router.metrics_page import exposition
from pdserve.router.request.record import RequestRecord
from pdserve.router.request.request_clock import RequestClock
from pdserve.router.request.request_log import RequestLog
from pdserve.router.request.timeline import PromptTimeline, Timeline
from pdserve.router.request.traces.call_trace import CallTrace, PromptEnd
from pdserve.router.request.traces.otlp import OtlpTracer
from pdserve.router.request.traces.settings import settings_of

REPEATS = 7


def cost_us(work: Callable[[], object], count: int) -> float:
    """Measures the CPU microseconds of one call, as the best of several rounds."""
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
    """Measures the report, making the log line, and writing it to a file."""
    log = RequestLog("m", LogConfig.model_validate({"format": form}))
    ours = logging.getLogger("pdserve")
    with tempfile.NamedTemporaryFile("w") as file:
        handler = logging.FileHandler(file.name)
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
        cost = cost_us(lambda: log.ended(report(), ["length"], 0.005), 2000)
        ours.removeHandler(handler)
    return cost


TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def trace_us() -> dict[str, float]:
    """Measures the trace of a split request, on the event loop and on the thread that exports.
    There is no receiver, so the network's time is left out."""
    config = TracesConfig(endpoint="http://127.0.0.1:1")
    settings = settings_of(config)
    assert settings is not None
    counter = Counter("pdserve_bench_traces", "", ["result"], registry=CollectorRegistry())
    tracer = OtlpTracer(config, settings, "m", "r", counter)
    tracer.close()  # from here on its thread takes no time
    sampling = SamplingParams()
    made = report()

    def trace(traceparent: str | None = TRACEPARENT) -> CallTrace:
        call = tracer.begin("chat", "r", time.perf_counter(), traceparent, None)
        assert call is not None
        call.admitted("cmpl-r", 1, sampling)
        call.began()
        call.close()
        call.prompt_ended(PromptEnd(made, time.perf_counter(), ("length",), ()))
        return call

    call = trace()
    spans = tracer.readable(call)
    return {
        "trace, event loop, its timeline": cost_us(report, 5000),
        "trace, event loop, the rest": cost_us(lambda: trace(None), 5000),
        "trace, event loop, the rest, with traceparent": cost_us(trace, 5000),
        "trace, thread, its spans": cost_us(lambda: tracer.readable(call), 1000),
        "trace, thread, OTLP": cost_us(lambda: encode_spans(spans).SerializeToString(), 1000),
    }


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
        **trace_us(),
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
