"""Chooses the workers of a request: filter -> score (`router.choosing.policies`) -> pick.

A score is between 0 and 1; higher is better. The three steps are plain functions, as in llm-d's
router, so a new policy needs no change to the other two. This module sends nothing.
`router.request.request_run` calls it for every attempt. docs/design/routing.md gives the reasons.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from random import Random

from pdserve.configs.router import SloConfig
from pdserve.protocol.request_key import LegName, Phase, RequestKind
from pdserve.router.choosing.policies import POLICIES, Task
from pdserve.router.choosing.predict import Predictor, work_of
from pdserve.router.choosing.slack_rule import (
    decide,
    spare_workers,
    split_option,
    whole_option,
)
from pdserve.router.choosing.split_gain import SplitGain
from pdserve.router.choosing.split_rule import Mode, Reason, compare, split_ms, whole_ms
from pdserve.router.fleet.peers import may_pair
from pdserve.router.fleet.prefix_index import PromptBlocks
from pdserve.router.fleet.worker_state import WorkerState

EQUAL = 0.99  # workers with at least this share of the best score take turns
NEAR = 0.95  # a session may keep its own worker if that has at least this share of the best score
# a session leaves a worker whose queue is longer than the shortest one by more than this
OVERLOADED_MS = 250.0
EXPECTED_BLOCKS = 256  # number of a prompt's first blocks that count as held where it was sent


class NoWorker(Exception):
    """No worker can take the request now."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A request as choosing sees it."""

    num_prompt_tokens: int
    # Tokens a decode worker must have room for, prompt included: all that max_tokens allows;
    # without max_tokens, one token more than there are already.
    num_tokens: int
    # True if some tokens were accepted already.
    resumed: bool = False
    # Ids of workers that failed this request.
    excluded: frozenset[str] = frozenset()
    # Fingerprint of the model that began the request; None before it began.
    fingerprint: str | None = None
    # None: nothing is looked up in prefix caches.
    prompt: PromptBlocks | None = None
    # Requests of one session should go to one worker; "": no session.
    session: str = ""
    # The longest answer allowed; None: not known.
    max_tokens: int | None = None
    # True if only workers that enforce grammars can take it.
    needs_grammar: bool = False
    kind: RequestKind = "generate"


@dataclass(frozen=True, slots=True)
class Assignment:
    """The workers that a request goes to, and why it was split or not.

    `prefill` is None if the decode worker does the whole request.
    """

    prefill: WorkerState | None
    decode: WorkerState
    reason: Reason


Picker = Callable[[Sequence[WorkerState], Sequence[float]], WorkerState]


def usable(worker: WorkerState, demand: Demand) -> bool:
    """True if the worker stays, did not fail this request, runs the model that began it, and
    enforces its grammar if it has one."""
    same_model = demand.fingerprint in (None, worker.hello.model_fingerprint)
    able = worker.enforces_grammars or not demand.needs_grammar
    return not worker.draining and worker.worker_id not in demand.excluded and same_model and able


def decodes_it(worker: WorkerState, demand: Demand) -> bool:
    """True if the worker decodes and has room for the prompt and its answer."""
    return worker.can_decode and worker.token_limit >= demand.num_tokens


def prefills_it(worker: WorkerState, demand: Demand) -> bool:
    """True if the worker computes prompts and has room for this one and a token."""
    return worker.can_prefill and worker.token_limit > demand.num_prompt_tokens


def continues_it(worker: WorkerState, demand: Demand) -> bool:
    """True if the worker has room for a second token after the one that P samples.

    Without that room a hand-off would be in vain.
    """
    return worker.token_limit > demand.num_prompt_tokens + 1


def in_turns() -> Picker:
    """Returns a picker of the best score. Workers with nearly equal scores take turns."""
    turns = count()

    def pick(workers: Sequence[WorkerState], scores: Sequence[float]) -> WorkerState:
        equals = _at_least(EQUAL * max(scores), workers, scores)
        return equals[next(turns) % len(equals)]

    return pick


def of_session(
    session: str, workers: Sequence[WorkerState], scores: Sequence[float], predictor: Predictor
) -> WorkerState:
    """Returns the session's worker among the nearly best ones that are not overloaded.

    It is the one with the highest hash of session and worker, so it stays the same when other
    workers come and go. If all are overloaded, the best one is returned.
    """
    shortest = min(predictor.queue_ms(worker) for worker in workers)
    near = _at_least(NEAR * max(scores), workers, scores)
    calm = [worker for worker in near if predictor.queue_ms(worker) <= shortest + OVERLOADED_MS]
    if not calm:
        return workers[scores.index(max(scores))]
    return max(
        calm,
        key=lambda worker: blake2b(
            f"{session} {worker.worker_id}".encode(), digest_size=8
        ).digest(),
    )


def _at_least(
    limit: float, workers: Sequence[WorkerState], scores: Sequence[float]
) -> list[WorkerState]:
    return [worker for worker, score in zip(workers, scores, strict=True) if score >= limit]


class Chooser:
    """Chooses workers by one policy. `gain` collects what splitting saves, from its decisions."""

    def __init__(
        self,
        split_min_tokens: int,
        policy: str = "default",
        split: Mode = "auto",
        slo: SloConfig | None = None,
        seed: int | None = None,
    ) -> None:
        """Raises ValueError if `policy` is not a key of POLICIES.

        Prompts shorter than `split_min_tokens` are not split. `slo` holds the promised times.
        `seed` is for the draw among nearly equal ways; with None each router draws its own.
        """
        if policy not in POLICIES:
            raise ValueError(f"router.policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        self._split_min_tokens = split_min_tokens
        self._mode = split
        self._slo = slo or SloConfig()
        self._draw = Random(seed)
        self.gain = SplitGain()
        self._score = POLICIES[policy]
        self._pick_prefill = in_turns()
        self._pick_decode = in_turns()
        # `whole` has turns of its own, because a D is picked for both ways of each request
        self._pick_whole = in_turns()

    def choose(
        self, workers: Iterable[WorkerState], demand: Demand, now: float | None = None
    ) -> Assignment:
        """Chooses the workers of a request, or raises NoWorker.

        A resumed request is not split: P samples first tokens only, so D recomputes the prompt and
        the tokens. `now` is in monotonic seconds.
        """
        workers = list(workers)
        candidates = [worker for worker in workers if usable(worker, demand)]
        if demand.kind == "embed":
            return self._for_embedding(workers, candidates, demand, now)
        decodes = [worker for worker in candidates if decodes_it(worker, demand)]
        if not decodes:
            raise NoWorker("no decode worker can take this request now")
        now = time.monotonic() if now is None else now
        predictor = Predictor(workers, demand.prompt, demand.num_prompt_tokens, now)
        whole = self._pick(
            self._pick_whole, decodes, Task("whole", demand.num_prompt_tokens, predictor), demand
        )
        refusal = self._refusal(demand)
        if refusal is not None:
            return Assignment(None, whole, refusal)
        able = [worker for worker in decodes if continues_it(worker, demand)]
        prefills = [p for p in candidates if prefills_it(p, demand) and any_connected(p, able)]
        if not prefills:
            return Assignment(None, whole, "no-prefill")
        task = Task("prefill", demand.num_prompt_tokens, predictor)
        prefill = self._pick(self._pick_prefill, prefills, task, demand)
        task = Task("decode", demand.num_prompt_tokens, predictor, prefill)
        decode = self._pick(self._pick_decode, connected(prefill, able), task, demand)
        always = Assignment(prefill, decode, "always") if self._mode == "always" else None
        if whole.pace is None:
            return always or self._by_budget(prefill, decode, whole, predictor, now)
        # without a promise no stream is too slow, and no answer is too short for a hand-off
        is_promised = self._slo.tpot_ms is not None
        max_tokens = demand.max_tokens if is_promised else None
        split = split_option(prefill, decode, predictor, max_tokens)
        roomy = [p for p in prefills if is_promised and p.token_limit >= demand.num_tokens]
        spare = spare_workers(roomy, decodes, predictor, split)
        wholes = [
            whole_option(worker, predictor, max_tokens, is_promised) for worker in (whole, *spare)
        ]
        self.gain.note(min(option.cost_ms for option in wholes) - split.cost_ms, now)
        if always is not None:
            return always
        chosen, reason = decide(split, wholes, self._slo.ttft_ms, self._draw)
        return Assignment(chosen.prefill, chosen.decode, reason)

    def _for_embedding(
        self,
        workers: list[WorkerState],
        candidates: list[WorkerState],
        demand: Demand,
        now: float | None,
    ) -> Assignment:
        """Picks a worker that computes prompts; if there is none, any other. It does all of it."""
        able = [worker for worker in candidates if worker.token_limit >= demand.num_tokens]
        able = [worker for worker in able if worker.can_prefill] or able
        if not able:
            raise NoWorker("no worker can compute this prompt now")
        now = time.monotonic() if now is None else now
        predictor = Predictor(workers, demand.prompt, demand.num_prompt_tokens, now)
        task = Task("prefill", demand.num_prompt_tokens, predictor)
        return Assignment(None, self._pick(self._pick_prefill, able, task, demand), "embed")

    def _by_budget(
        self,
        prefill: WorkerState,
        decode: WorkerState,
        whole: WorkerState,
        predictor: Predictor,
        now: float,
    ) -> Assignment:
        """Decides by `split_rule`, because the workers report no pace."""
        self.gain.note(whole_ms(whole, predictor) - split_ms(prefill, decode, predictor), now)
        reason = compare(prefill, decode, whole, predictor, now)
        if reason == "cheaper":
            return Assignment(None, whole, reason)
        return Assignment(prefill, decode, reason)

    def _refusal(self, demand: Demand) -> Reason | None:
        """Returns why the request must not be split, whoever is there; None if it may be."""
        if demand.resumed:
            return "resumed"
        if self._mode == "never":
            return "never"
        return "short" if demand.num_prompt_tokens < self._split_min_tokens else None

    def choose_decode(
        self, workers: Iterable[WorkerState], demand: Demand, prefill: WorkerState
    ) -> WorkerState:
        """Picks a decode worker for the KV that `prefill` has published; raises NoWorker."""
        workers = list(workers)
        able = [
            worker for worker in workers if usable(worker, demand) and decodes_it(worker, demand)
        ]
        decodes = connected(prefill, able)
        if not decodes:
            raise NoWorker(f"no decode worker is connected to {prefill.worker_id}")
        predictor = Predictor(workers, demand.prompt, demand.num_prompt_tokens, time.monotonic())
        task = Task("decode", demand.num_prompt_tokens, predictor, prefill)
        return self._pick(self._pick_decode, decodes, task, demand)

    def _pick(
        self, pick: Picker, workers: Sequence[WorkerState], task: Task, demand: Demand
    ) -> WorkerState:
        scores = self._score(workers, task)
        if demand.session:
            return of_session(demand.session, workers, scores, task.predictor)
        return pick(workers, scores)


def connected(prefill: WorkerState, decodes: Iterable[WorkerState]) -> list[WorkerState]:
    """Returns the decode workers that can pull from `prefill`."""
    return [decode for decode in decodes if _can_pull(decode, prefill)]


def any_connected(prefill: WorkerState, decodes: Iterable[WorkerState]) -> bool:
    """True if one of them can pull from `prefill`.

    Nearly always the first one can, so this does not look at all pairs.
    """
    return any(_can_pull(decode, prefill) for decode in decodes)


def _can_pull(decode: WorkerState, prefill: WorkerState) -> bool:
    return decode.hands_over and may_pair(prefill, decode) and decode.is_connected_to(prefill)


def note_sent(
    workers: Iterable[WorkerState],
    worker: WorkerState,
    prompt: PromptBlocks,
    phase: Phase,
    leg: LegName,
    now: float | None = None,
) -> None:
    """Notes that `leg` was opened at `worker`.

    Until the worker reports it, the prompt counts as queued there, and as soon cached there.
    `now` is in monotonic seconds.
    """
    now = time.monotonic() if now is None else now
    if phase != "decode":
        predictor = Predictor(workers, prompt, prompt.num_tokens, now)
        work = work_of(worker, predictor.computed_tokens(worker), prompt.num_tokens)
        worker.queue.sent(leg, work, now, predictor.queue_speed(worker))
        if phase == "full" and worker.num_decodes and worker.pace is None:
            worker.stalls.spend(predictor.compute_ms(worker), now)
    if worker.hello.caches_prefixes:
        keys = prompt.keys(worker.hello.rows_digest, worker.hello.block_size, EXPECTED_BLOCKS)
        worker.cached.expect(keys, now)
