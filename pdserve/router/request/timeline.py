"""Where the time and the bytes of one prompt went: what was heard of its legs, and the report that
is made of it.

Pure bookkeeping, a few entries a leg and none a token: knows no workers and no metrics. Kept by
`router.request.request_run`; `router.metrics` and the report read the same entries. All times are
seconds of perf_counter(), or lengths; what workers say of theirs (LegTimes, Arrived) are lengths by
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
    """One event of how a leg's worker came by the prompt's KV; see `protocol.events.Arrived`, whose
    fields these are.

    transfer_s: of seconds, what was not waiting for blocks. read_s: how long reads of it were under
    way, also before the Submit; gb_per_s: bytes over that, in 10^9 a second (None: nothing was
    read). lag_s: None but for "p2p".
    """

    source: str
    bytes: int
    early_bytes: int
    descriptors: int
    transport: str
    cached_tokens: int
    seconds: float
    wait_s: float
    transfer_s: float
    read_s: float
    lag_s: float | None
    gb_per_s: float | None
    reason: str
    detail: str


class LegReport(msgspec.Struct, frozen=True, kw_only=True):
    """One Submit. prepared_s, submitted_s, ended_s: since admission; None: did not happen (yet).

    end: "finished" (all its choices have ended), "handed over" (the decode worker needs it no
    longer), "cancelled" or "lost" (reason says why), or None while it runs. queue_s to device_s:
    LegTimes, as its worker told last (None: it never did); queue_s holds the wait for blocks and
    transfer. complete: these are up to the leg's end.
    """

    attempt: int
    worker: str
    role: str
    phase: Phase
    prepared_s: float | None
    submitted_s: float | None
    ended_s: float | None
    end: End | None
    reason: str
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    device_s: float | None
    complete: bool
    kv: list[KVSource]


class PromptTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt. admission_s: from the call until the prompt was checked and tokenised; all other
    times count from there. outcome: "ok", "cancelled", or the kind of its failure; None while it
    runs.

    total_s: to the last token here, of which workers have told queue, prefill and decode of all
    legs; the rest is transport_s (messages both ways, this event loop, text, the client's own
    pace), or unreported_s when some worker did not tell all of its time: the other one is None.
    """

    request_id: str
    prompt: int
    outcome: str | None
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    admission_s: float
    first_token_s: float | None
    total_s: float
    transport_s: float | None
    unreported_s: float | None
    failovers: int
    legs: list[LegReport]


@dataclass(frozen=True, slots=True)
class Failover:
    """An attempt on these workers was given up, for another one. at: perf_counter(). worker: the
    one that failed."""

    at: float
    reason: str
    worker: str


@dataclass(slots=True)
class _Leg:
    """owes_times: tokens of it are, or will be, newer than `times`."""

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
    """Legs are named by their attempt."""

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
        """Its worker goes on beyond what it told last."""
        self._legs[attempt].owes_times = True

    def told(self, attempt: int, times: LegTimes) -> None:
        leg = self._legs[attempt]
        leg.times = times
        leg.owes_times = False

    def arrived(self, event: Arrived) -> None:
        self._legs[event.attempt].arrivals.append(event)

    def ended(self, attempt: int, end: End, now: float, reason: str = "") -> None:
        """The first of several ends counts."""
        leg = self._legs[attempt]
        if leg.end is None:
            leg.end = end
            leg.ended = now
            leg.reason = reason

    @property
    def times(self) -> list[LegTimes]:
        """What workers have told, a leg each."""
        return [leg.times for leg in self._legs.values() if leg.times is not None]

    @property
    def complete(self) -> bool:
        """Whether the workers have told all of their time."""
        return not any(leg.owes_times for leg in self._legs.values())

    @property
    def is_troubled(self) -> bool:
        """Whether a worker or a pull failed."""
        return bool(self.failovers) or any(
            e.source == "recompute" for leg in self._legs.values() for e in leg.arrivals
        )

    def legs(self, admitted: float) -> list[LegReport]:
        """admitted: perf_counter() of what their times count from."""
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
