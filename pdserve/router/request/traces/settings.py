"""Reads OpenTelemetry's environment variables where the configuration leaves something open, and
checks that the library is there.

It does not import the library, which reads the other variables itself. Used by `traces.start`, by
`cluster.operate.checks` and by `cluster.app`.
"""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from pdserve.configs.traces import Protocol, TracesConfig

PACKAGES = {
    "grpc": "opentelemetry-exporter-otlp-proto-grpc",
    "http/protobuf": "opentelemetry-exporter-otlp-proto-http",
}
MAX_CALLS = 2048  # calls that may wait to be exported
# Spans per message. Encoding them takes the interpreter away from the event loop for 1.5 ms.
MAX_SPANS = 64
DELAY_S = 5.0

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the export."""

    protocol: Protocol
    # Calls that may wait for the receiver.
    max_calls: int
    # Spans per message; a message ends with a whole call.
    max_spans: int
    # Longest wait of a finished call before it is sent.
    delay_s: float


def settings_of(config: TracesConfig, environment: Environment = os.environ) -> Settings | None:
    """Returns the settings; None if traces are off. Raises ValueError naming a wrong variable."""
    disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if disabled or not config.wanted:
        return None
    return Settings(
        config.protocol or _protocol(environment),
        int(_number(environment, "OTEL_BSP_MAX_QUEUE_SIZE", MAX_CALLS)),
        int(_number(environment, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", MAX_SPANS)),
        _number(environment, "OTEL_BSP_SCHEDULE_DELAY", 1000 * DELAY_S) / 1000,
    )


def check_traces(config: TracesConfig, environment: Environment = os.environ) -> None:
    """Raises ValueError with the cure if traces are asked for and cannot be made."""
    settings = settings_of(config, environment)
    if settings is None:
        return
    kind = settings.protocol.partition("/")[0]
    missing = [
        package
        for module, package in (
            ("opentelemetry.sdk.trace", "opentelemetry-sdk"),
            (f"opentelemetry.exporter.otlp.proto.{kind}", PACKAGES[settings.protocol]),
        )
        if not _is_there(module)
    ]
    if missing:
        raise ValueError(
            f"traces need {' and '.join(missing)}: run `pip install {' '.join(missing)}` on every "
            "node that has routers, or leave out traces.endpoint and traces.enabled"
        )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _protocol(environment: Environment) -> Protocol:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if given := environment.get(name, "").strip():
            for known in get_args(Protocol):
                if given == known:
                    return known
            known = " or ".join(get_args(Protocol))
            raise ValueError(f"{name} must be {known}, not {given!r}; or set traces.protocol")
    return "grpc"


def _number(environment: Environment, name: str, default: float) -> float:
    given = environment.get(name, "").strip()
    if not given:
        return default
    try:
        number = float(given)
    except ValueError:
        number = 0.0
    if not 1 <= number < float("inf"):
        raise ValueError(f"{name} must be a number of at least 1, not {given!r}")
    return number
