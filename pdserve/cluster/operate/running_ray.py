"""Checks a Ray that was running before `pdserve up`: what its processes read at their start.

Called by `cluster.operate.up`, with a connection to Ray.
"""

import os

import ray

from pdserve.cluster.operate.ray_settings import HAPROXY

HEAD_S = 60.0  # seconds for a task on the head node
SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"


def variable_of_ray(name: str) -> str | None:
    """Returns an environment variable of Ray's processes on the head node, where Serve's controller
    runs. Their environment is that of `ray start`."""
    on_head = ray.remote(num_cpus=0, resources={"node:__internal_head__": 0.001})(os.getenv)
    found: str | None = ray.get(on_head.remote(name), timeout=HEAD_S)
    return found


def check_haproxy() -> None:
    """Raises ValueError if this Ray was started without HAProxy. Requests would then go through
    Serve's Python proxy, although HAProxy was asked for."""
    if variable_of_ray(SWITCH) != "1":
        wanted = " ".join(f"{name}={value}" for name, value in HAPROXY.items())
        raise ValueError(
            f"--haproxy: the running Ray was started without {SWITCH}=1: export {wanted} before "
            "`ray start` on every node, or leave --haproxy out"
        )
