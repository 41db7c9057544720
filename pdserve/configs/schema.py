"""The whole configuration of a cluster: one YAML (`args:` of cluster.yaml) in, one frozen tree out.

Every other room receives its part from here; nobody sets a field later, derived values are
properties. An unknown key is an error that names the nearest known one. Torch-free. Knows nothing
of Ray.
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
WorkerKey = Literal["prefill", "decode"]  # of a worker deployment in the configuration


MAX_REPLICAS = 1024  # of a deployment: a slip of the finger is no cluster


class AutoscalingConfig(Config):
    """How many workers a deployment may have, and when that changes (docs/use/elasticity.md).
    up_delay_s, down_delay_s: so long there must be too few, or too many. queue_ms: what prompts may
    wait; None: half of slo.ttft_ms, or 250. sequences: that a decode worker shall have; None: as
    many as slo.tpot_ms and its blocks allow.
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
            raise ValueError(
                f"autoscaling.max ({self.max}) must not be below autoscaling.min ({self.min})"
            )
        return self


class DeploymentConfig(Config):
    """Replicas of one deployment and what each needs from Ray. num_gpus is per engine rank, of
    which a stage has engine.tensor_parallel times engine.data_parallel; num_cpus and resources are
    per stage, of which a replica has engine.pipeline_parallel. labels: only on nodes with all of
    these (`ray start --labels`), each a selector of Ray's: `value`, `!value`, `in(a, b)` or `!in(a,
    b)`. autoscaling: then `replicas` is for the start.
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
                f"replicas ({self.replicas}) must be from autoscaling.min ({bounds.min}) to "
                f"autoscaling.max ({bounds.max})"
            )
        return self


def _given(config: BaseModel) -> dict[str, Any]:
    """The fields that were set, whatever to."""
    return {name: getattr(config, name) for name in config.model_fields_set}


_SETTINGS = (dict, EngineConfig)  # checked or not


def _engine_of(deployment: Any) -> Any:
    """What a deployment, checked or not, says of its engine."""
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
    """How long a stage of an engine's start may show no progress, in seconds, before the start
    fails (docs/use/start.md).

    process_s: Ray starts the process, which imports torch. download_s: the model comes from the
    Hub. config_s: its configuration and samples of its weights are read. device_s: the device
    wakes. weights_s: until the next tensor is loaded. compile_s: the first full step. kv_memory_s:
    the KV cache is allocated. graphs_s: until the next CUDA graph is captured. warm_up_s: until the
    next warm-up request is done. registration_s: the transport registers the KV cache. pool_s:
    beyond transfer.pool.start_deadline_s. connection_s: the replica reaches the engine.
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

    mode: "disaggregated" serves with `prefill` and `decode` workers; "aggregated" with `decode`
    workers alone, each doing whole requests. placement_deadline_s: how long a start waits for nodes
    that have room for it all before it fails; None leaves that to Ray, which waits for ever, for a
    cluster that an autoscaler makes larger.
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
    traces: TracesConfig = TracesConfig()

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
        """ValueError unless model.path was written: whoever serves a file must not serve the demo
        by an oversight."""
        if "path" not in self.model.model_fields_set:
            raise ValueError(
                "args.model.path is missing: it names the model to serve, a folder or a Hub id, as "
                "demo/pdserve-demo"
            )

    @property
    def worker_keys(self) -> tuple[WorkerKey, ...]:
        """The worker deployments of this mode."""
        return ("decode",) if self.mode == "aggregated" else ("prefill", "decode")

    def deployment(self, key: WorkerKey) -> DeploymentConfig:
        return self.prefill if key == "prefill" else self.decode

    def device(self, key: WorkerKey) -> Device:
        """Where these engines compute, as far as the configuration tells: those on `auto` that ask
        Ray for no GPU use CUDA all the same where their node has a GPU.
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
            slo=self.slo,
            logging=self.logging,
        )


class WorkerConfig(Config):
    """What one worker (replica + engine) needs; made by `ClusterConfig.worker`. connects: whether
    it hands KV over at all. host: its node's address, which peers reach it at; the engine's actor
    knows it. slo: what its engine paces its steps by.
    """

    role: Role = "both"
    connects: bool = True
    host: str = "127.0.0.1"
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    start: StartConfig = StartConfig()
    slo: SloConfig = SloConfig()
    logging: LogConfig = LogConfig()

    def start_deadline_s(self, stage: str) -> float:
        """How long this stage of its start may show no progress."""
        own: float = getattr(self.start, f"{stage}_s")
        return own + self.transfer.pool.start_deadline_s if stage == "pool" else own
