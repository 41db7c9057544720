"""The resources that each replica asks of Ray, and whether some node could give them.

A worker is one placement group with a bundle for each stage of its engine; the first bundle also
holds the replica. Knows no Serve and asks no Ray. Used by `cluster.app` (to place) and
`cluster.placement.capacity` (to report what cannot be placed).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from pdserve.configs.engine import EngineConfig
from pdserve.configs.schema import ClusterConfig, DeploymentConfig

# Processors that a replica asks for, because Ray refuses empty bundles. It is small enough for a
# hundred replicas on a laptop.
CRUMB = 0.001
ROUNDING = 1e-6  # tolerance, so that 0.3 has room for three times 0.1
NODES_SHOWN = 16  # in one message

Resources = Mapping[str, float]


@dataclass(frozen=True)
class Node:
    """A living node. `free` is the part of `total` that nothing uses."""

    name: str
    total: Resources
    free: Resources
    labels: Mapping[str, str]

    def emptied(self) -> "Node":
        """Returns the same node with nothing in use."""
        return Node(self.name, self.total, self.total, self.labels)


@dataclass(frozen=True)
class Need:
    """The replicas that a deployment asks for. `deployment` is its key in the configuration.

    `bundles` are those of one replica. Each goes to a node that has the labels; they may go to
    different nodes.
    """

    deployment: str
    replicas: int
    bundles: Sequence[Resources]
    labels: Mapping[str, str]

    @property
    def resources(self) -> Resources:
        """The first bundle, which is the largest; some node must have this much."""
        return self.bundles[0]

    def can_ever_be_on(self, node: Node) -> bool:
        """True if the node would hold the first bundle if nothing else used it."""
        return has_labels(node, self.labels) and _fits(self.resources, node.total)


def worker_bundles(deployment: DeploymentConfig, engine: EngineConfig) -> list[dict[str, float]]:
    """Returns the bundles of one worker's placement group: one per stage, whose ranks share a node.

    The first bundle is that of the last stage, which has rank 0, and also holds the replica.
    """
    asked = {"CPU": deployment.num_cpus, **deployment.resources}
    asked["GPU"] = deployment.num_gpus * engine.stage_ranks
    stage = {name: amount for name, amount in asked.items() if amount} or {"CPU": CRUMB}
    first = stage | {"CPU": deployment.num_cpus + CRUMB}
    return [first, *(dict(stage) for _ in range(engine.pipeline_parallel - 1))]


def strategy(deployment: DeploymentConfig, engine: EngineConfig) -> str:
    """Returns how Ray should place a worker's bundles.

    Stages go on as few nodes as possible. Stages with a part of a GPU each go on one node, because
    between nodes each needs a GPU of its own.
    """
    has_parts = 0 < deployment.num_gpus < 1
    is_apart = engine.pipeline_parallel > 1 and not has_parts
    return "PACK" if is_apart else "STRICT_PACK"


def has_labels(node: Node, selectors: Mapping[str, str]) -> bool:
    """True if a node matches the selectors, decided as Ray does: a missing label has no value."""
    for key, selector in selectors.items():
        negated = selector.startswith("!")
        wanted = selector.removeprefix("!")
        values = wanted[3:-1].split(",") if wanted.startswith("in(") else [wanted]
        if (node.labels.get(key) in values) == negated:
            return False
    return True


def unplaceable(config: ClusterConfig, nodes: Sequence[Node]) -> list[str]:
    """Returns complaints about replicas that do not fit into what is free on these nodes.

    It is empty if all fit. Each deployment is placed first-fit, in the order of deployments that
    leaves the fewest out. So a complaint can be wrong only where nodes would be filled to the last
    crumb.
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
    """Describes the nodes, one per line. `names` are resources to show besides processors and
    GPUs."""
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
    """Returns the names of all resources that some replica asks for."""
    return {name for need in _needs(config) for name in need.resources}


def _free(node: Node, name: str) -> float:
    return round(node.free.get(name, 0.0), 3)


def _needs(config: ClusterConfig) -> list[Need]:
    router = config.router
    asked = {"CPU": router.num_cpus, **router.resources}
    needs = [Need("router", router.replicas, [asked], router.labels)]
    for name in config.worker_keys:
        deployment = config.deployment(name)
        engine = config.worker(name).engine
        bundles = worker_bundles(deployment, engine)
        if strategy(deployment, engine) == "STRICT_PACK":
            bundles = [_sum_of(bundles)]
        needs.append(Need(name, deployment.replicas, bundles, deployment.labels))
    return needs


def _sum_of(bundles: Sequence[Resources]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        _add(total, bundle)
    return total


def _left_out(needs: Sequence[Need], nodes: Sequence[Node]) -> dict[str, int]:
    """Returns how many replicas of each deployment find no node when placed in this order."""
    free = [dict(node.free) for node in nodes]
    return {need.deployment: _place(need, nodes, free) for need in needs}


def _place(need: Need, nodes: Sequence[Node], free: Sequence[dict[str, float]]) -> int:
    """Takes the room from `free`, node after node. Returns how many replicas found none."""
    labelled = zip(nodes, free, strict=True)
    rooms = [left for node, left in labelled if has_labels(node, need.labels)]
    for placed in range(need.replicas):
        taken: list[tuple[dict[str, float], Resources]] = []
        for bundle in need.bundles:
            room = next((left for left in rooms if _fits(bundle, left)), None)
            if room is None:
                for given, part in taken:
                    _add(given, part)
                return need.replicas - placed
            _add(room, bundle, -1)
            taken.append((room, bundle))
        while rooms and not _fits(need.bundles[-1], rooms[0]):
            rooms.pop(0)
    return 0


def _fits(bundle: Resources, free: Resources) -> bool:
    return all(free.get(name, 0.0) >= amount - ROUNDING for name, amount in bundle.items())


def _add(amounts: dict[str, float], bundle: Resources, times: int = 1) -> None:
    for resource, amount in bundle.items():
        amounts[resource] = amounts.get(resource, 0.0) + times * amount


def _complaint(need: Need, missing: int, nodes: Sequence[Node]) -> str:
    asked = [f"{amount:g} {name}" for name, amount in need.resources.items() if amount > CRUMB * 2]
    labels = [f"{key}: {value}" for key, value in need.labels.items()]
    wanted = ", ".join([*asked, *(["the labels {" + ", ".join(labels) + "}"] if labels else [])])
    labelled = [node for node in nodes if has_labels(node, need.labels)]
    large = sum(need.can_ever_be_on(node) for node in nodes)
    found = (
        f"{len(labelled)} of {len(nodes)} nodes have the labels, "
        if labels
        else f"of {len(nodes)} nodes "
    )
    num_stages = len(need.bundles)
    each = "on one node" if num_stages == 1 else f"of {num_stages} stages, each on a node"
    part = "one" if num_stages == 1 else "a stage"
    return (
        f"{need.deployment}: {need.replicas} replicas, each {each} with "
        f"{wanted or 'next to nothing'}; there is room for {need.replicas - missing} "
        f"({found}{large} could hold {part} if nothing else used them)"
    )
