"""Traces over fake workers, as receivers built from opentelemetry-proto get them: complete trees
whatever happens to a call, and nothing that a client would notice."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from prometheus_client import CollectorRegistry, Counter
from router.fake_worker import FakeWorker
from router.harness import MODEL, Harness, until
from support.ports import free_port
from support.trace_receivers import Received, Receiver, grpc_receiver, http_receiver

from pdserve.configs.traces import TracesConfig
from pdserve.protocol.events import Arrived, Delta, Event, LegTimes
from pdserve.router.request.traces.call_trace import CallTrace, TraceContext
from pdserve.router.request.traces.export_queue import ExportQueue, Take
from pdserve.router.request.traces.settings import MAX_CALLS, check_traces, settings_of

ROOT = f"text_completion {MODEL}"
BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": list(range(10, 30)),
    "max_tokens": 8,
    "seed": 7,
    "ignore_eos": True,
    "temperature": 0.5,
}
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = CLIENT[:-1] + "0"
TIMES = LegTimes(0.004, 0.002, 0.008, 0.009)
Start = Callable[..., Awaitable[Harness]]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_SERVICE_NAME", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture(scope="module")
def shared() -> Iterator[Receiver]:
    with grpc_receiver() as running:
        yield running


@pytest.fixture
def receiver(shared: Receiver) -> Receiver:
    shared.spans.clear()
    shared.headers.clear()
    return shared


def told(events: list[Event]) -> list[Event]:
    """As a worker tells it: times with the last token of each choice, and what it pulled."""
    handed = any(type(event).__name__ == "Handoff" for event in events)

    def one(event: Event) -> Event:
        if isinstance(event, Delta) and (event.finish_reason or handed):
            return msgspec.structs.replace(event, times=TIMES)
        if isinstance(event, Arrived) and event.source == "p2p":
            return msgspec.structs.replace(
                event, num_bytes=4096, transport="tcp", seconds=0.003, wait_s=0.001, lag_s=0.0005
            )
        return event

    return [one(event) for event in events]


@pytest.fixture
def start(make: Callable[..., Harness], receiver: Receiver) -> Start:
    """Returns start(num_prefill, num_decode, **RouterConfig fields, traces=...), which returns a
    Harness that is traced to the receiver, with workers that take 10 ms per step."""

    async def started(num_prefill: int, num_decode: int, **config: Any) -> Harness:
        config = {"traces": {"endpoint": receiver.url}, **config}
        harness = await make(num_prefill, num_decode, **config).start()
        for worker in harness.world.workers.values():
            worker.mangle = told
            worker.step_s = 0.01
        return harness

    return started


async def complete(harness: Harness, headers: dict[str, str] | None = None, **more: Any) -> int:
    http = harness.http()
    answer = await http.post("/v1/completions", json=BODY | more, headers=headers)
    return answer.status_code


def tree(trace: list[Received]) -> list[str]:
    """The paths, in the order of the starts."""
    return [" / ".join(received.path[1:]) for received in trace]


def named(trace: list[Received], *path: str) -> Received:
    [found] = [received for received in trace if received.path[1:] == path]
    return found


async def counted(harness: Harness, result: str, least: float = 1.0) -> float:
    counter = harness.service.metrics.traces.labels(result)

    def value() -> float:
        return counter._value.get()

    await until(lambda: value() >= least)
    return value()


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_a_split_request_is_one_tree(
    start: Start, receiver: Receiver, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-secret=s3cret")
    with http_receiver() as over_http:
        to = receiver if protocol == "grpc" else over_http
        harness = await start(1, 1, traces={"endpoint": to.url, "protocol": protocol})
        before = time.time_ns()
        assert await complete(harness, {"x-request-id": "r7"}) == 200
        trace = await to.trace()
        assert await counted(harness, "exported") == 1
    assert tree(trace) == [
        "",
        "admission",
        "prefill leg",
        "prefill leg / queue",
        "prefill leg / prefill",
        "prefill leg / hand-off",
        "decode leg",
        "decode leg / queue",
        "decode leg / queue / kv p2p",
        "decode leg / prefill",
        "decode leg / decode",
    ]
    root = trace[0]
    assert root.span.name == ROOT and root.span.parent_span_id == b""
    began, ended = root.span.start_time_unix_nano, root.span.end_time_unix_nano
    assert before <= began and ended <= time.time_ns()
    assert ended - began > 80e6, "eight steps"
    has = root.has
    assert has.pop("gen_ai.latency.time_to_first_token") >= 0.01
    assert has.pop("gen_ai.latency.e2e") >= 0.08
    assert has.pop("gen_ai.response.id") == "cmpl-r7"
    assert has.pop("gen_ai.request.id").startswith("cmpl-r7-")
    assert has == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "pdserve",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.seed": 7,
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.usage.prompt_tokens": 20,
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.latency.time_in_queue": pytest.approx(0.008),
        "gen_ai.latency.time_in_model_prefill": pytest.approx(0.004),
        "gen_ai.latency.time_in_model_decode": pytest.approx(0.016),
        "gen_ai.latency.time_in_model_inference": pytest.approx(0.02),
        "pdserve.outcome": "ok",
        "pdserve.failovers": 0,
    }
    assert root.events == ["first token"] and root.span.status.code == Status.STATUS_CODE_UNSET
    p, d = named(trace, "prefill leg"), named(trace, "decode leg")
    assert (p.has["pdserve.worker.id"], d.has["pdserve.worker.id"]) == ("p0", "d0")
    assert (p.has["pdserve.leg.end"], d.has["pdserve.leg.end"]) == ("handed over", "finished")
    first = root.span.events[0].time_unix_nano
    assert p.span.start_time_unix_nano < first <= d.span.start_time_unix_nano
    assert_in_order(trace, "prefill leg", "queue", "prefill", "hand-off")
    assert_in_order(trace, "decode leg", "queue", "prefill", "decode")
    moved = named(trace, "decode leg", "queue", "kv p2p").has
    assert (moved["pdserve.kv.bytes"], moved["pdserve.kv.transport"]) == (4096, "tcp")
    assert root.resource["service.name"] == "pdserve"
    assert root.resource["service.instance.id"] == harness.fleet.router_id
    assert to.headers[0]["x-secret"] == "s3cret"


def assert_in_order(trace: list[Received], leg: str, *names: str) -> None:
    spans = [named(trace, leg, name).span for name in names]
    for before, after in pairwise(spans):
        assert before.end_time_unix_nano <= after.start_time_unix_nano


async def test_lengths_of_workers_are_kept(start: Start, receiver: Receiver) -> None:
    """Where they fit into the leg as the router saw it."""
    assert await complete(await start(0, 1)) == 200
    trace = await receiver.trace()
    lengths = {
        received.span.name: received.span.end_time_unix_nano - received.span.start_time_unix_nano
        for received in trace
        if received.path[1:2] == ("full leg",)
    }
    del lengths["full leg"]
    assert lengths == {"queue": 4e6, "prefill": 2e6, "decode": 8e6}


async def test_a_prepared_leg_begins_before_its_submit(
    start: Start, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeWorker, "parts_from", 5)
    assert await complete(await start(1, 1)) == 200
    trace = await receiver.trace()
    d = named(trace, "decode leg")
    p = named(trace, "prefill leg")
    assert d.events == ["submitted"]
    queue = named(trace, "decode leg", "queue").span
    assert queue.start_time_unix_nano == d.span.events[0].time_unix_nano
    hand_off = named(trace, "prefill leg", "hand-off").span
    assert d.span.start_time_unix_nano < hand_off.start_time_unix_nano
    assert queue.start_time_unix_nano == hand_off.start_time_unix_nano
    assert hand_off.end_time_unix_nano == p.span.end_time_unix_nano


async def test_a_failover_is_one_complete_trace(start: Start, receiver: Receiver) -> None:
    harness = await start(1, 2)

    def die_at_the_third_token(number: int) -> None:
        busy = next((d for d in harness.decodes if d.submits() and d.num_batches >= 3), None)
        if busy is not None and all(d.alive for d in harness.decodes):
            busy.die()

    for worker in harness.decodes:
        worker.before_batch = die_at_the_third_token
    assert await complete(harness) == 200
    trace = await receiver.trace()
    assert tree(trace) == [
        "",
        "admission",
        "prefill leg",
        "prefill leg / queue",
        "prefill leg / prefill",
        "prefill leg / hand-off",
        "decode leg",
        "decode leg / kv p2p",
        "full leg",
        "full leg / queue",
        "full leg / prefill",
        "full leg / decode",
    ]
    root, lost, again = trace[0], named(trace, "decode leg"), named(trace, "full leg")
    assert root.span.status.code == Status.STATUS_CODE_UNSET, "the client saw nothing"
    assert root.events == ["first token", "failover"] and root.has["pdserve.failovers"] == 1
    assert lost.has["pdserve.leg.end"] == "lost" and not lost.has["pdserve.leg.complete"]
    assert lost.span.status.code == Status.STATUS_CODE_ERROR and lost.span.status.message
    assert lost.has["error.type"] == "worker_lost"
    assert {lost.has["pdserve.worker.id"], again.has["pdserve.worker.id"]} == {"d0", "d1"}
    assert lost.span.end_time_unix_nano <= root.span.events[1].time_unix_nano
    assert root.span.events[1].time_unix_nano <= again.span.start_time_unix_nano


async def test_a_failed_pull_is_an_error_of_its_span(start: Start, receiver: Receiver) -> None:
    harness = await start(1, 1)

    def fail(events: list[Event]) -> list[Event]:
        failed = {
            "source": "recompute",
            "reason": "peer-lost",
            "detail": "no route",
            "seconds": 0.002,
        }
        return [
            msgspec.structs.replace(event, **failed) if isinstance(event, Arrived) else event
            for event in told(events)
        ]

    harness.decodes[0].mangle = fail
    assert await complete(harness) == 200
    trace = await receiver.trace()
    pull = named(trace, "decode leg", "queue", "kv recompute")
    assert pull.span.status.message == "peer-lost: no route"
    assert pull.has["error.type"] == "peer-lost"
    assert trace[0].span.status.code == Status.STATUS_CODE_UNSET


async def test_prompts_of_one_call_are_one_trace(start: Start, receiver: Receiver) -> None:
    harness = await start(0, 1)
    assert await complete(harness, prompt=[[5, 6, 7], [8, 9]], n=2) == 200
    trace = await receiver.trace()
    prompts = [received for received in trace if received.path[1:] == ("prompt",)]
    assert [(p.has["pdserve.prompt"], p.has["gen_ai.usage.input_tokens"]) for p in prompts] == [
        (0, 3),
        (1, 2),
    ]
    legs = [received for received in trace if received.path[1:] == ("prompt", "full leg")]
    assert {leg.span.parent_span_id for leg in legs} == {p.span.span_id for p in prompts}
    has = trace[0].has
    assert (has["gen_ai.usage.input_tokens"], has["gen_ai.usage.output_tokens"]) == (5, 32)
    assert has["gen_ai.response.finish_reasons"] == ["length"] * 4 and has["pdserve.prompts"] == 2


async def test_the_clients_trace_goes_on(start: Start, receiver: Receiver) -> None:
    harness = await start(0, 1)
    headers = {"traceparent": CLIENT, "tracestate": "vendor=1"}
    assert await complete(harness, headers) == 200
    trace = await receiver.trace()
    root = trace[0].span
    assert root.trace_id.hex() == CLIENT.split("-")[1]
    assert root.parent_span_id.hex() == CLIENT.split("-")[2]
    assert {received.span.trace_state for received in trace} == {"vendor=1"}


async def test_who_is_traced(
    make: Callable[..., Harness], start: Start, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls follow their client's sampled flag; of others the ratio counts, or the environment.

    An invalid traceparent counts as none.
    """

    async def roots(harness: Harness) -> list[str]:
        receiver.spans.clear()
        for parent in (NOT_SAMPLED, CLIENT, "00-0-0-01", None):
            headers = {} if parent is None else {"traceparent": parent}
            assert await complete(harness, headers, max_tokens=1) == 200
        tracer = harness.service.tracer
        assert tracer is not None
        await asyncio.to_thread(tracer.close)
        return [
            received.span.parent_span_id.hex()
            for received in receiver.spans
            if received.span.kind == Span.SPAN_KIND_SERVER
        ]

    child = CLIENT.split("-")[2]
    assert await roots(await start(0, 1)) == [child, "", ""]
    to = {"endpoint": receiver.url}
    assert await roots(await start(0, 1, traces=to | {"sample_ratio": 0.0})) == [child]
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    assert await roots(await start(0, 1)) == [child]
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    assert len(await roots(await start(0, 1))) == 4


async def test_the_environment_says_what_the_file_does_not(
    start: Start, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    assert await complete(await start(0, 1, traces={"enabled": True})) == 200
    resource = (await receiver.trace())[0].resource
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("mine", "test")
    receiver.spans.clear()
    with http_receiver() as over_http:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", over_http.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        harness = await start(0, 1, traces={"enabled": True, "service_name": "other"})
        assert await complete(harness) == 200
        assert (await over_http.trace())[0].resource["service.name"] == "other"
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert (await start(0, 1, traces={"enabled": True})).service.tracer is None


async def test_the_client_leaves(start: Start, receiver: Receiver) -> None:
    harness = await start(1, 1)
    harness.decodes[0].step_s = 0.05
    asking = asyncio.create_task(complete(harness))
    await until(lambda: bool(harness.decodes[0].submits()))
    asking.cancel()
    trace = await receiver.trace()
    root = trace[0]
    assert root.has["pdserve.outcome"] == root.has["error.type"] == "cancelled"
    assert root.span.status.code == Status.STATUS_CODE_ERROR
    assert root.events[-1] == "cancelled"
    assert named(trace, "decode leg").has["pdserve.leg.end"] == "cancelled"


async def test_a_hopeless_call(start: Start, receiver: Receiver) -> None:
    harness = await start(0, 1, max_attempts=2)
    harness.decodes[0].fail_submit = lambda submit: "internal"
    assert await complete(harness) == 500
    trace = await receiver.trace()
    root = trace[0]
    assert tree(trace) == ["", "admission", "full leg", "full leg"]
    assert root.has["error.type"] == "internal" and root.events == ["failover"]
    assert root.span.status.code == Status.STATUS_CODE_ERROR
    assert root.has["gen_ai.response.finish_reasons"] == ["error"]


@pytest.mark.parametrize(
    ("more", "config", "status", "reason"),
    [
        ({"max_tokens": 10**6}, {}, 400, "context_length_exceeded"),
        ({"stream": 7}, {}, 400, "invalid_request_error"),
        ({}, {"max_concurrent_prompts": 1}, 429, "too_many_concurrent_prompts"),
    ],
)
async def test_a_refused_call_is_a_root_alone(
    start: Start,
    receiver: Receiver,
    more: dict[str, Any],
    config: dict[str, Any],
    status: int,
    reason: str,
) -> None:
    harness = await start(0, 1, **config)
    seats = harness.service.admission.enter(1) if status == 429 else []
    assert await complete(harness, **more) == status
    for seat in seats:
        seat.leave()
    [root] = await receiver.trace()
    has = root.has
    assert (has["pdserve.outcome"], has["http.response.status_code"]) == ("refused", status)
    assert has["error.type"] == root.span.status.message == reason


async def test_no_text_of_a_client_is_exported(start: Start, receiver: Receiver) -> None:
    harness = await start(0, 1)
    more: dict[str, Any] = {
        "prompt": "zebra quagga",
        "stop": ["okapi"],
        "user": "tapir",
        "ignore_eos": False,
    }
    assert await complete(harness, {"authorization": "Bearer gnu-key"}, **more) == 200
    assert await complete(harness, **(more | {"guided_regex": "lemur("})) == 400
    trace = [received for one in await receiver.traces(2) for received in one]
    shown = "".join(str(received.span) for received in trace)
    assert not [w for w in ("zebra", "okapi", "tapir", "gnu", "lemur") if w in shown]


async def test_streams_end_with_their_last_byte(start: Start, receiver: Receiver) -> None:
    harness = await start(1, 1)
    body = BODY | {"stream": True}
    assert (await harness.http().post("/v1/completions", json=body)).status_code == 200
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert (await harness.http().post("/v1/chat/completions", json=chat)).status_code == 200
    names = {trace[0].span.name for trace in await receiver.traces(2)}
    assert names == {ROOT, f"chat {MODEL}"}


# --- a receiver that is away ---


async def test_without_a_receiver_calls_are_answered_and_counted(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "3")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    harness = await start(0, 1, traces={"endpoint": f"http://127.0.0.1:{free_port()}"})
    for worker in harness.decodes:
        worker.step_s = 0.0
    statuses = await asyncio.gather(*(complete(harness, max_tokens=1) for _ in range(20)))
    assert statuses == [200] * 20
    await counted(harness, "dropped")
    await counted(harness, "failed")
    tracer = harness.service.tracer
    assert tracer is not None
    began = time.monotonic()
    await asyncio.to_thread(tracer.close)
    assert time.monotonic() - began < 8, "a bound for the flush"
    dropped = await counted(harness, "dropped")
    failed = await counted(harness, "failed")
    assert dropped + failed == 20 and await counted(harness, "exported", 0) == 0
    page = (await harness.http().get("/metrics")).text
    assert f'pdserve_router_traces_total{{result="dropped"}} {dropped}' in page


async def test_a_receiver_that_comes_back_gets_what_waited(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3")
    port = free_port()
    harness = await start(0, 1, traces={"endpoint": f"http://127.0.0.1:{port}"})
    assert await complete(harness) == 200
    assert await counted(harness, "failed") == 1
    with grpc_receiver(port) as late:
        while not late.spans:
            assert await complete(harness) == 200
    text = [record.message for record in caplog.records if "pdserve" in record.name]
    assert sum("cannot be exported" in line for line in text) == 1, "said once"


async def test_what_waits_is_flushed_at_the_end(
    start: Start, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    harness = await start(0, 1)
    assert await complete(harness) == 200
    assert receiver.spans == []
    tracer = harness.service.tracer
    assert tracer is not None
    await asyncio.to_thread(tracer.close)
    assert len(receiver.spans) == 6
    assert await complete(harness) == 200
    assert await counted(harness, "dropped") == 1


def test_a_receiver_that_hangs_holds_nobody_at_the_end() -> None:
    """Nor does it take calls beyond the limit."""
    counter = Counter("traces", "", ["result"], registry=CollectorRegistry())
    hangs, begun = threading.Event(), threading.Event()

    def send(take: Take) -> bool:
        while take() is not None:
            pass
        begun.set()
        return not hangs.wait(60)

    queue = ExportQueue(send, hangs.set, counter, limit=2, delay_s=600.0, wake_at=1)
    context = TraceContext(1, None)
    calls = [CallTrace(context, "chat", f"r{i}", 0.0, queue.put) for i in range(5)]
    calls[0].close()
    assert begun.wait(60)
    for call in calls[1:]:
        call.close()
    began = time.monotonic()
    queue.close(0.1)
    assert time.monotonic() - began < 5
    counts = {r: counter.labels(r)._value.get() for r in ("exported", "failed", "dropped")}
    assert counts["exported"] == 0 and counts["dropped"] >= 2
    assert counts["failed"] + counts["dropped"] == 5


# --- off ---

OFF = """
import asyncio, sys
from pdserve.configs.router import RouterConfig
from pdserve.configs.traces import TracesConfig
from pdserve.plan.simulation.paper_tokenizer import PaperTokenizer
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.http.app import build_app
from pdserve.router.request.service import Service
import threading
def threads():
    return {thread.name for thread in threading.enumerate()}
def make(traces):
    return Service(Fleet(), PaperTokenizer(), RouterConfig(), "m", traces=traces)
async def run():
    before = threads()
    service = make(TracesConfig())
    build_app(service.fleet, service.tokenizer, RouterConfig(), "m", service)
    assert service.tracer is None and threads() == before
    assert not [name for name in sys.modules if name.startswith(("opentelemetry", "grpc"))]
    tracer = make(TracesConfig(enabled=True)).tracer
    assert "trace export" in threads() and "opentelemetry.sdk.trace" in sys.modules
    tracer.close()
asyncio.run(run())
"""


@pytest.mark.processes
def test_off_by_default_nothing_of_it_is_imported() -> None:
    subprocess.run([sys.executable, "-c", OFF], check=True, timeout=300)


async def test_off_a_traceparent_is_ignored(make: Callable[..., Harness]) -> None:
    harness = await make(0, 1).start()
    assert harness.service.tracer is None
    assert await complete(harness, {"traceparent": CLIENT}) == 200


# --- settings ---


def test_what_is_asked_for() -> None:
    assert settings_of(TracesConfig(), {}) is None
    assert settings_of(TracesConfig(enabled=False, endpoint="http://c:4317"), {}) is None
    assert settings_of(TracesConfig(enabled=True), {"OTEL_SDK_DISABLED": "TRUE"}) is None
    settings = settings_of(TracesConfig(endpoint="http://c:4317"), {})
    assert settings is not None
    assert (settings.protocol, settings.max_calls, settings.delay_s) == ("grpc", MAX_CALLS, 5.0)
    both = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"} | {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"
    }
    settings = settings_of(TracesConfig(enabled=True), both)
    assert settings is not None and settings.protocol == "http/protobuf"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL must be grpc"),
        (
            {"OTEL_BSP_MAX_QUEUE_SIZE": "0"},
            "OTEL_BSP_MAX_QUEUE_SIZE must be a number of at least 1",
        ),
        ({"OTEL_BSP_SCHEDULE_DELAY": "soon"}, "OTEL_BSP_SCHEDULE_DELAY must be .* not 'soon'"),
    ],
)
def test_settings_that_cannot_be(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_traces(TracesConfig(enabled=True), environment)
    check_traces(TracesConfig(), environment)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_missing_library_says_what_to_install(
    protocol: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(module: str) -> None:
        raise ModuleNotFoundError(module)

    monkeypatch.setattr("importlib.util.find_spec", gone)
    package = f"opentelemetry-exporter-otlp-proto-{protocol.partition('/')[0]}"
    with pytest.raises(ValueError, match=f"pip install opentelemetry-sdk {package}"):
        check_traces(TracesConfig(enabled=True, protocol=protocol), {})
    check_traces(TracesConfig(), {})
