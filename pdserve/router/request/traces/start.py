"""Makes a router's tracer if its configuration asks for one. Only then is OpenTelemetry's library
imported.

Called by `router.request.service`.
"""

from prometheus_client import Counter

from pdserve.configs.traces import TracesConfig
from pdserve.router.request.traces.call_trace import Tracer
from pdserve.router.request.traces.settings import check_traces, settings_of


def start_tracer(
    config: TracesConfig, model: str, router_id: str, counter: Counter
) -> Tracer | None:
    """Returns the tracer, or None if traces are off.

    `counter` counts calls by result. Raises ValueError with the cure if the library is missing or a
    setting is impossible.
    """
    settings = settings_of(config)
    if settings is None:
        return None
    check_traces(config)
    from pdserve.router.request.traces.otlp import OtlpTracer

    return OtlpTracer(config, settings, model, router_id, counter)
