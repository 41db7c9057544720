"""How fast a worker that paces its steps takes prompts, and how long its steps are with one more
stream.

Such a worker holds its streams to a time between two tokens and computes prompts in what their
steps leave of it (docs/design/pacing.md). It tells both; this brings what it told up to date with
what this router has sent since. Pure arithmetic over `fleet.worker_state`. Used by
`router.choosing.predict` and `router.choosing.split_rule`.
"""

import math

from pdserve.router.fleet.worker_state import WorkerState

# share of its time that a worker gives prompts when its streams leave none
LEAST_SHARE = 0.1
# share of the promised time that a step of one stream takes, of a worker that has not decoded yet
ASSUMED_SHARE = 0.5
# times the promised time: what a stream that comes by hand-off waits for the step under way. A
# worker's pace lets a step take up to 8, when its streams have saved so much
JOIN_STEPS = 4
FULL = 0.9  # of the promised time: a decode worker with longer steps should get no more streams
SPARE = 0.8  # of the promised time: a prefill worker that decodes may get streams up to here
SHORT_QUEUE_MS = 50.0  # about one prompt of 2,048 tokens on an H200


def base_step_ms(worker: WorkerState, more: int = 0) -> float:
    """Duration of a step of the decodes that it has or soon will have, and of so many more, without
    prompts; 0 when nothing decodes or the worker has no pace."""
    pace = worker.pace
    if pace is None:
        return 0.0
    added = worker.num_coming_decodes + more
    if pace.base_step_ms > 0:
        return max(pace.row_ms, pace.base_step_ms + pace.row_ms * added)
    fixed = worker.fixed_step_ms or ASSUMED_SHARE * pace.tpot_ms
    return fixed + pace.row_ms * added if added > 0 else 0.0


def prompt_speed(worker: WorkerState, full: float) -> float:
    """Prompt tokens per second beside its decodes. full: when nothing decodes."""
    pace = worker.pace
    base = base_step_ms(worker)
    if pace is None or not base or not pace.tpot_ms or pace.prompt_tokens_per_s <= 0:
        return full
    told = pace.prompt_tokens_per_s
    now = told * _share_left(base, pace.tpot_ms) / _share_left(pace.base_step_ms, pace.tpot_ms)
    return min(full, max(now, LEAST_SHARE * full))


def _share_left(base_ms: float, tpot_ms: float) -> float:
    return max(LEAST_SHARE, 1 - base_ms / tpot_ms)


def breaks_promise(worker: WorkerState) -> bool:
    """Whether one more stream makes its steps longer than it promises. (One that promises nothing
    holds its streams to what their steps take; 0 while nothing decodes.)"""
    pace = worker.pace
    return pace is not None and 0 < pace.tpot_ms < base_step_ms(worker, 1)


def spare_ms(worker: WorkerState, num_tokens: int) -> float:
    """How much later than its first token a stream may come here and still keep its promise over
    so many further tokens. It waits for the step that is under way then, in which prompts may use
    what others have saved. Without further tokens there is nothing to be late."""
    if worker.pace is None or num_tokens < 1:
        return math.inf
    tpot_ms = worker.pace.tpot_ms
    return num_tokens * (tpot_ms - base_step_ms(worker, 1)) - JOIN_STEPS * tpot_ms


def is_full(worker: WorkerState) -> bool:
    """Whether its streams leave it next to nothing."""
    return worker.pace is not None and base_step_ms(worker, 1) > FULL * worker.pace.tpot_ms


def may_take_whole(
    worker: WorkerState, queue_ms: float, decodes_are_full: bool, is_short: bool
) -> bool:
    """Whether a worker whose role is prefill may do a whole request. Used for placing only; its
    role stays. queue_ms: of prompts at it. is_short: the answer is too short for a hand-off, and
    keeps it only a few steps."""
    pace = worker.pace
    if pace is None or not (decodes_are_full or is_short):
        return False
    if worker.pace_decodes or is_short:
        return base_step_ms(worker, 1) <= SPARE * pace.tpot_ms
    return queue_ms <= SHORT_QUEUE_MS
