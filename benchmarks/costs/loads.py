"""Prefill and decode workers under an open loop of requests, and hand-overs, by the cost model.

A first token comes after a prompt's own time and a queue for the prefill workers (Sakasegawa's
formula for arrivals at random and services of one length, halved since these do not vary); a
decode worker has as many sequences as arrive while one is served. What transfers do to steps, and
where a router sends whom, is left out. Used by cost_model.py for the rows of
benchmarks/several_gpus.py.
"""

import math
from dataclasses import dataclass

from benchmarks.costs.run import MAX_SEQS, run
from pdserve.plan.costs.step import ITEM, CostModel, Step


@dataclass(frozen=True)
class Workers:
    """num: workers of this kind, each a group of GPUs."""

    num: int
    model: CostModel


@dataclass(frozen=True)
class Load:
    """Seconds on average; ttft_s is None when prompts come faster than they are computed."""

    ttft_s: float | None
    tpot_s: float
    prefill_share: float  # of the prefill workers' time


def split_load(prefill: Workers, decode: Workers, rate: float, num_in: int, num_out: int) -> Load:
    """rate: requests per second. ValueError when the decode workers cannot keep up."""
    prompt = run(prefill.model, 1, num_in, 1)
    # Of prompts one after another the host's turn is hidden, and stages work on different ones.
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
    """Sequences in flight = rate x time of each (Little's law), found by repetition."""
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
            raise ValueError(f"{decode.num} decode workers cannot serve {rate:g} requests a second")
    return seconds


def hand_over_s(prefill: CostModel, decode: CostModel, num_tokens: int) -> float:
    """Seconds until a prompt's rows are there: each rank of the side with fewer moves its share,
    all at once."""
    spec = prefill.spec
    per_token = 2 * spec.num_kv_heads * spec.head_dim * spec.num_layers * ITEM
    if spec.latent is not None:
        per_token = (spec.latent.kv_rank + spec.latent.rope_dim) * spec.num_layers * ITEM
    links = min(prefill.degrees.num_gpus, decode.degrees.num_gpus)
    rates = prefill.rates
    return rates.hand_over_s + num_tokens * per_token / links / rates.hand_over_bytes_per_s
