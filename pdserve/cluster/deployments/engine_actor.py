"""The Ray actor around one rank of an engine: its process, its GPU, nothing else.

Thin on purpose: the rank is a `worker.hosts.EngineHost` or a `FollowerHost`, which do not know Ray.
This module imports no torch; the actor's process does, when the host is loaded. Created by
`cluster.deployments.worker_replica`, which owns it: the replica's death is the actor's end.
"""

import gc
import importlib
import os
from typing import Any, Protocol

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pdserve.cluster.deployments import hub_token
from pdserve.cluster.deployments.logs import log_to_stderr
from pdserve.configs.schema import WorkerConfig
from pdserve.protocol.start_progress import Progress, StartProgress

ENGINE_HOST = "pdserve.worker.hosts.engine_host:EngineHost"
FOLLOWER_HOST = "pdserve.worker.hosts.follower_host:FollowerHost"
SEE_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}  # of Ray


class Host(Protocol):
    """A rank's host, as its process knows it. meeting: see EngineHost."""

    progress: StartProgress

    @property
    def meeting(self) -> str: ...

    def start(self) -> dict[str, Any]:
        """Load the model; what this rank is."""
        ...

    def run(self) -> None:
        """Serve until told to stop."""
        ...


class EngineActor:
    """The process of one rank. `start` and `run` share one thread, so that what torch keeps for a
    thread (the CUDA device) holds; `ping` and `progress` have another."""

    def __init__(
        self,
        engine_host: str,
        application: str,
        config: WorkerConfig,
        worker_id: str,
        incarnation: int,
        *place: str | int,
    ) -> None:
        hub_token.take(application)
        # One thread an engine, before torch loads: several engines on a few cores collapse
        # otherwise.
        os.environ["OMP_NUM_THREADS"] = "1"
        log_to_stderr(config.logging, worker_id)
        config = config.model_copy(update={"host": ray.util.get_node_ip_address()})
        module, _, name = engine_host.partition(":")
        self._host: Host = getattr(importlib.import_module(module), name)(
            config, worker_id, incarnation, *place
        )

    @ray.method(concurrency_group="engine")
    def start(self) -> dict[str, Any]:
        info = self._host.start()
        # A full collection over what was just loaded takes 50 ms, and would come in the middle of a
        # step.
        gc.collect()
        gc.freeze()
        return info

    @ray.method(concurrency_group="engine")
    def run(self) -> None:
        self._host.run()

    @ray.method(concurrency_group="control")
    def progress(self) -> tuple[Progress, str]:
        """How far the start is, and the file that this process' standard error goes to."""
        return self._host.progress.now, os.readlink("/proc/self/fd/2")

    @ray.method(concurrency_group="control")
    def meeting(self) -> str:
        """Where the engine's other ranks meet this one."""
        return self._host.meeting

    @ray.method(concurrency_group="control")
    def process(self) -> tuple[str, int]:
        """The address of its node, and its number there."""
        return ray.util.get_node_ip_address(), os.getpid()

    @ray.method(concurrency_group="control")
    def ping(self) -> None:
        """Return, from an engine process that still runs Python."""


def create_engine_actor(
    group: PlacementGroup,
    num_gpus: float,
    bundle: int,
    engine_host: str,
    application: str,
    config: WorkerConfig,
    worker_id: str,
    incarnation: int,
    *place: str | int,
) -> Any:
    """A handle of a new actor in a bundle of the replica's placement group: each stage's ranks have
    one, and rank 0 is in that of the replica. application: of Serve. place: what its host is told
    besides: rank 0 the address of its socket, the others their rank and where they meet.

    Ranks with a part of a GPU each would get parts of the same one: they see all GPUs of the node,
    and take those of their numbers."""
    make_actor_class: Any = ray.remote(  # type: ignore[call-overload]
        num_cpus=0, max_restarts=0, concurrency_groups={"engine": 1, "control": 1}
    )
    is_shared = 0 < num_gpus < 1 and config.engine.num_ranks > 1
    actor = make_actor_class(EngineActor).options(
        num_gpus=num_gpus,
        runtime_env={"env_vars": SEE_ALL_GPUS} if is_shared else None,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle
        ),
    )
    return actor.remote(engine_host, application, config, worker_id, incarnation, *place)
