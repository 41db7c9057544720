"""Checks whether the connected Ray cluster has room for an application before Serve is asked to
start it: Serve would wait for ever.

Knows no requests. `cluster.app` waits here while it builds the application. Before that,
`cluster.operate.checks` reports whether the nodes would do if they were empty.
"""

import logging
import time

import ray
from ray import serve
from ray._private.state import available_resources_per_node
from ray.serve.exceptions import RayServeException

from pdserve.cluster.names import ROUTER
from pdserve.cluster.placement.placement import Node, described, resource_names, unplaceable
from pdserve.configs.schema import ClusterConfig

logger = logging.getLogger("ray.serve")

POLL_S = 0.5


class NoCapacity(RayServeException, ValueError):
    """Replicas cannot be placed.

    It is one of Serve's exceptions, because Serve takes whatever else a builder raises for an
    accident. Then it builds three times more, each with its whole deadline, and shows a traceback.
    """


def await_capacity(config: ClusterConfig) -> None:
    """Returns when there is room for every replica. Raises NoCapacity at the deadline."""
    if config.placement_deadline_s is None:
        return
    deadline = time.monotonic() + config.placement_deadline_s
    warned = False
    while complaints := unplaceable(config, usable_nodes()):
        if time.monotonic() > deadline:
            raise _no_capacity(
                config,
                complaints,
                f"within {config.placement_deadline_s:g} s (placement_deadline_s)",
            )
        if not warned:
            limit_s = config.placement_deadline_s
            logger.warning(
                "waiting at most %g s for nodes with room: %s", limit_s, "; ".join(complaints)
            )
            warned = True
        time.sleep(POLL_S)


def usable_nodes() -> list[Node]:
    """Returns the nodes that count.

    In an update everything counts as free: replicas that already run make way for the new ones.
    """
    return [node.emptied() for node in nodes()] if _is_update() else nodes()


def nodes() -> list[Node]:
    """Returns all living nodes, as Ray knows them now.

    Ray knows a node's free resources a moment later than the node itself.
    """
    free = available_resources_per_node()
    return [
        Node(
            f"{node['NodeManagerHostname']} {node['NodeManagerAddress']} ({node['NodeID'][:6]})",
            node["Resources"],
            free.get(node["NodeID"], node["Resources"]),
            node["Labels"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _is_update() -> bool:
    return any(
        ROUTER in application.deployments for application in serve.status().applications.values()
    )


def _no_capacity(config: ClusterConfig, complaints: list[str], when: str) -> NoCapacity:
    have = described(nodes(), sorted(resource_names(config)))
    return NoCapacity(
        "\n".join(
            [f"there is no room for this cluster {when}:", *complaints, "The nodes have", have]
        )
    )
