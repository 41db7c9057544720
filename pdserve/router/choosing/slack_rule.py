"""Decides whether to split a request among workers that pace their steps.

A decode worker gets the prompts that fit its slack, and a prefill worker those that fit its queue.
Two costs are compared:

    split: P's forecast of the first token + transfer + HANDOFF_MS + wait for blocks at D
    whole: the worker's forecast + CHARGED of the time that its streams saved for this prompt
           + at a decode worker that promises its streams a pace: WHOLE_STEPS of it
           + at a prefill worker: what the stream adds to its steps over EXPECTED_TOKENS
           + without a promise to streams: UNPROMISED_WEIGHT of the computing there, that of the
             prompts before it included, per sequence that waits for it meanwhile

Time that streams have saved up lets a prompt come sooner, but only once, and later prompts may need
it more. So a part of it is charged. As prompts use it up, the worker reports less of it, and the
forecast comes near the speed that its decodes leave in the long run.

An option that makes a worker's decode steps longer than promised is taken only if no other is left.
So is a prompt at a decode worker whose streams leave next to no time.
Of the others the cheapest in time wins. Nearly equal ones are drawn by lot, so that routers that
see the same do not all send to one worker. No share of D's time is set aside: D's own pace protects
its streams, however many routers send to it. docs/design/routing.md says where the constants come
from. Pure functions; called by `router.choosing.choose`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from pdserve.router.choosing.paced import (
    base_step_ms,
    breaks_promise,
    is_full,
    may_take_whole,
    spare_ms,
)
from pdserve.router.choosing.predict import Predictor
from pdserve.router.choosing.split_rule import HANDOFF_MS, Reason
from pdserve.router.fleet.worker_state import WorkerState

# Share of the time saved by streams that a prompt is charged when it uses it. With 0 prompts use it
# up while prefill workers rest. With 1 they use it only where a promise is at stake.
CHARGED = 0.3
# A prompt beside decodes costs a decode worker so many promised intervals more than its forecast.
WHOLE_STEPS = 2
# Share of the time for which a whole request, and the prompts before it, stall other sequences.
# Without the prompts before it, the first streams of a burst would lose the most.
UNPROMISED_WEIGHT = 0.3
NEAR = 1.05  # options that cost up to this times the least cost count as equal
EXPECTED_TOKENS = 128  # assumed length of a stream, as its real length is not known beforehand


@dataclass(frozen=True, slots=True)
class Option:
    """One way to place a request, with its predicted cost."""

    prefill: WorkerState | None  # None: the decode worker does the whole request.
    decode: WorkerState
    first_ms: float  # Time until the first token.
    cost_ms: float  # That time, and what the request takes from others.
    breaks: bool  # True if is_short, or if others' streams would get too slow.
    is_short: bool = False  # True if the answer is too short to make up for the hand-off.


def split_option(
    prefill: WorkerState, decode: WorkerState, predictor: Predictor, max_tokens: int | None
) -> Option:
    """Predicts a split. `max_tokens` limits the answer; None: not known."""
    first_ms = predictor.first_token(prefill).total_ms
    moved_ms = predictor.transfer_ms(decode, prefill) + HANDOFF_MS + predictor.memory_ms(decode)
    joins_ms = first_ms + moved_ms
    is_short = max_tokens is not None and moved_ms > spare_ms(decode, max_tokens - 1, joins_ms)
    breaks = is_short or breaks_promise(decode, joins_ms)
    return Option(prefill, decode, first_ms, joins_ms, breaks, is_short)


def whole_option(
    worker: WorkerState, predictor: Predictor, max_tokens: int | None, is_promised: bool
) -> Option:
    """Predicts a whole request at `worker`.

    `max_tokens` limits the answer; None: not known. `is_promised` is True if the worker's pace
    protects its streams.
    """
    forecast = predictor.first_token(worker)
    cost_ms = forecast.total_ms + CHARGED * forecast.saved_ms
    if not is_promised:
        stall_ms = predictor.queue_ms(worker) + predictor.compute_ms(worker)
        cost_ms += UNPROMISED_WEIGHT * worker.num_present * stall_ms
    elif worker.can_decode and worker.pace is not None and worker.num_decodes:
        cost_ms += WHOLE_STEPS * worker.pace.tpot_ms
    if not worker.can_decode:  # prompts are what it is for
        added = base_step_ms(worker, 1) - base_step_ms(worker)
        cost_ms += added * min(EXPECTED_TOKENS, max_tokens or EXPECTED_TOKENS)
    breaks = breaks_promise(worker, forecast.total_ms)
    if is_promised and worker.can_decode:  # a full one has no time for prompts
        breaks = breaks or is_full(worker, forecast.total_ms)
    return Option(None, worker, forecast.total_ms, cost_ms, breaks)


def spare_workers(
    prefills: Iterable[WorkerState],
    decodes: Sequence[WorkerState],
    predictor: Predictor,
    split: Option,
) -> list[WorkerState]:
    """Returns the prefill workers that may do this request whole.

    `decodes` are all workers that can decode. `split` is the best way to split it.
    """
    full = all(is_full(worker, split.cost_ms) for worker in decodes)
    return [
        worker
        for worker in prefills
        if not worker.can_decode
        and may_take_whole(worker, predictor.queue_ms(worker), full, split.is_short)
    ]


def decide(
    split: Option, wholes: Sequence[Option], ttft_ms: float | None, draw: Random
) -> tuple[Option, Reason]:
    """Returns the chosen option and the reason. `ttft_ms` is the promised time to first token.

    A prompt that would be late everywhere goes to a prefill worker, where it takes least from
    streams.
    """
    options = [split, *wholes]
    kept = [option for option in options if not option.breaks] or options
    if ttft_ms is not None:
        kept = [option for option in kept if option.first_ms <= ttft_ms]
    if not kept:
        at_prefill = [option for option in wholes if not option.decode.can_decode]
        return (at_prefill[0] if split.is_short and at_prefill else split), "late"
    limit = NEAR * min(option.cost_ms for option in kept)
    chosen = draw.choice([option for option in kept if option.cost_ms <= limit])
    if chosen is split:
        return chosen, "pays"
    return chosen, "cheaper" if chosen.decode.can_decode else "spare"
