"""The whole configuration of a cluster: one YAML (`args:` of cluster.yaml) in, one frozen tree out.

Every other room receives its part from here; nobody sets a field later, derived values are properties. An unknown key
is an error that names the nearest known one. Torch-free. Knows nothing of Ray.
"""

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

import pdserve

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
Role = Literal["prefill", "decode", "both"]
Device = Literal["cpu", "cuda"]
WorkerKey = Literal["prefill", "decode"]  # of a worker deployment in the configuration


def _is_word(annotation: Any) -> bool:
    """Whether only certain words are values of this type."""
    return get_origin(annotation) is Literal and all(isinstance(value, str) for value in get_args(annotation))


class Config(BaseModel):
    """Base of all configuration: frozen, no unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), hide_input_in_errors=True
    )

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    near = difflib.get_close_matches(str(key), cls.model_fields, n=1, cutoff=0.0)
                    raise ValueError(f"unknown key {key!r} in {cls.__name__}: did you mean {near[0]!r}?")
        return data

    @field_validator("*", mode="before")
    @classmethod
    def _name_unquoted_words(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads some words as true or false; only an `off` cannot mean anything else."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and _is_word(annotation):
            if value is False and "off" in get_args(annotation):
                return "off"
            raise ValueError(
                f"{info.field_name} is {str(value).lower()} here: YAML reads an unquoted off or no as false, and on or "
                'yes as true; put the word in quotes, as "off"'
            )
        return value


class ModelConfig(Config):
    """Which model is served and under which name.

    path: a local folder in Hugging Face format or a Hub id. A relative folder is looked for in the working directory,
    then beside the `pdserve` package (so the shipped demo is found wherever Ray starts its processes). name: the
    `model` clients send; defaults to the folder's last part. load_format: "auto" reads safetensors; "dummy" draws
    random weights from config.json alone. seed: of the dummy weights. generation_config: "auto" takes temperature,
    top_p, top_k, min_p, repetition_penalty and max_new_tokens of the folder's generation_config.json for requests that
    do not say them, as vLLM does; "none" takes none of them.
    """

    path: str = "demo/pdserve-demo"
    name: str | None = None
    dtype: Dtype = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    seed: int = 0
    generation_config: Literal["auto", "none"] = "auto"

    @property
    def served_name(self) -> str:
        return self.name or Path(self.path).name

    @property
    def resolved_path(self) -> str:
        """An existing folder, or `path` as it is (then taken for a Hub id)."""
        for base in (Path(), Path(pdserve.__file__).parent.parent):
            if (base / self.path).is_dir():
                return str((base / self.path).resolve())
        return self.path


class EngineConfig(Config):
    """One engine: batch limits, KV cache, device. What is None is chosen by device: `for_device`.

    block_size: tokens in a KV block (16 on CPU, 64 on CUDA, where larger blocks are read faster; prefixes are shared by
    whole blocks). max_num_batched_tokens: token budget of one step (2,048; CUDA 8,192); prompts of 2,048 tokens or more
    do not share a step. max_num_seqs: sequences in one step (256; CUDA 512). num_kv_blocks: size of the KV cache in
    blocks; None sizes it from kv_memory_bytes (CPU) or from a profiling step and kv_memory_fraction (CUDA).
    deterministic: batch-invariant arithmetic (always so on CPU; refused on CUDA for now). async_scheduling: plan and
    queue a step while the device computes the one before (on CUDA). cuda_graphs: replay captured decode steps (CUDA
    only).
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    block_size: Literal[16, 32, 64, 128] | None = None
    max_model_len: int | None = Field(None, ge=1)
    max_num_batched_tokens: int | None = Field(None, ge=16)
    max_num_seqs: int | None = Field(None, ge=1)
    num_kv_blocks: int | None = Field(None, ge=2)
    kv_memory_bytes: int = Field(256 << 20, ge=1)
    kv_memory_fraction: float = Field(0.9, gt=0, le=1)
    enable_prefix_caching: bool = True
    deterministic: bool = False
    async_scheduling: bool | None = None
    cuda_graphs: bool = True

    def for_device(self, device: Device) -> "ResolvedEngineConfig":
        """The same with nothing left to choose."""
        on_cuda = device == "cuda"
        chosen = {
            "block_size": 64 if on_cuda else 16,
            "max_num_batched_tokens": 8192 if on_cuda else 2048,
            "max_num_seqs": 512 if on_cuda else 256,
            "async_scheduling": on_cuda,
        }
        given = self.model_dump(exclude_none=True)
        return ResolvedEngineConfig(**chosen | given | {"device": device})


class ResolvedEngineConfig(EngineConfig):
    """An EngineConfig for one device: made by `EngineConfig.for_device`."""

    block_size: Literal[16, 32, 64, 128]
    max_num_batched_tokens: int
    max_num_seqs: int
    async_scheduling: bool


class PoolConfig(Config):
    """The KV pool shared by the engines of one host: LMCache's server, reached through shared memory.

    mode: "off"; "connect" to a server that runs at `address`; "start": the first worker of a host starts one at
    `address`, as its child, the others use it, and one of them starts the next when it dies; without an address each
    worker has one for itself. address: "host:port"
    on this host. chunk_tokens: what is stored and found at once, a
    multiple of the engine's block_size, the same for all users of a server. l1_gib: memory of a started server, in
    /dev/shm. disk_folder: a started server also writes chunks there and finds them after a restart. start_deadline_s:
    how long it may take to be ready. request_deadline_ms: longest wait for one answer of the server; any longer is a
    miss. breaker_s: after three errors in a row nobody asks for so long. max_store_fraction: share of the KV blocks
    that stores may hold at once.
    """

    mode: Literal["off", "connect", "start"] = "off"
    address: str | None = None
    chunk_tokens: int = Field(256, ge=16)
    l1_gib: float = Field(4.0, gt=0)
    disk_folder: str | None = None
    start_deadline_s: float = Field(60.0, gt=0)
    request_deadline_ms: int = Field(200, ge=1)
    breaker_s: float = Field(5.0, gt=0)
    max_store_fraction: float = Field(0.25, gt=0, le=1)

    @model_validator(mode="after")
    def _check(self) -> "PoolConfig":
        if self.mode == "connect" and self.address is None:
            raise ValueError("pool.address must name the running server as host:port when pool.mode is 'connect'")
        if self.address is not None:
            host, _, port = self.address.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise ValueError(f"pool.address must be host:port, as 127.0.0.1:5755, not {self.address!r}")
            if self.mode == "start" and host != "localhost" and not host.startswith("127."):
                raise ValueError(
                    f"pool.address of a started server must be on loopback, as 127.0.0.1:{port}, not {host}: it is for "
                    "this host, and believes whoever reaches it"
                )
        if self.disk_folder is not None and self.mode != "start":
            raise ValueError(
                "pool.disk_folder belongs to a server started here: set pool.mode: start, or give the folder to the "
                "running server (--l2-adapter)"
            )
        return self

    @property
    def request_deadline_s(self) -> float:
        return self.request_deadline_ms / 1000

    def blocks_per_chunk(self, block_size: int) -> int:
        """ValueError unless a chunk is a whole number of blocks."""
        if self.chunk_tokens % block_size:
            near = max(1, self.chunk_tokens // block_size) * block_size
            raise ValueError(
                f"pool.chunk_tokens ({self.chunk_tokens}) must be a multiple of engine.block_size ({block_size}): "
                f"set it to {near}"
            )
        return self.chunk_tokens // block_size


class TransferConfig(Config):
    """KV hand-off between workers.

    overlap: D pulls a long prompt's rows while P computes the rest, whose last chunk is cut short for it; "auto" cuts
    only where the link is so slow that it pays (P's prefill takes 3 % longer). lease_s: how long P keeps published
    blocks without a sign from D. pull_deadline_s: how long D waits for one pull before it recomputes.
    progress_delay_us: sleep of NIXL's progress thread; 0 spins a core, and is slower: it keeps those who wait for a
    read from the agent's lock. ucx_tls: UCX transports, None lets UCX choose. max_pinned_fraction: share of P's KV
    cache that published blocks may pin; max_reserved_fraction: share of D's KV cache that pulls may hold;
    max_quarantined_fraction: share that reads which do not end may hold before their peers are left alone.
    staging_bytes: memory of each rank that rows from peers of another block size pass through; taken when the first
    such peer connects. pool: a pool of KV shared through LMCache's server.
    """

    connector: Literal["nixl", "local"] = "nixl"
    overlap: bool | Literal["auto"] = "auto"
    lease_s: float = Field(30.0, gt=0)
    pull_deadline_s: float = Field(10.0, gt=0)
    progress_delay_us: int = Field(1000, ge=0)
    ucx_tls: str | None = None
    max_pinned_fraction: float = Field(0.5, gt=0, le=1)
    max_reserved_fraction: float = Field(0.5, gt=0, le=1)
    max_quarantined_fraction: float = Field(0.25, gt=0, le=1)
    staging_bytes: int = Field(1 << 30, ge=1)
    pool: PoolConfig = PoolConfig()


# What Ray takes: Kubernetes' label syntax, and selectors `value`, `!value`, `in(a, b)`, `!in(a, b)`.
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"(?:[A-Za-z0-9][A-Za-z0-9_.-]{{0,252}}/)?{_LABEL}")
_LABEL_SELECTOR = re.compile(rf"!?{_LABEL}|!?in\({_LABEL}(?:, ?{_LABEL})*\)")


def _check_labels(labels: dict[str, str]) -> dict[str, str]:
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_SELECTOR.fullmatch(value):
            raise ValueError(
                f"{key}: {value!r} is no label selector: write a node's label, as zone: a, or one of zone: '!a', "
                "zone: 'in(a, b)', zone: '!in(a, b)'"
            )
    # Ray 2.60 takes a space, and then looks for a value that begins with it.
    return {key: value.replace(" ", "") for key, value in labels.items()}


Labels = Annotated[dict[str, str], AfterValidator(_check_labels)]


MAX_REPLICAS = 1024  # of a deployment: a slip of the finger is no cluster


class AutoscalingConfig(Config):
    """How many workers a deployment may have, and when that changes (docs/elasticity.md). up_delay_s, down_delay_s: so
    long there must be too few, or too many. queue_ms: what prompts may wait; None: half of slo.ttft_ms, or 250.
    sequences: that a decode worker shall have; None: as many as slo.tpot_ms and its blocks allow.
    """

    min: int = Field(1, ge=1)
    max: int = Field(1, ge=1, le=MAX_REPLICAS)
    up_delay_s: float = Field(5.0, ge=0)
    down_delay_s: float = Field(120.0, ge=0)
    queue_ms: float | None = Field(None, gt=0)
    sequences: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> "AutoscalingConfig":
        if self.max < self.min:
            raise ValueError(f"autoscaling.max ({self.max}) must not be below autoscaling.min ({self.min})")
        return self


class DeploymentConfig(Config):
    """Replicas of one deployment and what each needs from Ray. num_gpus is per engine rank; resources per replica.
    labels: only on nodes with all of these (`ray start --labels`), each a selector of Ray's: `value`, `!value`,
    `in(a, b)` or `!in(a, b)`.
    autoscaling: then `replicas` is for the start.
    """

    replicas: int = Field(1, ge=0, le=MAX_REPLICAS)
    num_cpus: float = Field(0.0, ge=0)
    num_gpus: float = Field(0.0, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)
    labels: Labels = Field(default_factory=dict)
    engine: EngineConfig | None = None
    autoscaling: AutoscalingConfig | None = None

    @model_validator(mode="after")
    def _check_bounds(self) -> "DeploymentConfig":
        bounds = self.autoscaling
        if bounds is not None and not bounds.min <= self.replicas <= bounds.max:
            raise ValueError(
                f"replicas ({self.replicas}) must be from autoscaling.min ({bounds.min}) to autoscaling.max "
                f"({bounds.max})"
            )
        return self


class RouterConfig(Config):
    """The HTTP side: replicas, where they run (as DeploymentConfig), and the limits checked before a worker spends
    anything.

    policy: how workers are scored (docs/routing.md). split: "auto" splits a request when it is predicted to pay,
    "always" when there is a prefill worker, "never" leaves them idle. split_min_tokens: prompts shorter than this are
    never split. max_attempts: workers tried in a row without a new token.
    worker_silence_s: a worker that pushes nothing for so long is taken for lost. attempt_deadline_s: a request is moved
    to another worker when its own, which lives, has had nothing to say of it for so long; time in which it waits there
    for its turn does not count. drain_s: how long what runs on a worker that is
    told to stop may go on there; then it is moved to another one.

    Each of these is of one router: max_concurrent_prompts, max_queued_tokens: prompts being answered, and prompt tokens
    that no worker has computed yet; more are refused with 429. max_prompt_tokens: of one prompt, below what the model
    takes. max_body_bytes: of one request. max_total_body_bytes: of all requests whose prompts are not made yet, of
    which one body may take a quarter of what the others leave. max_held_bytes: of what waits for clients who read
    slowly and of whole answers in the making; beyond, the request that holds most is cut off. client_timeout_s: a
    client has so long to send its body, and to take something of a stream that is full.

    api_key_env: the name of an environment variable with API keys, separated by commas. api_keys_file: a file on each
    node that has routers, one key a line; read again when it changes. Without either, everybody may ask.
    metrics_need_key: /metrics asks for a key too. salt_by_key: prompts share cached prefixes with those of the same key
    only. min_priority: HTTP clients may not send a lower `priority` (the lowest runs first); None: any.
    admin_http: programs on a router's machine may change roles and counts by HTTP (docs/security.md).
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

    @model_validator(mode="before")
    @classmethod
    def _refuse_keys(cls, data: Any) -> Any:
        """No message may repeat what was given here: it may be a key."""
        given = data if isinstance(data, dict) else {}
        name = given.get("api_key_env")
        is_name = name is None or (isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name))
        if not is_name or any(key in given for key in ("api_key", "api_keys")):
            raise ValueError(
                "API keys do not belong into this file, which Ray's dashboard shows: export them in an environment "
                "variable and write its name in router.api_key_env, or put them into a file on each router's node, one "
                "a line, and write its path in router.api_keys_file"
            )
        return data

    @model_validator(mode="after")
    def _check_bodies(self) -> "RouterConfig":
        if self.max_total_body_bytes < 4 * self.max_body_bytes:
            raise ValueError(
                f"router.max_total_body_bytes ({self.max_total_body_bytes}) must be at least four times "
                f"router.max_body_bytes ({self.max_body_bytes}): one body may take a quarter of it"
            )
        return self

    @model_validator(mode="after")
    def _check_keys(self) -> "RouterConfig":
        if self.api_keys_file is not None and not Path(self.api_keys_file).is_absolute():
            raise ValueError(
                "router.api_keys_file must be an absolute path, as /etc/pdserve/keys: routers start in folders of Ray's"
            )
        for name in ("salt_by_key", "metrics_need_key"):
            if getattr(self, name) and not (self.api_key_env or self.api_keys_file):
                raise ValueError(f"router.{name} needs API keys: set router.api_key_env or router.api_keys_file")
        return self


class SloConfig(Config):
    """What users are promised, as they measure it: ttft_ms: from sending a request to its first token; tpot_ms: mean
    time between the tokens of a choice behind its first. None: no promise. refuse_beyond: a request that is predicted
    to get its first token later than so many times ttft_ms, because of others, is refused with 429; None: never.
    """

    ttft_ms: float | None = Field(None, gt=0)
    tpot_ms: float | None = Field(None, gt=0)
    refuse_beyond: float | None = Field(1.0, gt=0)

    @property
    def latest_ms(self) -> float | None:
        """A first token that is predicted to come later is refused; None: whatever is predicted."""
        return None if self.ttft_ms is None or self.refuse_beyond is None else self.ttft_ms * self.refuse_beyond


class LogConfig(Config):
    """Log lines of routers, worker shells and engines (docs/logs.md).

    format: "text", or "json": one object a line. level: the lowest that is written. requests: a line for each prompt
    that ended and each call that was refused.
    """

    format: Literal["text", "json"] = "text"
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    requests: bool = True


def _given(config: BaseModel) -> dict[str, Any]:
    """The fields that were set, whatever to."""
    return {name: getattr(config, name) for name in config.model_fields_set}


_SETTINGS = (dict, EngineConfig)  # checked or not


def _engine_of(deployment: Any) -> Any:
    """What a deployment, checked or not, says of its engine."""
    return deployment.get("engine") if isinstance(deployment, dict) else getattr(deployment, "engine", None)


def _with_engine(deployment: Any, shared: dict[str, Any]) -> Any:
    own = _engine_of(deployment)
    if isinstance(deployment, DeploymentConfig):
        return deployment.model_copy(update={"engine": EngineConfig(**shared | _given(own))})
    return deployment | {"engine": shared | (_given(own) if isinstance(own, EngineConfig) else own)}


class StartConfig(Config):
    """How long a stage of an engine's start may show no progress, in seconds, before the start fails (docs/start.md).

    process_s: Ray starts the process, which imports torch. download_s: the model comes from the Hub. config_s: its
    configuration and samples of its weights are read. device_s: the device wakes. weights_s: until the next tensor is
    loaded. compile_s: the first full step. kv_memory_s: the KV cache is allocated. graphs_s: until the next CUDA graph
    is captured. warm_up_s: until the next warm-up request is done. registration_s: the transport registers the KV
    pool. pool_s: beyond transfer.pool.start_deadline_s. connection_s: the replica reaches the engine.
    """

    process_s: float = Field(300.0, gt=0)
    download_s: float = Field(3600.0, gt=0)
    config_s: float = Field(300.0, gt=0)
    device_s: float = Field(120.0, gt=0)
    weights_s: float = Field(300.0, gt=0)
    compile_s: float = Field(300.0, gt=0)
    kv_memory_s: float = Field(180.0, gt=0)
    graphs_s: float = Field(300.0, gt=0)
    warm_up_s: float = Field(300.0, gt=0)
    registration_s: float = Field(180.0, gt=0)
    pool_s: float = Field(10.0, gt=0)
    connection_s: float = Field(10.0, gt=0)


class ClusterConfig(Config):
    """Everything under `args:` of cluster.yaml.

    engine: of all workers. `prefill.engine` and `decode.engine` override single fields of it.

    mode: "disaggregated" serves with `prefill` and `decode` workers; "aggregated" with `decode` workers alone, each
    doing whole requests. placement_deadline_s: how long a start waits for nodes that have room for it all before it
    fails; None leaves that to Ray, which waits for ever, for a cluster that an autoscaler makes larger.
    """

    mode: Literal["disaggregated", "aggregated"] = "disaggregated"
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    router: RouterConfig = RouterConfig()
    slo: SloConfig = SloConfig()
    prefill: DeploymentConfig = DeploymentConfig()
    decode: DeploymentConfig = DeploymentConfig()
    placement_deadline_s: float | None = Field(60.0, gt=0)
    start: StartConfig = StartConfig()
    logging: LogConfig = LogConfig()

    @model_validator(mode="before")
    @classmethod
    def _inherit_engine(cls, data: Any) -> Any:
        """Give `prefill.engine` and `decode.engine` what is set in `engine` and not there."""
        if not isinstance(data, dict):
            return data
        try:
            shared = _given(EngineConfig.model_validate(data.get("engine", {})))
        except ValidationError:
            return data  # reported in its own place
        own = {key: data[key] for key in ("prefill", "decode") if isinstance(_engine_of(data.get(key)), _SETTINGS)}
        return data | {key: _with_engine(deployment, shared) for key, deployment in own.items()}

    @model_validator(mode="after")
    def _check(self) -> "ClusterConfig":
        if self.decode.replicas < 1:
            raise ValueError("decode.replicas must be at least 1: decode workers finish every request")
        if self.mode == "disaggregated" and self.prefill.replicas < 1:
            raise ValueError(
                "prefill.replicas must be at least 1 when mode is 'disaggregated'; or set mode: aggregated"
            )
        if self.transfer.pool.mode != "off":
            for key in self.worker_keys:
                self._check_pool(key)
        return self

    def _check_pool(self, key: WorkerKey) -> None:
        engine = self.worker(key).engine
        if not engine.enable_prefix_caching:
            raise ValueError(
                f"{key}.engine.enable_prefix_caching (from engine, unless set there) must be true with transfer.pool: "
                "its rows are cached"
            )
        device = self.device(key)
        try:
            self.transfer.pool.blocks_per_chunk(engine.for_device(device).block_size)
        except ValueError as error:
            chosen = "" if engine.block_size else f"; {device} engines have this block_size unless it is set"
            raise ValueError(f"{error} ({key} workers{chosen})") from None

    def check_model_is_named(self) -> None:
        """ValueError unless model.path was written: whoever serves a file must not serve the demo by an oversight."""
        if "path" not in self.model.model_fields_set:
            raise ValueError(
                "args.model.path is missing: it names the model to serve, a folder or a Hub id, as demo/pdserve-demo"
            )

    @property
    def worker_keys(self) -> tuple[WorkerKey, ...]:
        """The worker deployments of this mode."""
        return ("decode",) if self.mode == "aggregated" else ("prefill", "decode")

    def deployment(self, key: WorkerKey) -> DeploymentConfig:
        return self.prefill if key == "prefill" else self.decode

    def device(self, key: WorkerKey) -> Device:
        """Where these engines compute, as far as the configuration tells: those on `auto` that ask Ray for no GPU use
        CUDA all the same where their node has a GPU.
        """
        device = self.worker(key).engine.device
        if device == "auto":
            return "cuda" if self.deployment(key).num_gpus else "cpu"
        return device

    def worker(self, key: WorkerKey) -> "WorkerConfig":
        """The configuration of one worker of this deployment."""
        return WorkerConfig(
            role="both" if self.mode == "aggregated" else key,
            model=self.model,
            engine=self.deployment(key).engine or self.engine,
            transfer=self.transfer,
            connects=self.mode == "disaggregated",
            start=self.start,
            logging=self.logging,
        )


class WorkerConfig(Config):
    """What one worker (replica + engine) needs; made by `ClusterConfig.worker`. connects: whether it hands KV over at
    all. host: its node's address, which peers reach it at; the engine's actor knows it.
    """

    role: Role = "both"
    connects: bool = True
    host: str = "127.0.0.1"
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    start: StartConfig = StartConfig()
    logging: LogConfig = LogConfig()

    def start_deadline_s(self, stage: str) -> float:
        """How long this stage of its start may show no progress."""
        own: float = getattr(self.start, f"{stage}_s")
        return own + self.transfer.pool.start_deadline_s if stage == "pool" else own
