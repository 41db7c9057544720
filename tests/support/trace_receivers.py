"""Receivers of OTLP traces, over gRPC and over HTTP, built from opentelemetry-proto: what a
collector is to a router.

They keep every span that they were sent, with its resource, and answer as OTLP says.
"""

import gzip
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from support.waiting import until_async


def value_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


def attributes(of: Any) -> dict[str, Any]:
    pairs: list[KeyValue] = of.attributes
    assert len({pair.key for pair in pairs}) == len(pairs)
    return {pair.key: value_of(pair.value) for pair in pairs}


@dataclass
class Received:
    """One span. path: of its name and all its parents' names, from the root."""

    span: Span
    resource: dict[str, Any]
    path: tuple[str, ...] = ()

    @property
    def has(self) -> dict[str, Any]:
        return attributes(self.span)

    @property
    def events(self) -> list[str]:
        return [event.name for event in self.span.events]


@dataclass
class Receiver:
    """Receives traces. `headers` are those of every message, with lower-case names."""

    url: str = ""
    spans: list[Received] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def take(self, request: ExportTraceServiceRequest, headers: Mapping[str, str]) -> None:
        self.headers.append({name.lower(): value for name, value in headers.items()})
        for resource_spans in request.resource_spans:
            resource = attributes(resource_spans.resource)
            for scope_spans in resource_spans.scope_spans:
                assert scope_spans.scope.name == "pdserve"
                self.spans += [Received(span, resource) for span in scope_spans.spans]

    async def trace(self, num_traces: int = 1) -> list[Received]:
        """The spans of the only trace, in the order of their starts, once so many roots are
        here."""
        [trace] = await self.traces(num_traces)
        return trace

    async def traces(self, num_traces: int) -> list[list[Received]]:
        """Returns several traces.

        Every span must have its parent in the trace, or be the trace's root, and lie within its
        parent.
        """

        def there() -> bool:
            kinds = [received.span.kind for received in list(self.spans)]
            return kinds.count(Span.SPAN_KIND_SERVER) >= num_traces

        await until_async(there)
        found: dict[bytes, list[Received]] = {}
        for received in self.spans:
            found.setdefault(received.span.trace_id, []).append(received)
        for trace in found.values():
            check(trace)
            trace.sort(key=lambda received: received.span.start_time_unix_nano)
        return list(found.values())


def check(trace: list[Received]) -> None:
    """It is one tree, complete and nested in time; gives each span its path."""
    by_id = {received.span.span_id: received for received in trace}
    assert len(by_id) == len(trace), "two spans have one id"
    roots = [received for received in trace if received.span.kind == Span.SPAN_KIND_SERVER]
    assert len(roots) == 1, "one root in a trace"

    def path(received: Received) -> tuple[str, ...]:
        span = received.span
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
        moments = [event.time_unix_nano for event in span.events]
        assert sorted(moments) == moments
        assert all(span.start_time_unix_nano <= at <= span.end_time_unix_nano for at in moments)
        if received is roots[0]:
            return (span.name,)
        parent = by_id[span.parent_span_id]
        assert parent.span.start_time_unix_nano <= span.start_time_unix_nano, span.name
        assert span.end_time_unix_nano <= parent.span.end_time_unix_nano, span.name
        return (*path(parent), span.name)

    for received in trace:
        received.path = path(received)


class _Service(TraceServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        self._receiver.take(request, dict(context.invocation_metadata()))
        return ExportTraceServiceResponse()


@contextmanager
def grpc_receiver(port: int = 0) -> Iterator[Receiver]:
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(_Service(receiver), server)
    receiver.url = f"http://127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()


@contextmanager
def http_receiver() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            is_traces = self.path == "/v1/traces"
            if is_traces and self.headers["content-type"] == "application/x-protobuf":
                receiver.take(ExportTraceServiceRequest.FromString(body), dict(self.headers))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200 if is_traces else 404)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
