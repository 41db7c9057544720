"""Sends a Serve call to the one worker that it names, and posts on the process's board which
workers there are.

Serve makes a `PinRouter` in every process that holds a handle of a worker deployment. It pickles
the class with this whole module by value, so state lives in `cluster.links.membership`, which is
imported by name. Chooses nothing: which worker is named is the business of `router`. Used by
`cluster.app` (configuration) and `cluster.links.serve_links` (calls).

Serve's own way (queue, probes, back-off) is stepped over on purpose: it matches pending calls by
the id of the request that they serve, so two calls of one request to different replicas could be
swapped, and a call to a replica that is gone waits for ever.
"""

from typing import Any

from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from pdserve.cluster.links.membership import publish
from pdserve.router.fleet.link import WorkerLost

PIN = "worker_id"  # the keyword argument that names the worker
LEAVING_KEPT = 256  # of the latest that left; nobody says when one has ended


def worker_id_of(replica_id: ReplicaID) -> str:
    """Unique over restarts: Serve gives every replica it starts a new random id."""
    return f"{replica_id.deployment_id.name}#{replica_id.unique_id}"


def board_key(deployment: DeploymentID) -> str:
    return f"{deployment.app_name}#{deployment.name}"


class PinRouter(RequestRouter):
    """Delivers a call to the replica whose worker id is its keyword argument `worker_id`, or raises
    WorkerLost at once. One that has left the running set is not posted any more, but can be called
    as long as it lives: what runs there goes on, and may have to be cancelled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._leaving: dict[ReplicaID, RunningReplica] = {}

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        worker_id = pending_request.kwargs.get(PIN)
        if worker_id is None:
            raise ValueError(
                f"a call to {self._deployment_id} must name its replica by the keyword argument "
                f"{PIN!r}"
            )
        for replica in (*self._replicas.values(), *self._leaving.values()):
            if worker_id_of(replica.replica_id) == worker_id:
                # refused or unreachable a moment ago; Serve would try again without a pause
                if is_retry:
                    raise WorkerLost(f"worker {worker_id} cannot be reached")
                return replica
        raise WorkerLost(
            f"worker {worker_id} is not among the running replicas of {self._deployment_id}"
        )

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        raise AssertionError("PinRouter picks in _choose_replica_for_request")

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._leaving |= self._replicas
        super().update_replicas(replicas)
        for replica_id in [*self._replicas, *list(self._leaving)[:-LEAVING_KEPT]]:
            self._leaving.pop(replica_id, None)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._leaving.pop(replica_id, None)
        self._publish()

    def _publish(self) -> None:
        publish(board_key(self._deployment_id), frozenset(worker_id_of(r) for r in self._replicas))
