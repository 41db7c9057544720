"""Scores the candidates: one number each, 0 to 1, higher is better. `router.policy` names a policy.

A policy is a pure function of the candidates. `router.choosing.choose` decides which workers may
take a request at all, and which of equally good ones gets it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pdserve.router.choosing.predict import Predictor
from pdserve.router.fleet.worker_state import WorkerState

HALF_MS = 100.0  # a worker that is predicted to need this long gets a score of 1/2


@dataclass(frozen=True, slots=True)
class Task:
    """The work that candidates are scored for."""

    # "prefill": compute the prompt; "decode": go on with what `source` computed; "whole": both.
    kind: Literal["prefill", "decode", "whole"]
    num_prompt_tokens: int
    predictor: Predictor
    source: WorkerState | None = None


Scorer = Callable[[Sequence[WorkerState], Task], list[float]]


def no_preference(workers: Sequence[WorkerState], task: Task) -> list[float]:
    return [1.0] * len(workers)


def least_outstanding_tokens(workers: Sequence[WorkerState], task: Task) -> list[float]:
    """Scores an idle worker 1 and the most loaded candidate 0.

    The load is this router's own legs plus the queue that the worker last reported, which includes
    other routers' requests.
    """
    loads = [
        w.outstanding_tokens + (w.snapshot.queue_tokens if w.snapshot is not None else 0)
        for w in workers
    ]
    highest = max(loads)
    return [1 - load / highest if highest else 1.0 for load in loads]


def longest_prefix(workers: Sequence[WorkerState], task: Task) -> list[float]:
    """Scores a worker by the share of the prompt that its prefix cache holds."""
    return [
        task.predictor.cached_tokens(worker) / max(1, task.num_prompt_tokens) for worker in workers
    ]


def least_predicted_time(workers: Sequence[WorkerState], task: Task) -> list[float]:
    return [1 / (1 + predicted_ms(worker, task) / HALF_MS) for worker in workers]


def predicted_ms(worker: WorkerState, task: Task) -> float:
    """Predicts how long the worker needs for the task, together with the work it has already.

    A prompt counts twice: once until its own first token, and once at full speed for the prompts
    that come after it.
    """
    predictor = task.predictor
    if task.kind == "decode":
        total = predictor.queue_ms(worker) + predictor.memory_ms(worker)
        if task.source is not None:
            total += predictor.transfer_ms(worker, task.source)
    else:
        total = predictor.first_token(worker).total_ms + predictor.compute_alone_ms(worker)
    if task.kind != "prefill":
        total += predictor.decode_load_ms(worker)
    return total


POLICIES: dict[str, Scorer] = {
    "round-robin": no_preference,
    "least-loaded": least_outstanding_tokens,
    "prefix": longest_prefix,
    "default": least_predicted_time,
}
