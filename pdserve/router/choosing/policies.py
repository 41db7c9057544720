"""Scores for choosing, one a candidate, 0..1, higher is better. `router.policy` names one of
`POLICIES`.

Pure functions of the candidates; who may take a request at all, and who of equals gets it, is
`router.choosing.choose`'s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pdserve.router.choosing.predict import Predictor
from pdserve.router.fleet.worker_state import WorkerState

HALF_MS = 100.0  # what a worker is predicted to need for a score of 1/2
COMPUTE_WEIGHT = 2.0  # this prompt waits for its computing, and so does who comes behind it


@dataclass(frozen=True, slots=True)
class Task:
    """What the candidates are scored for. kind "prefill": computing the prompt; "decode": going on
    with what `source` computed; "whole": both. num_prompt_tokens: of the prompt."""

    kind: Literal["prefill", "decode", "whole"]
    num_prompt_tokens: int
    predictor: Predictor
    source: WorkerState | None = None


Scorer = Callable[[Sequence[WorkerState], Task], list[float]]


def no_preference(workers: Sequence[WorkerState], task: Task) -> list[float]:
    return [1.0] * len(workers)


def least_outstanding_tokens(workers: Sequence[WorkerState], task: Task) -> list[float]:
    """1 for an idle worker, 0 for the most loaded of these. Load: this router's own legs, and the
    queue that the worker last reported, which holds other routers' requests too."""
    loads = [
        w.outstanding_tokens + (w.snapshot.queue_tokens if w.snapshot is not None else 0)
        for w in workers
    ]
    highest = max(loads)
    return [1 - load / highest if highest else 1.0 for load in loads]


def longest_prefix(workers: Sequence[WorkerState], task: Task) -> list[float]:
    """The share of the prompt that a worker holds."""
    return [
        task.predictor.cached_tokens(worker) / max(1, task.num_prompt_tokens) for worker in workers
    ]


def least_predicted_time(workers: Sequence[WorkerState], task: Task) -> list[float]:
    return [1 / (1 + predicted_ms(worker, task) / HALF_MS) for worker in workers]


def predicted_ms(worker: WorkerState, task: Task) -> float:
    """What the task will take this worker, with what it does already."""
    predictor = task.predictor
    total = predictor.queue_ms(worker)
    if task.kind != "decode":
        total += COMPUTE_WEIGHT * predictor.compute_ms(worker)
    elif task.source is not None:
        total += predictor.transfer_ms(worker, task.source)
    if task.kind != "prefill":
        total += predictor.decode_load_ms(worker)
    return total + predictor.memory_ms(worker)


POLICIES: dict[str, Scorer] = {
    "round-robin": no_preference,
    "least-loaded": least_outstanding_tokens,
    "prefix": longest_prefix,
    "default": least_predicted_time,
}
