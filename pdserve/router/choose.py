"""Choosing the workers of a request: filter -> score (0..1, higher is better) -> pick.

The three are plain functions (llm-d's router has the same three steps), so a policy is added without touching the
others. Knows no tokens, sends nothing. Called by `router.dispatch` for every attempt.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from pdserve.router.peers import may_pair
from pdserve.router.worker_state import WorkerState


class NoWorker(Exception):
    """No worker can take the request now."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What choosing needs to know of a request. num_tokens: prompt and all that may be generated. resumed: tokens
    were accepted already. excluded: ids of workers that failed it. fingerprint: of the model that began it, None
    before."""

    num_prompt_tokens: int
    num_tokens: int
    resumed: bool = False
    excluded: frozenset[str] = frozenset()
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """prefill None: the decode worker does the whole request."""

    prefill: WorkerState | None
    decode: WorkerState


Filter = Callable[[WorkerState, Demand], bool]
Scorer = Callable[[Sequence[WorkerState]], list[float]]
Picker = Callable[[Sequence[WorkerState], Sequence[float]], WorkerState]


def usable(worker: WorkerState, demand: Demand) -> bool:
    """Stays, did not fail this request, and has the model that began it."""
    same_model = demand.fingerprint in (None, worker.hello.model_fingerprint)
    return not worker.draining and worker.worker_id not in demand.excluded and same_model


def decodes_it(worker: WorkerState, demand: Demand) -> bool:
    return worker.can_decode and worker.token_limit >= demand.num_tokens


def prefills_it(worker: WorkerState, demand: Demand) -> bool:
    return worker.can_prefill and worker.token_limit > demand.num_prompt_tokens


def least_outstanding_tokens(workers: Sequence[WorkerState]) -> list[float]:
    """1 for an idle worker, 0 for the most loaded of these. Load: this router's own legs, and the queue that the worker
    last reported, which holds other routers' requests too."""
    loads = [w.outstanding_tokens + (w.snapshot.queue_tokens if w.snapshot is not None else 0) for w in workers]
    highest = max(loads)
    return [1 - load / highest if highest else 1.0 for load in loads]


def round_robin_of_best() -> Picker:
    """A picker of the best score; equals take turns."""
    turns = count()

    def pick(workers: Sequence[WorkerState], scores: Sequence[float]) -> WorkerState:
        best = max(scores)
        equals = [worker for worker, score in zip(workers, scores, strict=True) if score == best]
        return equals[next(turns) % len(equals)]

    return pick


class Chooser:
    def __init__(self, split_min_tokens: int, score: Scorer = least_outstanding_tokens) -> None:
        """split_min_tokens: prompts shorter than this are not split."""
        self._split_min_tokens = split_min_tokens
        self._score = score
        self._pick_prefill = round_robin_of_best()
        self._pick_decode = round_robin_of_best()

    def choose(self, workers: Iterable[WorkerState], demand: Demand) -> Plan:
        """Raises NoWorker. A resumed request is not split: P samples first tokens only, so D recomputes prompt and
        tokens."""
        candidates = [worker for worker in workers if usable(worker, demand)]
        decodes = [worker for worker in candidates if decodes_it(worker, demand)]
        if not decodes:
            raise NoWorker("no decode worker is there that can take this request")
        if not demand.resumed and demand.num_prompt_tokens >= self._split_min_tokens:
            prefills = [p for p in candidates if prefills_it(p, demand) and connected(p, decodes)]
            if prefills:
                prefill = self._pick_prefill(prefills, self._score(prefills))
                return Plan(prefill, self._best_decode(connected(prefill, decodes)))
        return Plan(None, self._best_decode(decodes))

    def choose_decode(self, workers: Iterable[WorkerState], demand: Demand, prefill: WorkerState) -> WorkerState:
        """A decode worker for KV that `prefill` has published; raises NoWorker."""
        able = [worker for worker in workers if usable(worker, demand) and decodes_it(worker, demand)]
        decodes = connected(prefill, able)
        if not decodes:
            raise NoWorker(f"no decode worker is connected to {prefill.worker_id}")
        return self._best_decode(decodes)

    def _best_decode(self, decodes: Sequence[WorkerState]) -> WorkerState:
        return self._pick_decode(decodes, self._score(decodes))


def connected(prefill: WorkerState, decodes: Iterable[WorkerState]) -> list[WorkerState]:
    """Those that can pull from `prefill`."""
    return [decode for decode in decodes if may_pair(prefill, decode) and decode.is_connected_to(prefill)]
