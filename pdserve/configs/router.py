"""The configuration of routers: limits, choosing, keys, promises and logs."""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from pdserve.configs.base import Config
from pdserve.configs.labels import Labels


class RouterConfig(Config):
    """The HTTP side: replicas, where they run, and limits that are checked before any work is done.

    Each limit is per router, so two routers together take twice as much.
    """

    replicas: int = Field(1, ge=1)
    """Number of routers."""
    num_cpus: float = Field(0.0, ge=0)
    """CPUs that Ray reserves for each router."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources that each router reserves, by name."""
    labels: Labels = Field(default_factory=dict)
    """Routers start only on nodes that have all of these labels (docs/use/placement.md)."""
    max_n: int = Field(64, ge=1)
    """Largest `n` (choices per prompt) that a request may ask for."""
    max_logprobs: int = Field(20, ge=0)
    """Largest number of log-probabilities per token that a request may ask for."""
    max_body_bytes: int = Field(32 << 20, ge=1024)
    """Largest body of one request, in bytes. A larger one is refused with 413."""
    max_total_body_bytes: int = Field(128 << 20, ge=4096)
    """Memory for the bodies of all requests that are not tokenised yet, in bytes. One body may take
    a quarter of what the others leave free."""
    max_held_bytes: int = Field(128 << 20, ge=1 << 16)
    """Memory for output that clients read too slowly, and for answers that are built without a
    stream, in bytes. Beyond it, the request that holds most of it is ended."""
    policy: Literal["default", "prefix", "least-loaded", "round-robin"] = "default"
    """How workers are scored (docs/design/routing.md)."""
    split: Literal["auto", "always", "never"] = "auto"
    """When a request is split between a prefill and a decode worker. `auto`: if that is predicted
    to be better. `always`: if a prefill worker is connected. `never`: prefill workers stay idle."""
    split_min_tokens: int = Field(1, ge=1)
    """Prompts with fewer tokens are never split."""
    max_attempts: int = Field(3, ge=1)
    """Number of workers that are tried in a row without a new token before a request fails."""
    worker_silence_s: float = Field(15.0, gt=0)
    """A worker with no message for this many seconds counts as lost."""
    attempt_deadline_s: float = Field(300.0, gt=0)
    """A request with no message from its worker for this many seconds moves to another worker,
    even if its worker is alive. Time in the worker's queue does not count."""
    drain_s: float = Field(60.0, ge=0)
    """Seconds that running requests may continue on a worker that must stop. After that they move
    to another worker. A router that stops gives its answers the same time (docs/use/start.md)."""
    max_concurrent_prompts: int = Field(8192, ge=1)
    """Largest number of prompts that are answered at the same time. More are refused with 429."""
    max_queued_tokens: int = Field(8 << 20, ge=1)
    """Largest number of prompt tokens that wait to be computed. More are refused with 429."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt, in tokens; None: what the model takes."""
    client_timeout_s: float = Field(120.0, gt=0)
    """Seconds within which a client must send its body. A client that reads nothing from a full
    stream for this time is cut off."""
    api_key_env: str | None = None
    """Name of an environment variable that holds API keys, separated by commas."""
    api_keys_file: str | None = None
    """Absolute path of a file of API keys on every node that has routers, one key per line. It is
    read again when it changes. If neither this nor `api_key_env` is set, no key is needed."""
    metrics_need_key: bool = False
    """Whether `/metrics` needs an API key too."""
    salt_by_key: bool = False
    """Whether prompts share cached prefixes only with prompts of the same API key."""
    min_priority: int | None = None
    """Lowest `priority` that HTTP clients may send; the lowest runs first. None: any. With 0,
    clients can lower their urgency but not raise it."""
    admin_http: bool = False
    """Whether programs on a router's machine may change roles and counts of workers over HTTP
    (docs/use/security.md)."""
    allowed_origins: list[str] = Field(default_factory=list)
    """Origins whose pages may use this server from a browser; `*` means all. As in vLLM."""
    allowed_methods: list[str] = Field(default_factory=lambda: ["*"])
    """HTTP methods that such pages may use. As in vLLM."""
    allowed_headers: list[str] = Field(default_factory=lambda: ["*"])
    """Headers that such pages may send. As in vLLM."""
    allow_credentials: bool = False
    """Whether such pages may send cookies. As in vLLM."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Host names that a server on loopback accepts in the `Host` header, in addition to loopback
    names; `*` means all."""
    root_path: str = ""
    """Path below which a proxy offers this server, like vLLM's `--root-path`."""
    page: bool | None = None
    """Whether browsers get a page at `/` (docs/use/page.md); None: only when the server listens on
    loopback."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_keys(cls, data: Any) -> Any:
        """Refuse API keys in the file. The message must not repeat a value, which may be a key."""
        given = data if isinstance(data, dict) else {}
        name = given.get("api_key_env")
        is_name = name is None or (
            isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
        )
        if not is_name or any(key in given for key in ("api_key", "api_keys")):
            raise ValueError(
                "API keys do not belong in this file, because Ray's dashboard shows it: export "
                "them in an environment variable and write its name in router.api_key_env, or put "
                "them into a file on each router's node, one per line, and write its path in "
                "router.api_keys_file"
            )
        return data

    @model_validator(mode="after")
    def _check_bodies(self) -> "RouterConfig":
        if self.max_total_body_bytes < 4 * self.max_body_bytes:
            raise ValueError(
                f"router.max_total_body_bytes ({self.max_total_body_bytes}) must be at least four "
                f"times router.max_body_bytes ({self.max_body_bytes}): one body may take a quarter "
                "of it"
            )
        return self

    @model_validator(mode="after")
    def _check_origins(self) -> "RouterConfig":
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
                raise ValueError(
                    "router.allowed_origins: an origin is a scheme and a host without a path, such "
                    f"as https://chat.example.org, not {origin!r}"
                )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError(
                "router.allow_credentials with router.allowed_origins '*' would let every page use "
                "the cookies of its readers: name the origins"
            )
        for host in self.allowed_hosts:
            if host != "*" and not re.fullmatch(r"[a-z0-9._-]+|[0-9a-f:]+", host):
                raise ValueError(
                    "router.allowed_hosts: a host is a name in lower case without a port, such as "
                    f"models.example.org, not {host!r}"
                )
        if self.root_path and not re.fullmatch(r"(/[^/?#\s]+)+", self.root_path):
            raise ValueError(
                "router.root_path must begin with / and not end with it, for example /llm, not "
                f"{self.root_path!r}"
            )
        return self

    @model_validator(mode="after")
    def _check_keys(self) -> "RouterConfig":
        if self.api_keys_file is not None and not Path(self.api_keys_file).is_absolute():
            raise ValueError(
                "router.api_keys_file must be an absolute path, such as /etc/pdserve/keys: routers "
                "start in Ray's folders"
            )
        for name in ("salt_by_key", "metrics_need_key"):
            if getattr(self, name) and not (self.api_key_env or self.api_keys_file):
                raise ValueError(
                    f"router.{name} needs API keys: set router.api_key_env or router.api_keys_file"
                )
        return self


class SloConfig(Config):
    """Targets for latency, as a client measures it (docs/design/pacing.md, which calls them
    promises)."""

    ttft_ms: float | None = Field(None, gt=0)
    """Target for the time from sending a request to its first token, in milliseconds; None: no
    target."""
    tpot_ms: float | None = Field(None, gt=0)
    """Target for the mean time between the tokens of a choice after its first, in milliseconds;
    None: no target."""
    refuse_beyond: float | None = Field(1.0, gt=0)
    """A request is refused with 429 if other requests are predicted to delay its first token beyond
    this multiple of `ttft_ms`. None: late requests are counted, but none is refused."""

    @property
    def latest_ms(self) -> float | None:
        """Latest predicted first token that is still admitted, in milliseconds; None: any."""
        return (
            None
            if self.ttft_ms is None or self.refuse_beyond is None
            else self.ttft_ms * self.refuse_beyond
        )


class LogConfig(Config):
    """Log lines of routers, worker shells and engines (docs/use/logs.md)."""

    format: Literal["text", "json"] = "text"
    """`text`, or `json` with one object per line."""
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level that is written."""
    requests: bool = True
    """Whether a line is written for each prompt that ended and each call that was refused."""
