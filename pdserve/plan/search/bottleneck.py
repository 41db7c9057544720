"""Names what limits a layout, from the lowest rate at which it breaks its promises."""

from pdserve.plan.layouts.layout import Layout
from pdserve.plan.search.goodput import Goodput
from pdserve.plan.simulation.jobs import WorkerUse

FULL = 0.95  # share of a KV cache in use
BUSY = 0.85


def bottleneck(layout: Layout, goodput: Goodput) -> str:
    point = goodput.beyond or goodput.best
    if point is None:
        return "nothing was simulated"
    outcome = point.outcome
    decodes = [use for use in outcome.uses if use.role != "prefill"]
    prefills = [use for use in outcome.uses if use.role == "prefill"]
    if max(use.kv_peak for use in decodes) > FULL:
        return "memory: the KV cache of workers that decode is full"
    if outcome.missed_ttft >= outcome.missed_tpot:
        if prefills and _mean(prefills) > BUSY:
            return f"prefill: P computes prompts {_mean(prefills):.0%} of its time"
        share = sum(use.prompts for use in outcome.uses) / len(outcome.uses)
        return f"first tokens: prompts queue (workers compute them {share:.0%} of their time)"
    share = sum(use.prompts for use in decodes) / len(decodes)
    if share > 0.1:
        return f"next tokens: prompts take {share:.0%} of the time of workers that decode"
    return "decode: steps of this many sequences take longer than the TPOT"


def _mean(uses: list[WorkerUse]) -> float:
    return sum(use.busy for use in uses) / len(uses)
