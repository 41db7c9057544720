"""What each replica asks of Ray, and whether some node could give it.

A worker is one placement group on one node: bundle 0 holds the replica, bundle 1 its engine rank
with the GPU. Knows no Serve and asks no Ray. Used by `cluster.app` (to place) and
`cluster.placement.capacity` (to say what cannot be placed).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from pdserve.configs.schema import ClusterConfig, DeploymentConfig

# Ray refuses empty bundles; so much of a processor keeps a hundred replicas on a small laptop.
CRUMB = 0.001
ROUNDING = 1e-6  # of a replica: three tenths hold three times one tenth
NODES_SHOWN = 16  # in a message

Resources = Mapping[str, float]


@dataclass(frozen=True)
class Node:
    """A living node. free: of its total resources."""

    name: str
    total: Resources
    free: Resources
    labels: Mapping[str, str]

    def emptied(self) -> "Node":
        """The same with nothing in use."""
        return Node(self.name, self.total, self.total, self.labels)


@dataclass(frozen=True)
class Need:
    """So many replicas of a deployment, by its key in the configuration. resources, labels: of the
    one node that holds a replica."""

    deployment: str
    replicas: int
    resources: Resources
    labels: Mapping[str, str]

    def num_fitting(self, node: Node, free: Resources) -> int:
        """How many of the replicas fit there."""
        if not has_labels(node, self.labels):
            return 0
        wanted = [(name, amount) for name, amount in self.resources.items() if amount > 0]
        rooms = [int(free.get(name, 0.0) / amount + ROUNDING) for name, amount in wanted]
        return min([self.replicas, *rooms])


def worker_bundles(deployment: DeploymentConfig, num_ranks: int) -> list[dict[str, float]]:
    """Bundles of one worker's placement group: its replica, and all ranks of its engine, which are
    on one node."""
    engine_bundle = {"CPU": max(deployment.num_cpus, CRUMB), **deployment.resources}
    if deployment.num_gpus:
        engine_bundle["GPU"] = deployment.num_gpus * num_ranks
    return [{"CPU": CRUMB}, engine_bundle]


def has_labels(node: Node, selectors: Mapping[str, str]) -> bool:
    """As Ray decides: a node without a label has none of its values."""
    for key, selector in selectors.items():
        negated = selector.startswith("!")
        wanted = selector.removeprefix("!")
        values = wanted[3:-1].split(",") if wanted.startswith("in(") else [wanted]
        if (node.labels.get(key) in values) == negated:
            return False
    return True


def unplaceable(config: ClusterConfig, nodes: Sequence[Node]) -> list[str]:
    """Complaints about replicas that do not fit on what is free of these nodes; empty when all fit.

    First fit, deployments in the order that leaves the fewest out: a complaint may be wrong only
    where nodes would be filled to the last crumb.
    """
    needs = _needs(config)
    missing = min(
        (_left_out(order, nodes) for order in permutations(needs)),
        key=lambda left: sum(left.values()),
    )
    return [
        _complaint(need, missing[need.deployment], nodes)
        for need in needs
        if missing[need.deployment]
    ]


def described(nodes: Sequence[Node], names: Iterable[str]) -> str:
    """What they have, one a line. names: resources to show besides processors and GPUs."""
    shown = dict.fromkeys(["CPU", "GPU", *names])
    lines = []
    for node in nodes[:NODES_SHOWN]:
        parts = [
            f"{_free(node, name):g} of {node.total[name]:g} {name} free"
            for name in shown
            if name in node.total
        ]
        labels = [
            f"{key}={value}"
            for key, value in sorted(node.labels.items())
            if key != "ray.io/node-id"
        ]
        lines.append(f"{node.name}: {', '.join(parts)}; labels: {', '.join(labels) or 'none'}")
    if len(nodes) > NODES_SHOWN:
        lines.append(f"and {len(nodes) - NODES_SHOWN} more nodes")
    return "\n".join(lines)


def resource_names(config: ClusterConfig) -> set[str]:
    """All that some replica asks for."""
    return {name for need in _needs(config) for name in need.resources}


def _free(node: Node, name: str) -> float:
    return round(node.free.get(name, 0.0), 3)


def _needs(config: ClusterConfig) -> list[Need]:
    router = config.router
    needs = [
        Need("router", router.replicas, {"CPU": router.num_cpus, **router.resources}, router.labels)
    ]
    for name in config.worker_keys:
        deployment = config.deployment(name)
        total: dict[str, float] = {}
        for bundle in worker_bundles(deployment, config.worker(name).engine.tensor_parallel):
            for resource, amount in bundle.items():
                total[resource] = total.get(resource, 0.0) + amount
        needs.append(Need(name, deployment.replicas, total, deployment.labels))
    return needs


def _left_out(needs: Sequence[Need], nodes: Sequence[Node]) -> dict[str, int]:
    """Replicas of each deployment that find no node, when placed in this order."""
    free = [dict(node.free) for node in nodes]
    return {need.deployment: _place(need, nodes, free) for need in needs}


def _place(need: Need, nodes: Sequence[Node], free: Sequence[dict[str, float]]) -> int:
    """Take the room from `free`, node after node; how many replicas found none."""
    missing = need.replicas
    for node, left in zip(nodes, free, strict=True):
        placed = min(missing, need.num_fitting(node, left))
        for resource, amount in need.resources.items():
            left[resource] = left.get(resource, 0.0) - placed * amount
        missing -= placed
    return missing


def _complaint(need: Need, missing: int, nodes: Sequence[Node]) -> str:
    asked = [f"{amount:g} {name}" for name, amount in need.resources.items() if amount > CRUMB * 2]
    labels = [f"{key}: {value}" for key, value in need.labels.items()]
    wanted = ", ".join([*asked, *(["the labels {" + ", ".join(labels) + "}"] if labels else [])])
    labelled = [node for node in nodes if has_labels(node, need.labels)]
    large = sum(need.num_fitting(node, node.total) > 0 for node in labelled)
    found = (
        f"{len(labelled)} of {len(nodes)} nodes have the labels, "
        if labels
        else f"of {len(nodes)} nodes "
    )
    return (
        f"{need.deployment}: {need.replicas} replicas, each on one node with "
        f"{wanted or 'next to nothing'}; there is room for {need.replicas - missing} "
        f"({found}{large} could hold one if nothing else used them)"
    )
