"""Operators' actions on a running cluster: look at its workers, change a worker's role, and change
the number of workers.

Refuses a change that could leave no worker that decodes. Roles go to workers by message, and counts
to whoever starts workers (`ReplicaCounts`; `cluster` speaks to Serve there). Knows no HTTP and no
Ray. Each router has one `Admin`. Called by `router.http.app` (admin routes) and by the Python
handle. See docs/design/elasticity.md.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Protocol, cast, get_args

import msgspec

from pdserve.configs.schema import MAX_REPLICAS, Role
from pdserve.protocol.commands import SetRole
from pdserve.router.choosing.split_gain import SplitGain, described
from pdserve.router.errors import ApiError
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.fleet.worker_state import WorkerState

ANSWER_S = 10.0  # a worker hears of its new role after its step, and reports it at once

State = Literal["running", "draining"]
DEPLOYMENTS = ("prefill", "decode")  # the keys of the configuration that have counts


class HomeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One of a worker's KV caches."""

    num_running: int
    free_blocks: int


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as this router knows it."""

    worker: str
    # The key of the configuration that it was started for.
    deployment: str
    role: str
    state: State
    num_running: int
    num_waiting: int
    # Tokens of the prompts that wait there.
    queue_tokens: int
    free_blocks: int
    total_blocks: int
    # Submits of this router at the worker.
    num_legs: int
    # KV caches that it can pull from.
    num_peers: int
    # Its own KV caches.
    homes: tuple[HomeReport, ...] = ()


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of workers that a deployment has and should have."""

    target: int  # Wanted workers.
    running: int  # Workers that serve, as the controller reports them a little late.


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of a cluster, as one router sees them."""

    # In the order of their ids.
    workers: list[WorkerReport]
    # By deployment; empty if nothing can report them.
    counts: dict[str, Count] = {}
    # Reasons that may keep the counts from being reached.
    warnings: list[str] = []
    # A sentence that says whether splitting pays; "" where no request can be split.
    splitting: str = ""


class CannotScale(ValueError):
    """The change can never be made, because of how this cluster was deployed."""


class ReplicaCounts(Protocol):
    """Starts and stops workers."""

    async def get(self) -> dict[str, Count]:
        """Returns counts by deployment. Raises ConnectionError."""
        ...

    async def set(self, targets: Mapping[str, int]) -> list[str]:
        """Sets targets by deployment and returns warnings. Raises ConnectionError, CannotScale."""
        ...


class Admin:
    """Reads and changes the cluster for operators.

    If `counts` is None, nothing can change the number of workers. `gain` holds what splitting
    gains.
    """

    def __init__(
        self,
        fleet: Fleet,
        counts: ReplicaCounts | None = None,
        gain: SplitGain | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._counts = counts
        self._gain = gain
        self._now = now
        self._changing = asyncio.Lock()

    async def report(self) -> ClusterReport:
        """Describes the cluster. Raises ApiError (503)."""
        counts: dict[str, Count] = {}
        if self._counts is not None:
            try:
                counts = await self._counts.get()
            except ConnectionError as error:
                raise _unavailable(str(error)) from error
        workers = sorted(self._fleet.workers, key=lambda worker: worker.worker_id)
        can_split = self._gain is not None and any(w.role == "prefill" for w in workers)
        return ClusterReport(
            workers=[report_of(worker) for worker in workers],
            counts=counts,
            splitting=described(self._gain, self._now()) if can_split and self._gain else "",
        )

    async def set_role(self, name: str, role: str, force: bool = False) -> WorkerReport:
        """Changes a worker's role, and returns when this router has heard that the worker has it.

        `name` is an id, or the part of an id after its `#`. With `force` the change is made even if
        no worker is left that decodes. Raises ApiError (400, 404, 409, 503).
        """
        if role not in get_args(Role):
            raise ApiError(f"role must be prefill, decode or both, not {role!r}", param="role")
        async with self._changing:  # two changes at once might each count on the other's decoder
            worker = self._find(name)
            check_possible(worker, role)
            if role == "prefill" and worker.can_decode and not force:
                await self._check_role(worker)
            by = worker.snapshot.role_by if worker.snapshot is not None else ""
            if worker.role != role or by != "operator":  # from now on the role is the operator's
                self._fleet.post(worker, SetRole(role=cast(Role, role)))
                await self._until_role(worker, role)
            return report_of(worker)

    async def scale(self, targets: Mapping[str, int], force: bool = False) -> ClusterReport:
        """Sets the target number of workers per deployment.

        Workers that leave are drained first; Serve chooses which ones leave. Raises ApiError (400,
        409, 503).
        """
        if self._counts is None:
            raise ApiError(
                "nobody can change the number of workers here", status=409, code="cannot_scale"
            )
        for name, count in targets.items():
            if (
                name not in DEPLOYMENTS
                or isinstance(count, bool)
                or not isinstance(count, int)
                or count < 0
            ):
                message = (
                    f"{name}={count!r}: name prefill, decode or both, each with a whole number of "
                    "workers"
                )
                raise ApiError(message, param=name)
            if count > MAX_REPLICAS:
                raise ApiError(
                    f"{name}={count}: at most {MAX_REPLICAS} workers of a deployment", param=name
                )
        async with self._changing:
            if not force:
                await self._check_counts(targets)
            try:
                warnings = await self._counts.set(targets)
            except ConnectionError as error:
                raise _unavailable(str(error)) from error
            except CannotScale as error:
                raise ApiError(str(error), status=409, code="cannot_scale") from error
        return msgspec.structs.replace(await self.report(), warnings=warnings)

    def _find(self, name: str) -> WorkerState:
        for worker in self._fleet.workers:
            if name in (worker.worker_id, worker.worker_id.rpartition("#")[2]):
                return worker
        known = ", ".join(sorted(worker.worker_id for worker in self._fleet.workers))
        raise ApiError(
            f"there is no worker {name!r} here: there are {known or 'none'}",
            status=404,
            param="worker",
        )

    async def _check_role(self, worker: WorkerState) -> None:
        """Raises ApiError unless one worker that decodes stays without `worker`, whichever workers
        Serve chooses to stop by the present targets."""
        targets = await self._targets()
        if decoders_left(self._fleet.workers, targets, without=worker) < 1:
            message = (
                f"{worker.worker_id} is the only worker that can decode, or may soon be (Serve "
                "chooses which workers stop): give another one that role first, or force it"
            )
            raise ApiError(message, status=409, param="role", code="last_decode_worker")

    async def _check_counts(self, targets: Mapping[str, int]) -> None:
        """Raises ApiError unless one worker that decodes stays, whichever ones Serve stops."""
        current = await self._targets()
        if (
            decoders_left(self._fleet.workers, {**current, **targets}) < 1
            and self._fleet.decode_workers
        ):
            message = (
                "this might leave no worker that decodes, as Serve chooses which workers stop: "
                "keep more, or give others the role decode or both first, or force it"
            )
            raise ApiError(message, status=409, code="last_decode_worker")

    async def _targets(self) -> dict[str, int]:
        """Returns the target of each deployment. Raises ApiError.

        A target that was set is known at once, but workers that it stops stay visible for a while.
        """
        try:
            return (
                {}
                if self._counts is None
                else {name: c.target for name, c in (await self._counts.get()).items()}
            )
        except ConnectionError as error:
            raise _unavailable(str(error)) from error

    async def _until_role(self, worker: WorkerState, role: str) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                while worker.role != role:
                    if worker not in self._fleet.workers:
                        raise _unavailable(f"{worker.worker_id} was lost before it answered")
                    await self._fleet.change()
        except TimeoutError:
            raise _unavailable(
                f"{worker.worker_id} did not answer within {ANSWER_S:g} s; it may still take "
                "the role"
            ) from None


def check_possible(worker: WorkerState, role: str) -> None:
    """Raises ApiError (400, 409) if the worker can never take this role, or leaves."""
    if role != "both" and not worker.hands_over:
        message = (
            f"{worker.worker_id} hands nothing over (mode: aggregated), so it does whole requests: "
            "its role is both"
        )
        raise ApiError(message, param="role", code="no_connector")
    if worker.draining:
        raise ApiError(
            f"{worker.worker_id} is leaving", status=409, param="worker", code="worker_leaves"
        )


def decoders_left(
    workers: Iterable[WorkerState], targets: Mapping[str, int], without: WorkerState | None = None
) -> int:
    """Counts the workers that can still decode after the deployments shrink to these targets.

    It assumes the worst choice of the workers that stop. A deployment without a target keeps all
    its workers. `without` is a worker that will no longer decode.
    """
    members: dict[str, list[bool]] = {}
    for worker in workers:
        if not worker.draining:
            members.setdefault(deployment_of(worker), []).append(
                worker.can_decode and worker is not without
            )
    return sum(
        max(0, sum(decode) - max(0, len(decode) - targets.get(name, len(decode))))
        for name, decode in members.items()
    )


def deployment_of(worker: WorkerState) -> str:
    """Returns the key of the configuration; ids are `Deployment#…`."""
    return worker.worker_id.partition("#")[0].lower()


def report_of(worker: WorkerState) -> WorkerReport:
    snapshot = worker.snapshot
    return WorkerReport(
        worker=worker.worker_id,
        deployment=deployment_of(worker),
        role=worker.role,
        state="draining" if worker.draining else "running",
        num_running=snapshot.num_running if snapshot is not None else 0,
        num_waiting=snapshot.num_waiting if snapshot is not None else 0,
        queue_tokens=snapshot.queue_tokens if snapshot is not None else 0,
        free_blocks=snapshot.free_blocks if snapshot is not None else 0,
        total_blocks=snapshot.total_blocks if snapshot is not None else 0,
        homes=tuple(
            HomeReport(num_running=home.num_running, free_blocks=home.free_blocks)
            for home in (snapshot.homes if snapshot is not None else ())
        ),
        num_legs=len(worker.legs),
        num_peers=sum(peer.connected for peer in worker.peers.values()),
    )


def _unavailable(message: str) -> ApiError:
    return ApiError(
        message, status=503, kind="service_unavailable_error", code="no_answer", retry_after=1
    )
