"""The configuration of traces: where routers send them, and what share (docs/use/traces.md).

Headers and certificates have no key here. The library reads them from OpenTelemetry's own
environment variables, so that no file holds a secret.
"""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from pdserve.configs.base import Config

Protocol = Literal["grpc", "http/protobuf"]


class TracesConfig(Config):
    """OpenTelemetry traces of requests. OTEL_SDK_DISABLED=true turns them off everywhere."""

    enabled: bool | None = None
    """Whether routers export traces; None: they do when `endpoint` is set."""
    endpoint: str | None = None
    """URL of the receiver, such as http://collector:4317; None: the value of OpenTelemetry's
    environment variables, else this machine."""
    protocol: Protocol | None = None
    """Protocol of the exporter; None: the value of OpenTelemetry's environment variables, else
    grpc."""
    sample_ratio: float | None = Field(None, ge=0, le=1)
    """Share of the calls without a `traceparent` header that are traced; None: the value of
    OpenTelemetry's environment variables, else all."""
    service_name: str | None = Field(None, min_length=1)
    """Resource attribute `service.name`; None: the variable OTEL_SERVICE_NAME, else pdserve."""

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
                "traces.endpoint must be a URL with http:// (or grpc://, which means the same) or, "
                "for TLS, https://, such as http://collector:4317"
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
