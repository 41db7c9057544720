"""Tests what is asked of Serve's controller, and what is warned of; the controller and the nodes
are made by hand.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.cluster.placement.placement import Node
from pdserve.cluster.scaling import replica_counts as cluster_counts
from pdserve.cluster.scaling.replica_counts import ServeReplicaCounts
from pdserve.configs.schema import ClusterConfig


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> ServeReplicaCounts:
    """Counts of a cluster that was deployed with one worker of each kind, on one node."""
    targets = {"Prefill": 1, "Decode": 1}

    async def ask(self: ServeReplicaCounts, method: str, *args: Any) -> Any:
        if method == "update_deployment_replicas":
            targets[args[0].name] = args[1]
            return None
        replicas = [SimpleNamespace(state="RUNNING"), SimpleNamespace(state="STARTING")]
        return SimpleNamespace(target_num_replicas=targets[args[1]], replicas=replicas)

    has = {"CPU": 8.0, "GPU": 4.0}
    monkeypatch.setattr(cluster_counts, "nodes", lambda: [Node("n", has, {}, {})])
    monkeypatch.setattr(ServeReplicaCounts, "_ask", ask)
    monkeypatch.setattr(ServeReplicaCounts, "_app", "app")
    return ServeReplicaCounts(
        ClusterConfig.model_validate({"prefill": {"num_gpus": 1}, "decode": {"num_gpus": 1}})
    )


async def test_warnings_are_of_what_runs_not_of_what_was_deployed(
    four_gpus: ServeReplicaCounts,
) -> None:
    assert await four_gpus.set({"decode": 3}) == []
    [warning] = await four_gpus.set({"prefill": 3})
    assert "1 GPU; there is room for" in warning
    assert {key: count.target for key, count in (await four_gpus.get()).items()} == {
        "prefill": 3,
        "decode": 3,
    }
    assert await four_gpus.set({"decode": 1}) == []
