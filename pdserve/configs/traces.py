"""The configuration of traces: where routers send them, and how many (docs/use/traces.md).

Headers and certificates have no key here: the library reads them from OpenTelemetry's own
environment variables, so that no secret stands in a file.
"""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from pdserve.configs.base import Config

Protocol = Literal["grpc", "http/protobuf"]


class TracesConfig(Config):
    """OpenTelemetry traces of requests. OTEL_SDK_DISABLED=true turns them off everywhere."""

    enabled: bool | None = Field(
        None, description="Whether routers export traces; None: they do when endpoint is set."
    )
    endpoint: str | None = Field(
        None,
        description=(
            "URL of the receiver, as http://collector:4317; None: what OpenTelemetry's environment "
            "variables say, else this machine."
        ),
    )
    protocol: Protocol | None = Field(
        None,
        description=(
            "How spans travel; None: what OpenTelemetry's environment variables say, else grpc."
        ),
    )
    sample_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        description=(
            "Share of the calls without a traceparent header that are traced; None: what "
            "OpenTelemetry's environment variables say, else all."
        ),
    )
    service_name: str | None = Field(
        None,
        description="Resource attribute service.name; None: OTEL_SERVICE_NAME, else pdserve.",
        min_length=1,
    )

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        try:
            parts = urlsplit(endpoint)
            is_url = parts.scheme in ("http", "https", "grpc") and bool(parts.hostname)
            is_url = is_url and (parts.port is None or parts.port > 0)
        except ValueError:
            is_url = False
        if not is_url:
            raise ValueError(
                "traces.endpoint must be a URL with http:// (or grpc://, the same) or, for TLS, "
                "https://, as http://collector:4317"
            )
        if parts.username is not None or parts.password is not None:
            raise ValueError(
                "traces.endpoint must not hold a user or password, which Ray's dashboard would "
                "show: export OTEL_EXPORTER_OTLP_HEADERS where routers run"
            )
        return endpoint

    @property
    def wanted(self) -> bool:
        """Whether the file asks for traces."""
        return self.endpoint is not None if self.enabled is None else self.enabled
