"""What each replica asks of Ray, and whether some node could give it.

A worker is one placement group on one node: bundle 0 holds the replica, bundle 1 its engine rank with the GPU. Knows
no Serve. Used by `cluster.app` (to place) and `cluster.cli` (to say beforehand what cannot be placed).
"""

from pdserve.configs.schema import ClusterConfig, DeploymentConfig

# Ray refuses empty bundles; so much of a processor keeps a hundred replicas on a small laptop.
CRUMB = 0.001

Resources = dict[str, float]


def worker_bundles(deployment: DeploymentConfig) -> list[Resources]:
    """Bundles of one worker's placement group."""
    rank: Resources = {"CPU": max(deployment.num_cpus, CRUMB), **deployment.resources}
    if deployment.num_gpus:
        rank["GPU"] = deployment.num_gpus
    return [{"CPU": CRUMB}, rank]


def unplaceable(config: ClusterConfig, nodes: list[Resources]) -> list[str]:
    """Complaints about replicas that do not fit on these nodes, each with its total resources; empty when all fit.

    First fit, largest first: a complaint may be wrong only where nodes are filled to the last crumb.
    """
    free = [dict(node) for node in nodes]
    complaints = []
    for name, replicas, need in sorted(_needs(config), key=lambda n: -n[2].get("GPU", 0)):
        placed = sum(_place(need, free) for _ in range(replicas))
        if placed < replicas:
            wanted = ", ".join(f"{amount:g} {resource}" for resource, amount in need.items() if amount > CRUMB * 2)
            complaints.append(f"{name}: {replicas} replicas of {wanted} wanted, the cluster has room for {placed}")
    return complaints


def _needs(config: ClusterConfig) -> list[tuple[str, int, Resources]]:
    """(deployment, replicas, resources of one replica, all on one node)."""
    needs = [("router", config.router.replicas, {"CPU": config.router.num_cpus, **config.router.resources})]
    for name, deployment in workers(config).items():
        total: Resources = {}
        for bundle in worker_bundles(deployment):
            for resource, amount in bundle.items():
                total[resource] = total.get(resource, 0) + amount
        needs.append((name, deployment.replicas, total))
    return needs


def workers(config: ClusterConfig) -> dict[str, DeploymentConfig]:
    """The worker deployments of this mode, by their key in the configuration."""
    if config.mode == "aggregated":
        return {"decode": config.decode}
    return {"prefill": config.prefill, "decode": config.decode}


def _place(need: Resources, free: list[Resources]) -> bool:
    for node in free:
        if all(node.get(resource, 0) >= amount for resource, amount in need.items()):
            for resource, amount in need.items():
                node[resource] = node.get(resource, 0) - amount
            return True
    return False
