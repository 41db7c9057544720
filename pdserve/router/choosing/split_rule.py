"""Decides whether to split a request where D does not pace its steps (several pipeline stages).

Split, the prompt is computed at P and its rows move to D; whole, D computes it beside its decodes.
Where D paces its steps, `slack_rule` decides. Two costs are compared:

    split: P's queue + computing + transfer + HANDOFF_MS + what D has to do
    whole: D's queue + computing
           + STALL_WEIGHT of the computing for each sequence that waits for it meanwhile

The cheaper way wins, as long as prompts take no more of D's time than `StallBudget` grants.
docs/design/routing.md says where the constants come from. Sends nothing; called by
`router.choosing.choose`.
"""

from typing import Literal

from pdserve.router.choosing.predict import Predictor
from pdserve.router.fleet.worker_state import WorkerState

Mode = Literal["auto", "always", "never"]
Reason = Literal[
    "pays",
    "late",
    "budget",
    "always",
    "cheaper",
    "spare",
    "never",
    "short",
    "resumed",
    "no-prefill",
    "embed",
]

HANDOFF_MS = 10.0  # ticket, router, Submit, and the step that D is in the middle of
STALL_WEIGHT = 0.15


def split_ms(prefill: WorkerState, decode: WorkerState, predictor: Predictor) -> float:
    """Time until `decode` goes on with what `prefill` computes."""
    at_prefill = (
        predictor.queue_ms(prefill) + predictor.compute_ms(prefill) + predictor.memory_ms(prefill)
    )
    at_decode = (
        predictor.queue_ms(decode) + predictor.decode_load_ms(decode) + predictor.memory_ms(decode)
    )
    return at_prefill + predictor.transfer_ms(decode, prefill) + HANDOFF_MS + at_decode


def whole_ms(worker: WorkerState, predictor: Predictor) -> float:
    """Time until the worker decodes a prompt that it computes itself, plus what that costs the
    sequences it decodes already."""
    compute = predictor.compute_ms(worker)
    own = (
        predictor.queue_ms(worker)
        + compute
        + predictor.decode_load_ms(worker)
        + predictor.memory_ms(worker)
    )
    return own + STALL_WEIGHT * worker.num_decodes * compute


def compare(
    prefill: WorkerState, decode: WorkerState, whole: WorkerState, predictor: Predictor, now: float
) -> Reason:
    """Returns "pays" or "budget" to split, "cheaper" to keep the request whole."""
    if split_ms(prefill, decode, predictor) <= whole_ms(whole, predictor):
        return "pays"
    if whole.num_decodes and not whole.stalls.allows(predictor.compute_ms(whole), now):
        return "budget"
    return "cheaper"
