"""Sends a Serve call to the one worker that it names, and publishes which workers exist.

Serve makes a `PinRouter` in every process that holds a handle of a worker deployment. It pickles
the class with this whole module by value. So state lives in `cluster.links.membership`, which is
imported by name. Chooses nothing: `router` chooses which worker a call names. Used by `cluster.app`
(configuration) and `cluster.links.serve_links` (calls).

Serve's own way (queue, probes, back-off) is skipped on purpose. It matches pending calls by the id
of the request that they serve, so it could swap two calls of one request to different replicas. A
call to a replica that is gone would wait for ever.
"""

from typing import Any

from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from pdserve.cluster.links.membership import publish
from pdserve.router.fleet.link import WorkerLost

PIN = "worker_id"  # the keyword argument that names the worker
LEAVING_KEPT = 256  # most recent leavers to remember; nobody reports when one has ended


def worker_id_of(replica_id: ReplicaID) -> str:
    """Returns a worker id that is unique over restarts: Serve gives each replica it starts a random
    id."""
    return f"{replica_id.deployment_id.name}#{replica_id.unique_id}"


def board_key(deployment: DeploymentID) -> str:
    return f"{deployment.app_name}#{deployment.name}"


class PinRouter(RequestRouter):
    """Delivers a call to the replica that its keyword argument `worker_id` names, or raises
    WorkerLost.

    A replica that has left the running set is not published any more. It can still be called while
    it lives, because its requests go on and may have to be cancelled.
    """

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
                # It refused or was unreachable a moment ago. Serve would retry without a pause.
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
