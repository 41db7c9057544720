"""The Ray actor around one rank of an engine: it holds the process and the GPU, and nothing else.

The actor is thin on purpose: the rank is a `worker.hosts.EngineHost` or a `FollowerHost`, which
know no Ray. This module imports no torch; the actor's process does so when it loads the host.
`cluster.deployments.worker_replica` creates and owns the actor, which ends when the replica dies.
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
SEE_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}  # a setting of Ray


class Host(Protocol):
    """A rank's host, as its process sees it. EngineHost explains `meeting`."""

    progress: StartProgress

    @property
    def meeting(self) -> str: ...

    @property
    def step_age_s(self) -> float:
        """Seconds for which the rank's step has run; 0 between steps."""
        ...

    def start(self) -> dict[str, Any]:
        """Loads the model and returns a description of this rank."""
        ...

    def run(self) -> None:
        """Serves until it is told to stop."""
        ...


class EngineActor:
    """The process of one rank.

    `start` and `run` share one thread, because torch keeps state per thread (the CUDA device).
    `ping` and `progress` run on another thread.
    """

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
        # This must be set before torch loads. With more threads per engine, several engines on a
        # few cores become extremely slow.
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
        # A full garbage collection over all that was just loaded takes 50 ms. Without this it would
        # happen in the middle of a step.
        gc.collect()
        gc.freeze()
        return info

    @ray.method(concurrency_group="engine")
    def run(self) -> None:
        self._host.run()

    @ray.method(concurrency_group="control")
    def progress(self) -> tuple[Progress, str]:
        """Returns how far the start is, and the file that receives this process's standard
        error."""
        return self._host.progress.now, os.readlink("/proc/self/fd/2")

    @ray.method(concurrency_group="control")
    def meeting(self) -> str:
        """Returns the address where the engine's other ranks meet this one."""
        return self._host.meeting

    @ray.method(concurrency_group="control")
    def process(self) -> tuple[str, int]:
        """Returns the address of this process's node, and its process id there."""
        return ray.util.get_node_ip_address(), os.getpid()

    @ray.method(concurrency_group="control")
    def ping(self) -> float:
        """Returns the seconds for which the rank's step has run, 0 between steps. It
        returns if this process still runs Python."""
        return self._host.step_age_s


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
    """Creates an actor in a bundle of the replica's placement group and returns its handle.

    The ranks of each stage share one bundle; rank 0 is in the replica's own bundle. `application`
    is the name of the Serve application. `place` holds further arguments of the host: for rank 0
    the address of its socket, for the others their rank and where they meet.

    Ranks that each have a part of a GPU would all get parts of the same one. So they see all GPUs
    of the node, and each takes the GPU with its own number.
    """
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
