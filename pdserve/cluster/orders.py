"""The operators' methods of the Python client: list workers, change roles and counts, and read the
load of experts.

Base class of `cluster.client.Client`.
"""

from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from pdserve.cluster.links.handle_api import (
    Answer,
    ChangeRole,
    Done,
    Look,
    LookAtExperts,
    Order,
    Outcome,
    Refused,
    Scale,
    decode_outcome,
    encode,
)
from pdserve.cluster.loop_thread import LoopThread
from pdserve.router.admin import ClusterReport, WorkerReport
from pdserve.router.expert_load import ExpertLoadReport


class ClusterError(RuntimeError):
    """The cluster could not answer.

    `status` is the HTTP status that says the same; after 429 and 503, try again later.
    """

    def __init__(self, message: str, status: int = 503) -> None:
        super().__init__(message)
        self.status = status


class OrdersClient:
    """Methods come in pairs, like those of `Client`, which sets both attributes."""

    _thread: LoopThread
    _orders: Any

    def workers(self) -> ClusterReport:
        """Lists the workers that one router knows."""
        return self._thread.do(self._cluster(Look()))

    async def aworkers(self) -> ClusterReport:
        """Does what `workers` does, for asyncio."""
        return await self._thread.result_of(self._cluster(Look()))

    def set_role(self, worker: str, role: str, force: bool = False) -> WorkerReport:
        """Changes the role of a worker to "prefill", "decode" or "both" while it serves.

        `worker` is its id, or the part of it after `#`. Raises ClusterError 404 if there is no such
        worker, and 409 if no worker would be left that can decode; with `force` the role changes
        all the same.
        """
        return self._thread.do(self._set_role(ChangeRole(worker=worker, role=role, force=force)))

    async def aset_role(self, worker: str, role: str, force: bool = False) -> WorkerReport:
        """Does what `set_role` does, for asyncio."""
        return await self._thread.result_of(
            self._set_role(ChangeRole(worker=worker, role=role, force=force))
        )

    def scale(
        self, prefill: int | None = None, decode: int | None = None, force: bool = False
    ) -> ClusterReport:
        """Changes how many workers there are; a None changes nothing. Returns at once.

        `workers().counts` shows the progress. Raises ClusterError 409 if no worker might be left
        that can decode; with `force` the counts change all the same.
        """
        return self._thread.do(self._cluster(_scaling(prefill, decode, force)))

    async def ascale(
        self, prefill: int | None = None, decode: int | None = None, force: bool = False
    ) -> ClusterReport:
        """Does what `scale` does, for asyncio."""
        return await self._thread.result_of(self._cluster(_scaling(prefill, decode, force)))

    def expert_load(self, role: str = "") -> ExpertLoadReport:
        """Returns how many rows went to each expert of a mixture since the workers were ready.

        The counts of all workers that have this role ("prefill", "decode" or "both") are added; ""
        means all workers. Nothing stops for it. Raises ClusterError 404 if no worker has the role,
        and 409 if the model has no experts, or they have received nothing yet.
        """
        return self._thread.do(self._experts(LookAtExperts(role=role)))

    async def aexpert_load(self, role: str = "") -> ExpertLoadReport:
        """Does what `expert_load` does, for asyncio."""
        return await self._thread.result_of(self._experts(LookAtExperts(role=role)))

    async def _experts(self, order: LookAtExperts) -> ExpertLoadReport:
        report = (await self._order(order)).experts
        assert report is not None
        return report

    async def _cluster(self, order: Order) -> ClusterReport:
        report = (await self._order(order)).cluster
        assert report is not None
        return report

    async def _set_role(self, order: ChangeRole) -> WorkerReport:
        report = (await self._order(order)).worker
        assert report is not None
        return report

    async def _order(self, order: Order) -> Done:
        try:
            outcome = decode_outcome(await self._orders.remote(encode(order)))
        except (RayError, RayServeException) as error:
            raise ClusterError(f"the router is gone: {error}") from error
        check(outcome)
        assert isinstance(outcome, Done)
        return outcome


def check(answer: Answer | Outcome) -> None:
    """Raises what an answer refuses."""
    if isinstance(answer, Refused):
        raise (
            ValueError(answer.message)
            if answer.status == 400
            else ClusterError(answer.message, answer.status)
        )


def _scaling(prefill: int | None, decode: int | None, force: bool) -> Scale:
    given = {"prefill": prefill, "decode": decode}
    return Scale(
        targets={key: count for key, count in given.items() if count is not None}, force=force
    )
