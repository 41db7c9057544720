"""Speaks to OpenTelemetry's library: the client's trace context, sampling, and the export of spans
by OTLP over gRPC or HTTP. No other file knows the library.

Changes nothing that is global in the library, so a program around this router may use it freely.
OpenTelemetry's environment variables fill in what the configuration leaves open. Imported only by
`traces.start`, when traces are asked for.
"""

import logging
import time
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import (
    ParentBased,
    Sampler,
    TraceIdRatioBased,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import Status, StatusCode
from prometheus_client import Counter

import pdserve
from pdserve.configs.traces import TracesConfig
from pdserve.router.request.traces.call_trace import CallTrace, TraceContext
from pdserve.router.request.traces.export_queue import ExportQueue, Take
from pdserve.router.request.traces.settings import Settings
from pdserve.router.request.traces.spans import Span, spans_of

TRACES_PATH = "/v1/traces"  # path at an HTTP receiver whose URL has none
SAMPLED = TraceFlags(TraceFlags.SAMPLED)

logger = logging.getLogger(__name__)


class OtlpTracer:
    """Traces the calls of one router; implements `traces.call_trace.Tracer`."""

    def __init__(
        self, config: TracesConfig, settings: Settings, model: str, router_id: str, counter: Counter
    ) -> None:
        """Raises ValueError if the environment's settings are impossible.

        `counter` counts calls by result.
        """
        self._model = model
        self._propagator = TraceContextTextMapPropagator()
        self._ids = RandomIdGenerator()
        self._sampler = sampler_of(config)
        self._exporter = exporter_of(config, settings)
        self._resource = resource_of(config, router_id)
        self._scope = InstrumentationScope("pdserve", pdserve.__version__)
        self._max_spans = settings.max_spans
        self._receiver = f"{config.endpoint or 'endpoint by environment'}, {settings.protocol}"
        self._failing = False
        self._queue = ExportQueue(
            self._send,
            self._exporter.shutdown,
            counter,
            limit=settings.max_calls,
            delay_s=settings.delay_s,
            wake_at=max(1, settings.max_spans // 10),
        )

    def begin(
        self,
        operation: str,
        name: str,
        received: float,
        traceparent: str | None,
        tracestate: str | None,
    ) -> CallTrace | None:
        parent = None
        if traceparent is not None:
            carrier = {"traceparent": traceparent}
            if tracestate is not None:
                carrier["tracestate"] = tracestate
            parent = self._propagator.extract(carrier)
        client = get_current_span(parent).get_span_context() if parent is not None else None
        is_child = client is not None and client.is_valid
        trace_id = client.trace_id if client and is_child else self._ids.generate_trace_id()
        sampled = self._sampler.should_sample(
            parent if parent is not None and is_child else Context(),
            trace_id,
            operation,
            SpanKind.SERVER,
        )
        if not sampled.decision.is_sampled():
            return None
        parent_id = client.span_id if client and is_child else None
        context = TraceContext(trace_id, parent_id, sampled.trace_state)
        return CallTrace(context, operation, name, received, self._queue.put)

    def close(self) -> None:
        self._queue.close()

    def _send(self, take: Take) -> bool:
        """Sends one batch; True if it arrived."""
        spans: list[ReadableSpan] = []
        while len(spans) < self._max_spans and (call := take()) is not None:
            spans += self.readable(call)
            time.sleep(0)  # gives the event loop a turn
        arrived = self._exporter.export(spans) is SpanExportResult.SUCCESS
        if arrived == self._failing:
            self._failing = not arrived
            if arrived:
                logger.info("traces are exported again")
            else:
                logger.warning(
                    "traces cannot be exported (%s): they are dropped until the receiver takes "
                    "them again",
                    self._receiver,
                )
        return arrived

    def readable(self, call: CallTrace) -> list[ReadableSpan]:
        """Returns the library's spans of one call."""
        context = call.context
        contexts: dict[int, SpanContext] = {}
        state = context.state if isinstance(context.state, TraceState) else None

        def new_context(span_id: int, is_remote: bool = False) -> SpanContext:
            return SpanContext(context.trace_id, span_id, is_remote, SAMPLED, state)

        def moment_ns(moment: float) -> int:
            return call.epoch_ns + round(moment * 1e9)

        client = None if context.parent_id is None else new_context(context.parent_id, True)
        made = []
        for span in spans_of(call, self._model):
            own = contexts[id(span)] = new_context(self._ids.generate_span_id())
            made.append(
                ReadableSpan(
                    span.name,
                    own,
                    client if span.parent is None else contexts[id(span.parent)],
                    self._resource,
                    span.attributes,
                    [Event(e.name, e.attributes, moment_ns(e.at)) for e in span.events],
                    kind=SpanKind.SERVER if span.parent is None else SpanKind.INTERNAL,
                    status=_status(span),
                    start_time=moment_ns(span.start),
                    end_time=moment_ns(max(span.start, span.end)),
                    instrumentation_scope=self._scope,
                )
            )
        return made


def _status(span: Span) -> Status:
    return Status() if span.error is None else Status(StatusCode.ERROR, span.error)


def sampler_of(config: TracesConfig) -> Sampler:
    """Returns the sampler: it follows a traceparent's sampled flag, and of calls without a
    traceparent it samples a share."""
    if config.sample_ratio is not None:
        return ParentBased(TraceIdRatioBased(config.sample_ratio))
    # By OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG.
    return TracerProvider(shutdown_on_exit=False, resource=Resource.get_empty()).sampler


def resource_of(config: TracesConfig, router_id: str) -> Resource:
    """Returns the resource; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES fill what is open."""
    given = {"service.version": pdserve.__version__, "service.instance.id": router_id}
    if config.service_name is not None:
        given["service.name"] = config.service_name
    made = Resource.create(given)
    if str(made.attributes["service.name"]).startswith("unknown_service"):
        made = made.merge(Resource({"service.name": "pdserve"}))
    return made


def exporter_of(config: TracesConfig, settings: Settings) -> SpanExporter:
    """Returns the library's exporter.

    It reads headers, certificates, compression and timeout from the environment.
    """
    endpoint = config.endpoint
    if endpoint is not None and endpoint.startswith("grpc://"):
        endpoint = "http" + endpoint.removeprefix("grpc")
    if settings.protocol == "grpc":  # one of the two may not be installed
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcExporter,
        )

        return GrpcExporter(endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
        OTLPSpanExporter as HttpExporter,
    )

    if endpoint is not None:
        parts = urlsplit(endpoint)
        if parts.path in ("", "/"):
            endpoint = urlunsplit(parts._replace(path=TRACES_PATH))
    return HttpExporter(endpoint)
