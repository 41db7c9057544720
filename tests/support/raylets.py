"""Several raylets on this machine with the demo model over them: what the tests over Ray start,
kill and ask.

Ray's settings are those of `pdserve up`. Used by tests/test_failover_ray.py and
tests/test_elasticity_ray.py.
"""

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from support.processes import children

from pdserve.cluster.app import build_at
from pdserve.cluster.deployments.http_server import Address
from pdserve.cluster.operate.ray_settings import settings
from pdserve.configs.schema import ClusterConfig

READY_S = 180.0
MEMORY = 80 << 20  # of each raylet's object store, which nothing uses

Resources = dict[str, float]


class Nodes:
    """A head with the routers, and raylets for workers. Forget a raylet before it is killed:
    `take`."""

    def __init__(self, *nodes: Resources) -> None:
        head = {"num_cpus": 2, "resources": {"ingress": 1}, "object_store_memory": MEMORY}
        self.cluster = Cluster(
            initialize_head=True, connect=True, head_node_args={**head, "include_dashboard": False}
        )
        self._raylets: list[tuple[Resources, int]] = []
        self._frozen: list[int] = []
        for resources in nodes:
            self.add(resources)

    def add(self, resources: Resources) -> None:
        """Start a raylet. "GPU" among the resources is how many GPUs it says that it has. They are
        the machine's from number "first GPU" on, which is 0 if it is left out."""
        custom = {k: amount for k, amount in resources.items() if k not in ("GPU", "first GPU")}
        first, num_gpus = (int(resources.get(name, 0)) for name in ("first GPU", "GPU"))
        gpus = ",".join(map(str, range(first, first + num_gpus)))
        node = self.cluster.add_node(
            num_cpus=1,
            num_gpus=num_gpus,
            resources=custom,
            object_store_memory=MEMORY,
            env_vars={"CUDA_VISIBLE_DEVICES": gpus} if first else None,
        )
        [raylet] = node.all_processes["raylet"]
        self._raylets.append((resources, raylet.process.pid))

    def take(self, role: str) -> tuple[Resources, int]:
        """A raylet with a living engine of that resource; it is forgotten here."""
        found = next(r for r in self._raylets if role in r[0] and engine_of(r[1]) is not None)
        self._raylets.remove(found)
        return found

    def freeze(self, role: str) -> None:
        """A raylet as `take` finds it, with all its processes."""
        _, raylet = self.take(role)
        for pid in (*children(raylet), raylet):
            os.kill(pid, signal.SIGSTOP)
            self._frozen.append(pid)

    def shutdown(self) -> None:
        """The cluster, and what is frozen: nothing else ends that."""
        for pid in self._frozen:
            os.kill(pid, signal.SIGKILL)
        self.cluster.shutdown()

    def all_ranks(self, role: str) -> list[list[int]]:
        """Finds the processes of each engine's ranks."""
        return [ranks_of(raylet) for r, raylet in self._raylets if role in r]

    def engine(self, role: str) -> int:
        """Finds the process of an engine."""
        return next(
            pid
            for r, raylet in self._raylets
            if role in r and (pid := engine_of(raylet)) is not None
        )


def ranks_of(raylet: int) -> list[int]:
    """Finds the processes of the ranks of a raylet's engine."""
    found = []
    for pid in children(raylet):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if b"ray::EngineActor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def engine_of(raylet: int) -> int | None:
    return next(iter(ranks_of(raylet)), None)


def kill_raylet(raylet: int) -> None:
    """Its processes end with it."""
    os.kill(raylet, signal.SIGKILL)
    os.waitpid(raylet, 0)  # to its workers, a dead process that nobody has waited for lives


@contextmanager
def serving(name: str, port: int, config: dict[str, Any], *nodes: Resources) -> Iterator[Nodes]:
    """The application on raylets with these resources, ready; routers serve HTTP at the port."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="ray-") as folder,
    ):
        # Ray keeps there which cluster others on this machine shall join
        own = {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder}
        for variable, value in {**settings(haproxy=False), **own}.items():
            patch.setenv(variable, value)
        made = Nodes(*nodes)
        try:
            serve.start(proxy_location="Disabled")
            app = build_at(ClusterConfig.model_validate(config), Address("127.0.0.1", port))
            serve._run(
                app, name=name, route_prefix="/", _blocking=False, external_scaler_enabled=True
            )
            wait_until_healthy(name)
            yield made
        finally:
            serve.shutdown()
            ray.shutdown()
            made.shutdown()


def wait_until_healthy(name: str) -> None:
    began = time.monotonic()
    while serve.status().applications[name].status != "RUNNING":
        assert time.monotonic() - began < READY_S, serve.status()
        time.sleep(0.2)


@asynccontextmanager
async def connected(port: int, timeout_s: float = 60.0) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=timeout_s, limits=limits
    ) as client:
        yield client
