"""Makes the spans of a call: a root, below it one per leg of its prompt, and below these what the
leg's time went into.

    call -- admission
         -- prefill leg -- queue, prefill, hand-off
         -- decode leg  -- queue -- kv p2p
                        -- decode

In a call of several prompts each prompt has a span in between. Pure functions of a CallTrace; knows
no library. All moments are of this router's perf_counter(). Workers report lengths; these are laid
end to end from the moment when the leg was submitted, up to the leg's end. Called by `traces.otlp`,
on its own thread.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pdserve.router.request.timeline import KVSource, LegReport
from pdserve.router.request.traces.call_trace import CallTrace, PromptEnd

Value = str | int | float | bool | Sequence[str]
Attributes = dict[str, Value]

PROVIDER = "pdserve"  # the value of gen_ai.provider.name


@dataclass(slots=True)
class SpanEvent:
    name: str
    at: float
    attributes: Attributes = field(default_factory=dict)


@dataclass(slots=True)
class Span:
    """A span. `parent` is None for the root. `error` describes what went wrong; None: nothing."""

    name: str
    start: float
    end: float
    parent: "Span | None"
    attributes: Attributes = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    error: str | None = None


def spans_of(call: CallTrace, model: str) -> list[Span]:
    """Returns the spans, parents before their children. `model` is the name that clients use."""
    root = Span(
        f"{call.operation} {model}",
        call.received,
        call.ended,
        None,
        {
            "gen_ai.operation.name": call.operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": call.request_id,
            **{f"gen_ai.request.{name}": value for name, value in call.sampling.items()},
            "pdserve.outcome": _outcome(call),
        },
    )
    spans = [root]
    ends = sorted(call.prompts, key=lambda end: end.timeline.prompt)
    if call.num_prompts > 1:
        root.attributes["pdserve.prompts"] = call.num_prompts
        for end in ends:
            spans += _prompt_spans(end, call.received, root)
    elif ends:
        spans += _below_prompt(ends[0], call.received, root)
    if ends:
        root.attributes |= _usage(ends) | _latencies(ends, call)
    if call.refused is not None:
        root.attributes["http.response.status_code"] = call.refused.status
    _set_error(root, _error_type(call))
    return spans


def _outcome(call: CallTrace) -> str:
    """Returns the outcome of the first prompt that did not end well, or "ok".

    If not all prompts of a call began, its client left.
    """
    if call.refused is not None:
        return "refused"
    outcomes = [end.timeline.outcome or "internal" for end in call.prompts]
    if len(outcomes) < max(1, call.num_prompts):
        outcomes.append("cancelled")
    return next((outcome for outcome in outcomes if outcome != "ok"), "ok")


def _error_type(call: CallTrace) -> str | None:
    if call.refused is not None:
        return call.refused.reason
    outcome = _outcome(call)
    return None if outcome == "ok" else outcome


def _set_error(span: Span, kind: str | None) -> None:
    if kind is not None:
        span.error = kind
        span.attributes["error.type"] = kind


def _prompt_spans(end: PromptEnd, received: float, root: Span) -> Iterator[Span]:
    timeline = end.timeline
    span = Span(
        "prompt",
        received,
        min(end.admitted + timeline.total_s, root.end),
        root,
        {
            "pdserve.prompt": timeline.prompt,
            "pdserve.outcome": timeline.outcome or "internal",
            **_usage([end]),
        },
    )
    _set_error(span, None if timeline.outcome == "ok" else timeline.outcome)
    yield span
    yield from _below_prompt(end, received, span)


def _below_prompt(end: PromptEnd, received: float, parent: Span) -> Iterator[Span]:
    """Makes the spans below a prompt.

    `parent` is the prompt's span, or the call's if it has one prompt. It gets the events.
    """
    timeline = end.timeline
    parent.attributes["gen_ai.request.id"] = timeline.request_id
    parent.attributes["pdserve.failovers"] = timeline.failovers
    if timeline.first_token_s is not None:
        parent.events.append(SpanEvent("first token", end.admitted + timeline.first_token_s))
    for failover in end.failovers:
        what: Attributes = {
            "pdserve.failover.reason": failover.reason,
            "pdserve.worker.id": failover.worker,
        }
        parent.events.append(SpanEvent("failover", failover.at, what))
    if timeline.outcome == "cancelled":
        parent.events.append(SpanEvent("cancelled", parent.end))
    parent.events.sort(key=lambda event: event.at)
    yield Span("admission", received, end.admitted, parent)
    for number, leg in enumerate(timeline.legs):
        yield from _leg_spans(leg, _taken_over(timeline.legs[number:]), end, parent)


def _taken_over(legs: Sequence[LegReport]) -> float | None:
    """Returns when the decode leg that follows the first of these, a prefill leg, was submitted.

    Both belong to one attempt at the request. None: that never happened.
    """
    if legs[0].phase != "prefill":
        return None
    for leg in legs[1:]:
        if leg.phase != "decode":
            return None
        if leg.submitted_s is not None:
            return leg.submitted_s
    return None


def _leg_spans(
    leg: LegReport, taken_over_s: float | None, end: PromptEnd, parent: Span
) -> Iterator[Span]:
    zero = end.admitted
    begins = [moment for moment in (leg.prepared_s, leg.submitted_s) if moment is not None]
    ended = min(zero + (end.timeline.total_s if leg.ended_s is None else leg.ended_s), parent.end)
    span = Span(
        f"{leg.phase} leg",
        min(zero + min(begins, default=0.0), ended),
        ended,
        parent,
        _leg_attributes(leg),
        error=leg.reason if leg.end == "lost" else None,
    )
    if leg.end == "lost":
        span.attributes["error.type"] = "worker_lost"
    yield span
    if leg.submitted_s is None:
        return
    submitted = min(zero + leg.submitted_s, ended)
    if leg.prepared_s is not None:
        span.events.append(SpanEvent("submitted", submitted))
    computed = ended if taken_over_s is None else min(zero + taken_over_s, ended)
    yield from _time_spans(leg, submitted, computed, span)
    if taken_over_s is not None:
        yield Span("hand-off", computed, ended, span)


def _time_spans(leg: LegReport, submitted: float, until: float, parent: Span) -> Iterator[Span]:
    """Makes spans of the times that the worker reported; none if it was lost before."""
    lengths = [("queue", leg.queue_s), ("prefill", leg.prefill_s), ("decode", leg.decode_s)]
    if leg.phase == "prefill":
        del lengths[-1]  # it is microseconds, before the hand-off
    at = submitted
    queue = parent
    for name, length in lengths:
        if length is None or (not length and name != "queue"):
            continue
        span = Span(name, at, min(at + length, until), parent)
        yield span
        at = span.end
        if name == "queue":
            queue = span
    for kv in leg.kv:
        yield _kv_span(kv, submitted, queue)


def _kv_span(kv: KVSource, submitted: float, parent: Span) -> Span:
    start = min(submitted + kv.wait_s, parent.end)
    attributes: Attributes = {
        "pdserve.kv.source": kv.source,
        "pdserve.kv.bytes": kv.bytes,
        "pdserve.kv.early_bytes": kv.early_bytes,
        "pdserve.kv.cached_tokens": kv.cached_tokens,
        "pdserve.kv.transfer_s": kv.transfer_s,
        "pdserve.kv.read_s": kv.read_s,
    }
    if kv.transport:
        attributes["pdserve.kv.transport"] = kv.transport
    if kv.lag_s is not None:
        attributes["pdserve.kv.lag_s"] = kv.lag_s
    span = Span(
        f"kv {kv.source}", start, min(start + kv.transfer_s, parent.end), parent, attributes
    )
    if kv.source == "recompute":
        span.attributes["error.type"] = kv.reason
        span.error = f"{kv.reason}: {kv.detail}" if kv.detail else kv.reason
    return span


def _leg_attributes(leg: LegReport) -> Attributes:
    given: dict[str, Value | None] = {
        "pdserve.worker.id": leg.worker,
        "pdserve.worker.role": leg.role,
        "pdserve.leg.attempt": leg.attempt,
        "pdserve.leg.phase": leg.phase,
        "pdserve.leg.end": leg.end,
        "pdserve.leg.reason": leg.reason or None,
        "pdserve.leg.complete": leg.complete,
        "pdserve.leg.queue_s": leg.queue_s,
        "pdserve.leg.prefill_s": leg.prefill_s,
        "pdserve.leg.decode_s": leg.decode_s,
        "pdserve.leg.device_s": leg.device_s,
    }
    return {name: value for name, value in given.items() if value is not None}


def _usage(ends: Sequence[PromptEnd]) -> Attributes:
    """Token counts, by the names of the conventions and by their older names, which vLLM
    exports."""
    prompt = sum(end.timeline.prompt_tokens for end in ends)
    generated = sum(end.timeline.generated_tokens for end in ends)
    return {
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": generated,
        "gen_ai.usage.cache_read.input_tokens": sum(end.timeline.cached_tokens for end in ends),
        "gen_ai.usage.prompt_tokens": prompt,
        "gen_ai.usage.completion_tokens": generated,
        "gen_ai.response.finish_reasons": [
            reason or "error" for end in ends for reason in end.finish_reasons
        ],
    }


def _latencies(ends: Sequence[PromptEnd], call: CallTrace) -> Attributes:
    """Latencies in seconds, by vLLM's names.

    For several prompts: the first token of any, and sums of the other times.
    """
    legs = [leg for end in ends for leg in end.timeline.legs]
    queue = sum(leg.queue_s or 0.0 for leg in legs)
    prefill = sum(leg.prefill_s or 0.0 for leg in legs)
    decode = sum(leg.decode_s or 0.0 for leg in legs)
    firsts = [
        end.admitted + end.timeline.first_token_s - call.received
        for end in ends
        if end.timeline.first_token_s is not None
    ]
    latencies: Attributes = {
        "gen_ai.latency.e2e": call.ended - call.received,
        "gen_ai.latency.time_in_queue": queue,
        "gen_ai.latency.time_in_model_prefill": prefill,
        "gen_ai.latency.time_in_model_decode": decode,
        "gen_ai.latency.time_in_model_inference": prefill + decode,
    }
    if firsts:
        latencies["gen_ai.latency.time_to_first_token"] = min(firsts)
    return latencies
