"""Upper bounds of a layout's request rate, from step times alone. They show which layouts are worth
a simulation.

    decode: the largest batch whose step keeps the TPOT, over the time that a request decodes
    all:    r x prompt time + r / decode capacity x decoding workers <= workers

In the second line, workers that decode also compute prompts in their spare time, as in the router.
Queues, hand-offs and bursts are left out, so it bounds from above. `candidates` calls this module.
"""

from pdserve.plan.layouts.layout import Part, Slo
from pdserve.plan.loads import Load
from pdserve.plan.profile.step_times import StepLoad, StepTimes

MAX_BATCH = 512
MOST_CHUNK = 8192  # tokens per step, as in EngineConfig


def prompt_s(times: StepTimes, num_tokens: float) -> float:
    """Returns the seconds to compute a prompt alone."""
    left = round(num_tokens)
    start = 0
    seconds = 0.0
    while left > 0:
        rows = min(left, MOST_CHUNK)
        seconds += times.seconds(StepLoad(0, 0, ((start, rows),)))
        start += rows
        left -= rows
    return seconds


def decode_rate(part: Part, load: Load, slo: Slo) -> float:
    """Returns the requests per second that one worker can decode within the TPOT. 0: it never
    can."""
    times = StepTimes(part.scaled.profile)
    context = load.mean_in + load.mean_out / 2
    homes = part.degrees.dp
    best = 0.0
    batch = 1
    while (
        batch <= MAX_BATCH and batch * (load.mean_in + load.mean_out) <= part.scaled.num_kv_tokens
    ):
        seconds = times.seconds(StepLoad(batch, round(batch * context)))
        if seconds * 1e3 > slo.tpot_ms:
            break
        best = max(best, homes * batch / (load.mean_out * seconds))
        batch = batch + max(1, batch // 8)
    return best


def bound(parts: tuple[Part, ...], load: Load, slo: Slo) -> float:
    """Returns the bound in requests per second. 0: even a lone request breaks a promise."""
    prefills = [part for part in parts if part.role != "decode"]
    decodes = [part for part in parts if part.role != "prefill"]
    fastest = min(prompt_s(StepTimes(part.scaled.profile), load.mean_in) for part in prefills)
    if fastest * 1e3 > slo.ttft_ms:
        return 0.0
    decoded = sum(part.count * decode_rate(part, load, slo) for part in decodes)
    if not decoded:
        return 0.0
    speed = 0.0  # prompts per second of all workers if they did nothing else
    for part in parts:
        seconds = prompt_s(StepTimes(part.scaled.profile), load.mean_in)
        speed += part.count * part.degrees.dp / seconds
    decoding = sum(
        part.count * part.degrees.dp / prompt_s(StepTimes(part.scaled.profile), load.mean_in)
        for part in decodes
    )
    return min(decoded, speed / (1 + decoding / decoded))


def split_bound(parts: tuple[Part, ...], load: Load, slo: Slo) -> float:
    """Returns the bound if workers that decode compute no prompts. It tells apart layouts with
    equal bounds, which differ in how many of their workers prefill."""
    prefilled = sum(
        part.count * part.degrees.dp / prompt_s(StepTimes(part.scaled.profile), load.mean_in)
        for part in parts
        if part.role != "decode"
    )
    decoded = sum(
        part.count * decode_rate(part, load, slo) for part in parts if part.role != "prefill"
    )
    return min(prefilled, decoded)
