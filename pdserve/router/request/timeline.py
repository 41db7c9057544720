"""Where the time and the bytes of one prompt went: what workers reported of its legs, and the
report that is made from it.

Pure bookkeeping, with a few entries per leg and none per token. Knows no workers and no metrics.
Kept by `router.request.request_run`; `router.metrics` and the report read the same entries. All
times are seconds of perf_counter(), or lengths. Workers' times (LegTimes, Arrived) are lengths by
their own clocks.
"""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from pdserve.protocol.events import Arrived, LegTimes
from pdserve.protocol.request_key import Phase
from pdserve.router.times import rounded

End = Literal["finished", "handed over", "cancelled", "lost"]


class KVSource(msgspec.Struct, frozen=True, kw_only=True):
    """One event that brought the prompt's KV to a leg's worker. The fields are those of
    `protocol.events.Arrived`."""

    source: str
    bytes: int
    early_bytes: int
    descriptors: int
    transport: str
    cached_tokens: int
    seconds: float
    wait_s: float
    # The part of `seconds` that was not spent waiting for blocks.
    transfer_s: float
    # Time during which reads were under way, including reads before the Submit.
    read_s: float
    # None unless source is "p2p".
    lag_s: float | None
    # Bytes over read_s, in 10^9 per second; None if nothing was read.
    gb_per_s: float | None
    reason: str
    detail: str


class LegReport(msgspec.Struct, frozen=True, kw_only=True):
    """One Submit.

    The times prepared_s, submitted_s and ended_s count from admission; None: it did not happen
    (yet). queue_s to device_s are the LegTimes that the worker reported last; None: it never did.
    """

    attempt: int
    worker: str
    role: str
    phase: Phase
    prepared_s: float | None
    submitted_s: float | None
    ended_s: float | None
    # "finished": all its choices have ended. "handed over": the decode worker no longer needs it.
    # "cancelled" or "lost": `reason` says why. None: it runs.
    end: End | None
    reason: str
    # Includes the wait for blocks and the transfer.
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    device_s: float | None
    # True if the LegTimes reach up to the leg's end.
    complete: bool
    kv: list[KVSource]


class PromptTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt. All times but admission_s count from its admission."""

    request_id: str
    prompt: int
    # "ok", "cancelled", or the kind of its failure; None while it runs.
    outcome: str | None
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    # Time from the call's arrival until the prompt was checked and tokenised.
    admission_s: float
    first_token_s: float | None
    # Time to the last token at this router. Workers report queue, prefill and decode of all legs.
    total_s: float
    # The rest of total_s: messages both ways, this event loop, text, the client's own pace. None
    # if some worker did not report all of its time.
    transport_s: float | None
    # The rest of total_s in that case; otherwise None.
    unreported_s: float | None
    failovers: int
    legs: list[LegReport]


@dataclass(frozen=True, slots=True)
class Failover:
    """The end of an attempt that was given up for another one."""

    at: float  # perf_counter().
    reason: str
    worker: str  # The worker that failed.


@dataclass(slots=True)
class _Leg:
    """One leg. `owes_times` is True if tokens of it are, or will be, newer than `times`."""

    worker: str
    role: str
    phase: Phase
    prepared: float | None = None
    submitted: float | None = None
    ended: float | None = None
    end: End | None = None
    reason: str = ""
    times: LegTimes | None = None
    owes_times: bool = False
    arrivals: list[Arrived] = field(default_factory=list)


class Timeline:
    """The timeline of one prompt. Attempts name the legs."""

    __slots__ = ("_legs", "failovers")

    def __init__(self) -> None:
        self._legs: dict[int, _Leg] = {}
        self.failovers: list[Failover] = []

    def opened(self, attempt: int, worker: str, role: str, phase: Phase) -> None:
        self._legs[attempt] = _Leg(worker, role, phase)

    def prepared(self, attempt: int, now: float) -> None:
        self._legs[attempt].prepared = now

    def submitted(self, attempt: int, now: float) -> None:
        self._legs[attempt].submitted = now
        self.owes_times(attempt)

    def owes_times(self, attempt: int) -> None:
        """Notes that the leg's worker goes on beyond its last report of times."""
        self._legs[attempt].owes_times = True

    def told(self, attempt: int, times: LegTimes) -> None:
        leg = self._legs[attempt]
        leg.times = times
        leg.owes_times = False

    def arrived(self, event: Arrived) -> None:
        self._legs[event.attempt].arrivals.append(event)

    def ended(self, attempt: int, end: End, now: float, reason: str = "") -> None:
        """Notes how a leg ended; the first of several ends counts."""
        leg = self._legs[attempt]
        if leg.end is None:
            leg.end = end
            leg.ended = now
            leg.reason = reason

    @property
    def times(self) -> list[LegTimes]:
        """The times that workers have reported, one entry per leg."""
        return [leg.times for leg in self._legs.values() if leg.times is not None]

    @property
    def complete(self) -> bool:
        """True if the workers have reported all of their time."""
        return not any(leg.owes_times for leg in self._legs.values())

    @property
    def is_troubled(self) -> bool:
        """True if a worker or a pull failed."""
        return bool(self.failovers) or any(
            e.source == "recompute" for leg in self._legs.values() for e in leg.arrivals
        )

    def legs(self, admitted: float) -> list[LegReport]:
        """Reports on all legs; their times count from `admitted` (perf_counter())."""
        return [_leg_report(attempt, leg, admitted) for attempt, leg in self._legs.items()]


def _leg_report(attempt: int, leg: _Leg, admitted: float) -> LegReport:
    def since(moment: float | None) -> float | None:
        return None if moment is None else rounded(moment - admitted)

    queue_s, prefill_s, decode_s, device_s = _times(leg.times)
    return LegReport(
        attempt=attempt,
        worker=leg.worker,
        role=leg.role,
        phase=leg.phase,
        prepared_s=since(leg.prepared),
        submitted_s=since(leg.submitted),
        ended_s=since(leg.ended),
        end=leg.end,
        reason=leg.reason,
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        device_s=device_s,
        complete=not leg.owes_times,
        kv=[_kv_source(event) for event in leg.arrivals],
    )


def _times(told: LegTimes | None) -> tuple[float | None, ...]:
    if told is None:
        return None, None, None, None
    return tuple(
        rounded(seconds) for seconds in (told.queue_s, told.prefill_s, told.decode_s, told.device_s)
    )


def _kv_source(event: Arrived) -> KVSource:
    return KVSource(
        source=event.source,
        bytes=event.num_bytes,
        early_bytes=event.num_early_bytes,
        descriptors=event.num_descriptors,
        transport=event.transport,
        cached_tokens=event.cached_tokens,
        seconds=rounded(event.seconds),
        wait_s=rounded(event.wait_s),
        transfer_s=rounded(event.seconds - event.wait_s),
        read_s=rounded(event.read_s),
        lag_s=rounded(event.lag_s) if event.source == "p2p" else None,
        gb_per_s=round(event.num_bytes / event.read_s / 1e9, 3)
        if event.num_bytes and event.read_s
        else None,
        reason=event.reason,
        detail=event.detail,
    )
