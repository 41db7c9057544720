"""Predicts prefill and decode workers under an open loop of requests, and hand-offs, by the cost
model.

A first token comes after the queue for the prefill workers and the prompt's own time. The queue is
Sakasegawa's formula for random arrivals, halved because services have equal lengths. A decode
worker has as many sequences as arrive while one is served. The effect of transfers on steps and the
router's choices are left out. cost_model.py uses this module for the rows of
benchmarks/several_gpus.py.
"""

import math
from dataclasses import dataclass

from benchmarks.costs.run import MAX_SEQS, run
from pdserve.plan.costs.step import ITEM, CostModel, Step


@dataclass(frozen=True)
class Workers:
    """A number of equal workers, each of which is a group of GPUs."""

    num: int
    model: CostModel


@dataclass(frozen=True)
class Load:
    """Mean seconds under a load."""

    ttft_s: float | None  # None: prompts arrive faster than they are computed
    tpot_s: float
    prefill_share: float  # share of the time in which prefill workers are busy


def split_load(prefill: Workers, decode: Workers, rate: float, num_in: int, num_out: int) -> Load:
    """Predicts a load of `rate` requests per second. Raises ValueError if the decode workers cannot
    keep up."""
    prompt = run(prefill.model, 1, num_in, 1)
    # If prompts follow each other, the host's turn is hidden and stages work on different prompts.
    service = sum(part for piece, part in prompt.pieces.items() if piece != "idle")
    share = rate * service / prefill.num
    ttft = None
    if share < 1:
        servers = prefill.num
        power = math.sqrt(2 * (servers + 1)) - 1
        wait = service / 2 * share**power / (servers * (1 - share))
        ttft = prompt.seconds + wait + prefill.model.rates.http_s
    return Load(ttft, _tpot(decode, rate, num_in, num_out), share)


def _tpot(decode: Workers, rate: float, num_in: int, num_out: int) -> float:
    """Finds the TPOT by iteration: sequences in flight = rate x time of each (Little's law)."""
    model = decode.model
    limit = min(MAX_SEQS, model.room() // (num_in + num_out))
    running = 1.0
    for _ in range(100):
        groups = model.degrees.pp
        num = max(round(running / groups), 1)
        step = Step(num, num * (num_in + num_out / 2))
        seconds = sum(sum(stage.values()) for stage in model.stages(step))
        if groups > 1:
            seconds += model.rates.host_step_s + model.rates.host_row_s * num
        running = rate / decode.num * num_out * seconds
        if running > limit:
            raise ValueError(f"{decode.num} decode workers cannot serve {rate:g} requests/s")
    return seconds


def hand_over_s(prefill: CostModel, decode: CostModel, num_tokens: int) -> float:
    """Returns the seconds until a prompt's rows have arrived. Each rank of the side with fewer
    ranks moves its share, all at the same time."""
    spec = prefill.spec
    per_token = 2 * spec.num_kv_heads * spec.head_dim * spec.num_layers * ITEM
    if spec.latent is not None:
        per_token = (spec.latent.kv_rank + spec.latent.rope_dim) * spec.num_layers * ITEM
    links = min(prefill.degrees.num_gpus, decode.degrees.num_gpus)
    rates = prefill.rates
    return rates.hand_over_s + num_tokens * per_token / links / rates.hand_over_bytes_per_s
