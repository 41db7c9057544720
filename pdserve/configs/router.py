"""The configuration of routers: limits, choosing, keys, promises and logs."""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from pdserve.configs.base import Config
from pdserve.configs.labels import Labels


class RouterConfig(Config):
    """The HTTP side: replicas, where they run (as DeploymentConfig), and the limits checked before
    a worker spends anything.

    policy: how workers are scored (docs/design/routing.md). split: "auto" splits a request when it
    is predicted to pay, "always" when there is a prefill worker, "never" leaves them idle.
    split_min_tokens: prompts shorter than this are never split. max_attempts: workers tried in a
    row without a new token. worker_silence_s: a worker that pushes nothing for so long is taken for
    lost. attempt_deadline_s: a request is moved to another worker when its own, which lives, has
    had nothing to say of it for so long; time in which it waits there for its turn does not count.
    drain_s: how long what runs on a worker that is told to stop may go on there; then it is moved
    to another one. When a router stops, its answers may go on for so long; then they end with an
    error (docs/use/start.md).

    Each of these is of one router: max_concurrent_prompts, max_queued_tokens: prompts being
    answered, and prompt tokens that no worker has computed yet; more are refused with 429.
    max_prompt_tokens: of one prompt, below what the model takes. max_body_bytes: of one request.
    max_total_body_bytes: of all requests whose prompts are not made yet, of which one body may take
    a quarter of what the others leave. max_held_bytes: of what waits for clients who read slowly
    and of whole answers in the making; beyond, the request that holds most is cut off.
    client_timeout_s: a client has so long to send its body, and to take something of a stream that
    is full.

    api_key_env: the name of an environment variable with API keys, separated by commas.
    api_keys_file: a file on each node that has routers, one key a line; read again when it changes.
    Without either, everybody may ask. metrics_need_key: /metrics asks for a key too. salt_by_key:
    prompts share cached prefixes with those of the same key only. min_priority: HTTP clients may
    not send a lower `priority` (the lowest runs first); None: any. admin_http: programs on a
    router's machine may change roles and counts by HTTP (docs/use/security.md).

    allowed_origins: origins whose pages in browsers may use this server ("*": any); none by
    default. allowed_methods, allowed_headers: what such pages may send; allow_credentials: whether
    with cookies. These four are vLLM's. allowed_hosts: names, besides those of loopback, by which a
    server may be asked that listens on loopback ("*": any). root_path: the path under which a proxy
    shows this server, as vLLM's --root-path. page: whether there is a page for browsers at `/`
    (docs/use/page.md); None: where the server listens on loopback alone.
    """

    replicas: int = Field(1, ge=1)
    num_cpus: float = Field(0.0, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)
    labels: Labels = Field(default_factory=dict)
    max_n: int = Field(64, ge=1)
    max_logprobs: int = Field(20, ge=0)
    max_body_bytes: int = Field(32 << 20, ge=1024)
    max_total_body_bytes: int = Field(128 << 20, ge=4096)
    max_held_bytes: int = Field(128 << 20, ge=1 << 16)
    policy: Literal["default", "prefix", "least-loaded", "round-robin"] = "default"
    split: Literal["auto", "always", "never"] = "auto"
    split_min_tokens: int = Field(1, ge=1)
    max_attempts: int = Field(3, ge=1)
    worker_silence_s: float = Field(15.0, gt=0)
    attempt_deadline_s: float = Field(300.0, gt=0)
    drain_s: float = Field(60.0, ge=0)
    max_concurrent_prompts: int = Field(8192, ge=1)
    max_queued_tokens: int = Field(8 << 20, ge=1)
    max_prompt_tokens: int | None = Field(None, ge=1)
    client_timeout_s: float = Field(120.0, gt=0)
    api_key_env: str | None = None
    api_keys_file: str | None = None
    metrics_need_key: bool = False
    salt_by_key: bool = False
    min_priority: int | None = None
    admin_http: bool = False
    allowed_origins: list[str] = Field(default_factory=list)
    allowed_methods: list[str] = Field(default_factory=lambda: ["*"])
    allowed_headers: list[str] = Field(default_factory=lambda: ["*"])
    allow_credentials: bool = False
    allowed_hosts: list[str] = Field(default_factory=list)
    root_path: str = ""
    page: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_keys(cls, data: Any) -> Any:
        """No message may repeat what was given here: it may be a key."""
        given = data if isinstance(data, dict) else {}
        name = given.get("api_key_env")
        is_name = name is None or (
            isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
        )
        if not is_name or any(key in given for key in ("api_key", "api_keys")):
            raise ValueError(
                "API keys do not belong into this file, which Ray's dashboard shows: export them "
                "in an environment variable and write its name in router.api_key_env, or put them "
                "into a file on each router's node, one a line, and write its path in "
                "router.api_keys_file"
            )
        return data

    @model_validator(mode="after")
    def _check_bodies(self) -> "RouterConfig":
        if self.max_total_body_bytes < 4 * self.max_body_bytes:
            raise ValueError(
                f"router.max_total_body_bytes ({self.max_total_body_bytes}) must be at least four "
                "times "
                f"router.max_body_bytes ({self.max_body_bytes}): one body may take a quarter of it"
            )
        return self

    @model_validator(mode="after")
    def _check_origins(self) -> "RouterConfig":
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
                raise ValueError(
                    f"router.allowed_origins: an origin is a scheme and a host, as "
                    f"https://chat.example.org, without a path, not {origin!r}"
                )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError(
                "router.allow_credentials with router.allowed_origins '*' would let every page use "
                "the cookies of its readers: name the origins"
            )
        for host in self.allowed_hosts:
            if host != "*" and not re.fullmatch(r"[a-z0-9._-]+|[0-9a-f:]+", host):
                raise ValueError(
                    "router.allowed_hosts: a name in lower case, without a port, as "
                    f"models.example.org, not {host!r}"
                )
        if self.root_path and not re.fullmatch(r"(/[^/?#\s]+)+", self.root_path):
            raise ValueError(
                f"router.root_path must begin with / and not end with it, as /llm, not "
                f"{self.root_path!r}"
            )
        return self

    @model_validator(mode="after")
    def _check_keys(self) -> "RouterConfig":
        if self.api_keys_file is not None and not Path(self.api_keys_file).is_absolute():
            raise ValueError(
                "router.api_keys_file must be an absolute path, as /etc/pdserve/keys: routers "
                "start in folders of Ray's"
            )
        for name in ("salt_by_key", "metrics_need_key"):
            if getattr(self, name) and not (self.api_key_env or self.api_keys_file):
                raise ValueError(
                    f"router.{name} needs API keys: set router.api_key_env or router.api_keys_file"
                )
        return self


class SloConfig(Config):
    """What users are promised, as they measure it: ttft_ms: from sending a request to its first
    token; tpot_ms: mean time between the tokens of a choice behind its first. None: no promise.
    refuse_beyond: a request that is predicted to get its first token later than so many times
    ttft_ms, because of others, is refused with 429; None: never.
    """

    ttft_ms: float | None = Field(None, gt=0)
    tpot_ms: float | None = Field(None, gt=0)
    refuse_beyond: float | None = Field(1.0, gt=0)

    @property
    def latest_ms(self) -> float | None:
        """A first token that is predicted to come later is refused; None: whatever is predicted."""
        return (
            None
            if self.ttft_ms is None or self.refuse_beyond is None
            else self.ttft_ms * self.refuse_beyond
        )


class LogConfig(Config):
    """Log lines of routers, worker shells and engines (docs/use/logs.md).

    format: "text", or "json": one object a line. level: the lowest that is written. requests: a
    line for each prompt that ended and each call that was refused.
    """

    format: Literal["text", "json"] = "text"
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    requests: bool = True
