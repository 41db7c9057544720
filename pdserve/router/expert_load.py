"""Asks workers for the load of their experts, and adds the counts.

The sum is what `engine.expert_load_file` reads. It covers all that the asked workers have computed
since they were ready, in whichever role. Knows no files, no HTTP and no Ray. Called by the router's
handle (`cluster.deployments.router_replica`).
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import get_args

import msgspec

from pdserve.configs.schema import Role
from pdserve.protocol.commands import AskExpertLoad
from pdserve.protocol.events import ExpertCounts
from pdserve.router.errors import ApiError
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.fleet.worker_state import WorkerState

ANSWER_S = 10.0  # a worker hears of the question after its step, and answers between two others


class ExpertLoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The load of some workers' experts."""

    # The workers that counted, in the order of their ids.
    workers: list[str]
    # Number of rows that went to each expert, by layer; layers without experts have no entry.
    layers: dict[int, list[int]]


async def gather_load(fleet: Fleet, role: str = "") -> ExpertLoadReport:
    """Returns the load of all workers that now have this role, or of all workers if it is "".

    Workers that leave are not asked. Raises ApiError (400, 404, 409, 503), which names the cure.
    """
    workers = _workers_of(fleet, role)
    answers = {worker: _ask(fleet, worker) for worker in workers}
    try:
        async with asyncio.timeout(ANSWER_S):
            for worker, answer in answers.items():
                while not answer.done():
                    if worker not in fleet.workers:
                        raise _unavailable(f"{worker.worker_id} was lost before it answered")
                    await fleet.change()
    except TimeoutError:
        silent = _named(worker for worker, answer in answers.items() if not answer.done())
        raise _unavailable(
            f"{silent} did not answer within {ANSWER_S:g} s: a step may take longer, or the "
            "worker may be of a version that cannot tell its load"
        ) from None
    return _added({worker: answer.result() for worker, answer in answers.items()})


def _workers_of(fleet: Fleet, role: str) -> list[WorkerState]:
    if role not in ("", *get_args(Role)):
        raise ApiError(f"role must be prefill, decode or both, not {role!r}", param="role")
    staying = sorted(
        (worker for worker in fleet.workers if not worker.draining),
        key=lambda worker: worker.worker_id,
    )
    if not staying:
        raise _unavailable("no worker is connected to this router")
    found = [worker for worker in staying if role in ("", worker.role)]
    if not found:
        here = ", ".join(f"{worker.worker_id} ({worker.role})" for worker in staying)
        raise ApiError(
            f"no worker has the role {role}: ask for another role, or for all workers; there are "
            f"{here}",
            status=404,
            param="role",
        )
    return found


def _ask(fleet: Fleet, worker: WorkerState) -> asyncio.Future[ExpertCounts]:
    answer: asyncio.Future[ExpertCounts] = asyncio.get_running_loop().create_future()
    worker.load_questions.append(answer)
    fleet.post(worker, AskExpertLoad(router_id=fleet.router_id, session=worker.session))
    return answer


def _added(answers: Mapping[WorkerState, ExpertCounts]) -> ExpertLoadReport:
    shapes = {_shape(worker, answer) for worker, answer in answers.items()}
    if len(shapes) > 1:
        raise _refused(
            f"{_named(answers)} serve different models, whose experts cannot be counted together: "
            "ask for the workers of one role, or wait until all workers serve one model",
            "unlike_models",
        )
    layers = [answer.layers for answer in answers.values()]
    if not layers[0]:
        raise _refused(
            "the model has no experts, so no load is counted, and engine.expert_load_file is not "
            "needed",
            "no_experts",
        )
    total = {
        layer: [sum(rows) for rows in zip(*(each[layer] for each in layers), strict=True)]
        for layer in layers[0]
    }
    if not any(map(any, total.values())):
        raise _refused(
            f"the experts of {_named(answers)} have received nothing yet: let the cluster serve a "
            "typical load first",
            "no_load",
        )
    return ExpertLoadReport(workers=[worker.worker_id for worker in answers], layers=total)


def _shape(worker: WorkerState, answer: ExpertCounts) -> tuple[object, ...]:
    """Returns what must be equal for two workers' counts to be added."""
    sizes = tuple((layer, len(rows)) for layer, rows in answer.layers.items())
    return worker.hello.model_fingerprint, sizes


def _named(workers: Iterable[WorkerState]) -> str:
    return ", ".join(worker.worker_id for worker in workers)


def _refused(message: str, code: str) -> ApiError:
    return ApiError(message, status=409, code=code)


def _unavailable(message: str) -> ApiError:
    return ApiError(
        f"{message}; see `pdserve workers`, and ask again",
        status=503,
        kind="service_unavailable_error",
        code="no_answer",
        retry_after=1,
    )
