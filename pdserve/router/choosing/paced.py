"""Predicts how fast a paced worker takes prompts, and how long its steps get with one more stream.

A paced worker holds its streams to a time between two tokens, and computes prompts in the time that
their steps leave (docs/design/pacing.md). It reports both. This module updates the last report with
what this router has sent since. Pure arithmetic over `fleet.worker_state`. Used by
`router.choosing.predict` and `router.choosing.slack_rule`.
"""

import math

from pdserve.router.fleet.worker_state import WorkerState

# share of its time that a worker gives to prompts when its streams leave none
LEAST_SHARE = 0.1
# step of one stream at a worker that has not decoded yet, as a share of the promised time
ASSUMED_SHARE = 0.5
# how long a handed-off stream waits for the step under way at most, in multiples of the promised
# time. A worker's pace lets a step take up to 8 of them, when its streams have saved that much
JOIN_STEPS = 4
# share of the promised time: a decode worker with longer steps should get no more streams
FULL = 0.95
# share of the promised time: a prefill worker that decodes may get streams up to this step time
SPARE = 0.8
SHORT_QUEUE_MS = 50.0  # about one prompt of 2,048 tokens on an H200


def base_step_ms(worker: WorkerState, more: int = 0, in_ms: float = 0.0) -> float:
    """Predicts the duration of a step without prompts.

    It counts the decodes that the worker has or will soon have, and `more` further ones. `in_ms` is
    when the step runs: until then some of them have ended. Returns 0 if nothing decodes or the
    worker reports no pace.
    """
    pace = worker.pace
    if pace is None:
        return 0.0
    added = _coming_decodes(worker, pace.stream_ms, in_ms) + more
    if pace.base_step_ms > 0:
        return max(pace.row_ms, pace.base_step_ms + pace.row_ms * added)
    fixed = worker.fixed_step_ms or ASSUMED_SHARE * pace.tpot_ms
    return fixed + pace.row_ms * added if added > 0 else 0.0


def _coming_decodes(worker: WorkerState, stream_ms: float, in_ms: float) -> float:
    """Predicts how many more decodes than at its last report the worker has in so many
    milliseconds; may be negative.

    Its present streams end evenly over twice stream_ms, the mean time that they still take. That is
    also how long one lasts that comes. Those that come join evenly until then.
    """
    coming = worker.num_coming_decodes
    lasts_ms = 2 * stream_ms
    if in_ms <= 0 or lasts_ms <= 0 or not worker.can_decode:
        return coming
    ended = worker.num_running_told * min(1.0, in_ms / lasts_ms)
    return coming * min(1.0, lasts_ms / in_ms) - ended


def prompt_speed(worker: WorkerState, full: float) -> float:
    """Returns prompt tokens per second beside the worker's decodes.

    `full` is the speed when nothing decodes.
    """
    pace = worker.pace
    full = top_speed(worker, full)
    base = base_step_ms(worker)
    if pace is None or not base or not pace.tpot_ms or pace.prompt_tokens_per_s <= 0:
        return full
    told = pace.prompt_tokens_per_s
    now = told * _share_left(base, pace.tpot_ms) / _share_left(pace.base_step_ms, pace.tpot_ms)
    return min(full, max(now, LEAST_SHARE * full))


def top_speed(worker: WorkerState, full: float) -> float:
    """Returns prompt tokens per second if the worker's decodes hold nothing back. They are in every
    step, and so its chunks are short. `full` is the speed when nothing decodes."""
    top = worker.pace.top_tokens_per_s if worker.pace is not None else 0.0
    return min(full, top) if top > 0 else full


def _share_left(base_ms: float, tpot_ms: float) -> float:
    return max(LEAST_SHARE, 1 - base_ms / tpot_ms)


def breaks_promise(worker: WorkerState, in_ms: float) -> bool:
    """True if one more stream, in so many milliseconds, makes the worker's steps longer than it
    promises.

    A worker that promises nothing reports 1.5 times the duration of its present steps as `tpot_ms`,
    and 0 while nothing decodes.
    """
    pace = worker.pace
    return pace is not None and 0 < pace.tpot_ms < base_step_ms(worker, 1, in_ms)


def spare_ms(worker: WorkerState, num_tokens: int, in_ms: float) -> float:
    """Returns how late after its first token a stream may arrive here, in so many milliseconds, and
    still keep its promise.

    The lateness is made up over `num_tokens` further tokens; without any there is nothing to be
    late. The stream waits for the step under way at its arrival. That takes longer than promised
    only if prompts use the time that other streams have saved.
    """
    if worker.pace is None or num_tokens < 1:
        return math.inf
    tpot_ms = worker.pace.tpot_ms
    wait_ms = JOIN_STEPS * tpot_ms
    if worker.pace.top_tokens_per_s > 0:
        saved_ms = 1000 * worker.pace.burst_tokens / worker.pace.top_tokens_per_s
        wait_ms = min(wait_ms, tpot_ms + saved_ms)
    return num_tokens * (tpot_ms - base_step_ms(worker, 1, in_ms)) - wait_ms


def is_full(worker: WorkerState, in_ms: float) -> bool:
    """True if in so many milliseconds the worker's streams leave it next to no time."""
    return worker.pace is not None and base_step_ms(worker, 1, in_ms) > FULL * worker.pace.tpot_ms


def may_take_whole(
    worker: WorkerState, queue_ms: float, decodes_are_full: bool, is_short: bool
) -> bool:
    """True if a worker whose role is prefill may do a whole request.

    This is for placing only; the worker keeps its role. `queue_ms` is the time of the prompts that
    wait there. `is_short` means that the answer is too short for a hand-off, so it occupies the
    worker for a few steps only.
    """
    pace = worker.pace
    if pace is None or not (decodes_are_full or is_short):
        return False
    if worker.pace_decodes or is_short:
        return base_step_ms(worker, 1) <= SPARE * pace.tpot_ms
    return queue_ms <= SHORT_QUEUE_MS
