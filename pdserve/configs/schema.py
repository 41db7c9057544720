"""The whole configuration of a cluster: one YAML (`args:` of cluster.yaml) in, one frozen tree out.

Every other room receives its part from here. Nobody sets a field later; derived values are
properties. An unknown key is an error that names the nearest known one. The string below a field is
its description, from which `tests/configuration_page.py` writes docs/use/configuration.md. This
room imports no torch and knows nothing of Ray.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from pdserve.configs.base import Config
from pdserve.configs.engine import Device, EngineConfig, ModelConfig
from pdserve.configs.labels import Labels
from pdserve.configs.router import LogConfig, RouterConfig, SloConfig
from pdserve.configs.traces import TracesConfig
from pdserve.configs.transfer import TransferConfig

Role = Literal["prefill", "decode", "both"]
WorkerKey = Literal["prefill", "decode"]  # a worker deployment's key in the configuration


MAX_REPLICAS = 1024  # per deployment: more is a typing error


class AutoscalingConfig(Config):
    """How many workers a deployment may have, and when that changes (docs/use/elasticity.md)."""

    min: int = Field(1, ge=1)
    """Fewest workers."""
    max: int = Field(1, ge=1, le=MAX_REPLICAS)
    """Most workers."""
    up_delay_s: float = Field(5.0, ge=0)
    """Seconds for which there must be too few workers before more are started."""
    down_delay_s: float = Field(120.0, ge=0)
    """Seconds for which there must be too many workers before one is stopped."""
    queue_ms: float | None = Field(None, gt=0)
    """Longest time that prompts may wait for prefill before workers are added, in milliseconds.
    None: half of `slo.ttft_ms`, or 250 without that."""
    sequences: int | None = Field(None, ge=1)
    """Target number of running and waiting sequences per decode worker. None: no such target; the
    count follows KV blocks, waiting time and, if it is set, `slo.tpot_ms`."""

    @model_validator(mode="after")
    def _check(self) -> "AutoscalingConfig":
        if self.max < self.min:
            raise ValueError(
                f"autoscaling.max ({self.max}) must not be below autoscaling.min ({self.min})"
            )
        return self


class DeploymentConfig(Config):
    """The replicas of one kind of worker, and what each replica needs from Ray."""

    replicas: int = Field(1, ge=0, le=MAX_REPLICAS)
    """Number of workers; with `autoscaling`, the number at the start."""
    num_cpus: float = Field(0.0, ge=0)
    """CPUs that Ray reserves for each pipeline stage of a worker."""
    num_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray reserves for each rank of an engine. Workers on GPUs need 1; less than 1 lets
    several workers share a GPU. `pdserve up --model` sets 1 on a machine with GPUs."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources that each pipeline stage reserves, by name."""
    labels: Labels = Field(default_factory=dict)
    """Workers start only on nodes that have all of these labels (docs/use/placement.md). A value is
    a Ray label selector: `value`, `!value`, `in(a, b)` or `!in(a, b)`."""
    engine: EngineConfig | None = None
    """Fields of `engine` that have another value for these workers."""
    autoscaling: AutoscalingConfig | None = None
    """Bounds between which the number of workers follows the load. None: the number does not
    change by itself."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "DeploymentConfig":
        bounds = self.autoscaling
        if bounds is not None and not bounds.min <= self.replicas <= bounds.max:
            raise ValueError(
                f"replicas ({self.replicas}) must be from autoscaling.min ({bounds.min}) to "
                f"autoscaling.max ({bounds.max})"
            )
        return self


def _given(config: BaseModel) -> dict[str, Any]:
    """The fields that were set, even to their defaults."""
    return {name: getattr(config, name) for name in config.model_fields_set}


_SETTINGS = (dict, EngineConfig)  # before and after validation


def _engine_of(deployment: Any) -> Any:
    """The engine settings of a deployment, before or after validation."""
    return (
        deployment.get("engine")
        if isinstance(deployment, dict)
        else getattr(deployment, "engine", None)
    )


def _with_engine(deployment: Any, shared: dict[str, Any]) -> Any:
    own = _engine_of(deployment)
    if isinstance(deployment, DeploymentConfig):
        return deployment.model_copy(update={"engine": EngineConfig(**shared | _given(own))})
    return deployment | {"engine": shared | (_given(own) if isinstance(own, EngineConfig) else own)}


class StartConfig(Config):
    """Deadline of each stage of a worker's start: the seconds for which it may show no progress
    (docs/use/start.md)."""

    process_s: float = Field(300.0, gt=0)
    """Seconds for Ray to start the process, which imports torch."""
    download_s: float = Field(3600.0, gt=0)
    """Seconds without progress of a download from the Hub."""
    config_s: float = Field(300.0, gt=0)
    """Seconds to read the model's configuration and samples of its weights."""
    device_s: float = Field(120.0, gt=0)
    """Seconds to initialise the device."""
    weights_s: float = Field(300.0, gt=0)
    """Seconds until the next tensor is loaded."""
    compile_s: float = Field(300.0, gt=0)
    """Seconds for the first full step, which compiles kernels."""
    kv_memory_s: float = Field(180.0, gt=0)
    """Seconds to allocate the KV cache."""
    graphs_s: float = Field(300.0, gt=0)
    """Seconds until the next CUDA graph is captured."""
    warm_up_s: float = Field(300.0, gt=0)
    """Seconds until the next warm-up request is done."""
    registration_s: float = Field(180.0, gt=0)
    """Seconds to register the KV cache with the transport."""
    pool_s: float = Field(10.0, gt=0)
    """Seconds to reach the KV pool, in addition to `transfer.pool.start_deadline_s`."""
    grammars_s: float = Field(120.0, gt=0)
    """Seconds to load what builds grammars, and the tokenizer for it."""
    connection_s: float = Field(10.0, gt=0)
    """Seconds for the replica to reach its engine."""


class ClusterConfig(Config):
    """Everything under `args:` of a cluster file."""

    mode: Literal["disaggregated", "aggregated"] = "disaggregated"
    """`disaggregated`: prefill workers compute prompts, and decode workers generate tokens.
    `aggregated`: only decode workers; each handles a request from start to end."""
    model: ModelConfig = ModelConfig()
    """The model, and the names by which clients call it."""
    engine: EngineConfig = EngineConfig()
    """Settings of all engines. `prefill.engine` and `decode.engine` override single fields."""
    transfer: TransferConfig = TransferConfig()
    """KV hand-off between workers."""
    router: RouterConfig = RouterConfig()
    """The HTTP side and its limits."""
    slo: SloConfig = SloConfig()
    """Targets for latency."""
    prefill: DeploymentConfig = DeploymentConfig()
    """Workers that compute prompts."""
    decode: DeploymentConfig = DeploymentConfig()
    """Workers that generate tokens; with `mode: aggregated`, all workers."""
    placement_deadline_s: float | None = Field(60.0, gt=0)
    """Seconds that a start waits for nodes with enough room before it fails. None: Ray waits for
    ever, for a cluster that an autoscaler enlarges."""
    start: StartConfig = StartConfig()
    """Deadlines for the stages of a worker's start."""
    logging: LogConfig = LogConfig()
    """Log lines."""
    traces: TracesConfig = TracesConfig()
    """OpenTelemetry traces of requests."""

    @model_validator(mode="before")
    @classmethod
    def _inherit_engine(cls, data: Any) -> Any:
        """Copy fields of `engine` to `prefill.engine` and `decode.engine` where they are unset."""
        if not isinstance(data, dict):
            return data
        try:
            shared = _given(EngineConfig.model_validate(data.get("engine", {})))
        except ValidationError:
            return data  # the error is reported for the field itself
        own = {
            key: data[key]
            for key in ("prefill", "decode")
            if isinstance(_engine_of(data.get(key)), _SETTINGS)
        }
        return data | {key: _with_engine(deployment, shared) for key, deployment in own.items()}

    @model_validator(mode="after")
    def _check(self) -> "ClusterConfig":
        if self.decode.replicas < 1:
            raise ValueError(
                "decode.replicas must be at least 1: decode workers finish every request"
            )
        if self.mode == "disaggregated" and self.prefill.replicas < 1:
            raise ValueError(
                "prefill.replicas must be at least 1 when mode is 'disaggregated'; or set mode: "
                "aggregated"
            )
        kv_dtypes = {key: self.worker(key).engine.kv_cache_dtype for key in self.worker_keys}
        if kv_dtypes.get("prefill") == "fp8" != kv_dtypes["decode"]:
            raise ValueError(
                "decode.engine.kv_cache_dtype must be fp8, as prefill.engine.kv_cache_dtype is: "
                "rows are rounded to fp8 on their way to decode workers, and never back"
            )
        if self.transfer.pool.mode != "off":
            for key in self.worker_keys:
                self._check_pool(key)
        return self

    def _check_pool(self, key: WorkerKey) -> None:
        engine = self.worker(key).engine
        if not engine.enable_prefix_caching:
            raise ValueError(
                f"{key}.engine.enable_prefix_caching (from engine, unless set there) must be true "
                "with transfer.pool: its rows are cached"
            )
        device = self.device(key)
        try:
            self.transfer.pool.blocks_per_chunk(engine.for_device(device).block_size)
        except ValueError as error:
            chosen = (
                ""
                if engine.block_size
                else f"; {device} engines have this block_size unless it is set"
            )
            raise ValueError(f"{error} ({key} workers{chosen})") from None

    def check_model_is_named(self) -> None:
        """Raise ValueError unless model.path was written, so that no file serves the demo model by
        mistake."""
        if "path" not in self.model.model_fields_set:
            raise ValueError(
                "args.model.path is missing: it names the model to serve, a folder or a Hub id, "
                "for example demo/pdserve-demo"
            )

    @property
    def worker_keys(self) -> tuple[WorkerKey, ...]:
        """The worker deployments of this mode."""
        return ("decode",) if self.mode == "aggregated" else ("prefill", "decode")

    def deployment(self, key: WorkerKey) -> DeploymentConfig:
        return self.prefill if key == "prefill" else self.decode

    def device(self, key: WorkerKey) -> Device:
        """Where these engines compute, as far as the configuration shows. Engines on `auto` that
        ask Ray for no GPU still use CUDA where their node has a GPU."""
        device = self.worker(key).engine.device
        if device == "auto":
            return "cuda" if self.deployment(key).num_gpus else "cpu"
        return device

    def _engine(self, key: WorkerKey) -> EngineConfig:
        """Returns a deployment's engine settings, which know the stages of the other deployment."""
        engine = self.deployment(key).engine or self.engine
        if self.mode == "aggregated" or "peer_stages" in engine.model_fields_set:
            return engine
        other = self.deployment("decode" if key == "prefill" else "prefill").engine or self.engine
        return engine.model_copy(update={"peer_stages": other.pipeline_parallel})

    def _connects(self, key: WorkerKey) -> bool:
        """Whether these workers move KV at all. Workers that do whole requests only fetch prefixes
        from each other, so one that is alone needs no connector."""
        if self.mode == "disaggregated":
            return True
        deployment = self.deployment(key)
        most = deployment.autoscaling.max if deployment.autoscaling else deployment.replicas
        caches = self._engine(key).enable_prefix_caching
        return most > 1 and caches and self.transfer.fetch_prefixes

    def worker(self, key: WorkerKey) -> "WorkerConfig":
        """The configuration of one worker of this deployment."""
        return WorkerConfig(
            role="both" if self.mode == "aggregated" else key,
            model=self.model,
            engine=self._engine(key),
            transfer=self.transfer,
            connects=self._connects(key),
            hands_over=self.mode == "disaggregated",
            start=self.start,
            slo=self.slo,
            logging=self.logging,
        )


class WorkerConfig(Config):
    """The settings of one worker (replica and engine), made by `ClusterConfig.worker`."""

    role: Role = "both"
    """Phases that the worker computes."""
    connects: bool = True
    """Whether the worker has a connector: to hand KV over, or to fetch and lend prefixes."""
    hands_over: bool = True
    """Whether the phases of a request may be at two workers, this one and another."""
    host: str = "127.0.0.1"
    """Address of its node, where peers reach it. The engine's actor sets it."""
    model: ModelConfig = ModelConfig()
    """The same as in `ClusterConfig`."""
    engine: EngineConfig = EngineConfig()
    """The settings of `engine` with those of its deployment."""
    transfer: TransferConfig = TransferConfig()
    """The same as in `ClusterConfig`."""
    start: StartConfig = StartConfig()
    """The same as in `ClusterConfig`."""
    slo: SloConfig = SloConfig()
    """Targets by which its engine paces its steps."""
    logging: LogConfig = LogConfig()
    """The same as in `ClusterConfig`."""

    def start_deadline_s(self, stage: str) -> float:
        """Seconds that this stage of its start may show no progress."""
        own: float = getattr(self.start, f"{stage}_s")
        return own + self.transfer.pool.start_deadline_s if stage == "pool" else own
