"""The legs at this worker: which requests routers have here and since when, and which were
cancelled before they came.

A leg is one Submit. Each leg has a `LegClock`. A Cancel that comes before its Submit leaves a
tombstone. Asks the engine which legs it holds; knows no phases, and sends nothing. Used by
`loop.WorkerLoop`, once per turn, never per token.
"""

import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Set

import msgspec

from pdserve.engine.engine import Engine
from pdserve.protocol.commands import Submit
from pdserve.protocol.events import Delta, Embedded, LegsWaiting, PromptScored
from pdserve.protocol.request_key import LegName, RequestKey
from pdserve.worker.leg_clock import LegClock
from pdserve.worker.metrics import WorkerMetrics
from pdserve.worker.outbox import Session

TOMBSTONE_S = 60.0


class WorkerLegs:
    """The legs of all sessions, and how long the device has computed for them."""

    def __init__(self, engine: Engine, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._clocks: dict[Session, dict[RequestKey, LegClock]] = defaultdict(dict)
        self._new: list[RequestKey] = []  # begun since `waiting_new`, and with a prompt to compute
        self._device_seconds = 0.0
        self._num_steps_told = 0
        self._tombstones: OrderedDict[RequestKey, tuple[float, tuple[int, ...] | None]] = (
            OrderedDict()
        )

    def is_here(self, key: RequestKey) -> bool:
        """True if the leg has begun and is not yet forgotten."""
        return key in self._clocks.get((key.router_id, key.session), ())

    def is_over(self, key: RequestKey) -> bool:
        """True if the leg was cancelled, wholly or in part, before it came."""
        return key in self._tombstones

    def without_cancelled(self, submit: Submit) -> Submit | None:
        """Returns the Submit without the choices that were cancelled before it came; None if none
        is left.

        Removes the tombstone.
        """
        cancelled = self._tombstones.pop(submit.key, None)
        if cancelled is None:
            return submit
        choices = cancelled[1]
        starts = (
            () if choices is None else tuple(s for s in submit.starts if s.choice not in choices)
        )
        return msgspec.structs.replace(submit, starts=starts) if starts else None

    def begin(self, submit: Submit, arrived: float) -> None:
        """Starts the clock of a leg that arrived at this monotonic time."""
        key = submit.key
        clock = LegClock(arrived, [s.choice for s in submit.starts], submit.phase)
        self._clocks[key.router_id, key.session][key] = clock
        if submit.phase != "decode":
            self._new.append(key)

    def forget(self, key: RequestKey) -> None:
        """Removes a leg that could not begin."""
        del self._clocks[key.router_id, key.session][key]

    def bury(self, key: RequestKey, choices: tuple[int, ...] | None) -> None:
        """Remembers for a while that these choices (None: all) were cancelled before their leg
        came."""
        now = time.monotonic()
        while self._tombstones and next(iter(self._tombstones.values()))[0] < now - TOMBSTONE_S:
            self._tombstones.popitem(last=False)
        known = self._tombstones.pop(key, None)
        if known is not None and choices is not None:
            choices = None if known[1] is None else (*known[1], *choices)
        self._tombstones[key] = now, choices

    def cancelled(self, key: RequestKey, choices: tuple[int, ...] | None) -> None:
        """Counts cancelled choices (None: all) of a leg that is here. It is forgotten later, as
        others are."""
        self._count_cancelled(self._clocks[key.router_id, key.session][key], choices)

    def lose(self, session: Session) -> Iterator[RequestKey]:
        """Forgets the legs of a lost router. Each is counted as cancelled before it is yielded."""
        for key, clock in self._clocks.pop(session, {}).items():
            self._count_cancelled(clock, None)
            yield key

    def admitted(self, key: RequestKey, now: float) -> None:
        """Notes that a leg's first rows went into a step."""
        clock = self._clocks.get((key.router_id, key.session), {}).get(key)
        if clock is not None:
            clock.planned(now, self._device_seconds)

    def computed(self, seconds: float) -> None:
        """Adds the time that the device took to compute a step."""
        self._device_seconds += seconds

    def timed(
        self, key: RequestKey, event: Delta | Embedded | PromptScored
    ) -> Delta | Embedded | PromptScored:
        """Returns the event, with the leg's times if it is the last of a choice."""
        clock = self._clocks.get((key.router_id, key.session), {}).get(key)
        times = (
            clock.see(event, time.monotonic(), self._device_seconds) if clock is not None else None
        )
        if clock is None or times is None:
            return event
        if clock.done:
            self._metrics.leg_done(times, clock.stages)
        return msgspec.structs.replace(event, times=times)

    def waiting(self, kept: Set[RequestKey]) -> Iterator[tuple[Session, LegsWaiting]]:
        """Yields one message per session whose legs are silent for a good reason.

        `kept` are the legs that a phase keeps, within deadlines of its own.
        """
        goes_on = self._engine.stats.num_steps > self._num_steps_told
        self._num_steps_told = self._engine.stats.num_steps
        for session, clocks in self._clocks.items():
            legs = tuple(
                key.leg
                for key, clock in clocks.items()
                if key in kept or self._is_in_order(key, clock, goes_on)
            )
            if legs:
                yield session, LegsWaiting(legs=legs)

    def waiting_new(self) -> Iterator[tuple[Session, LegsWaiting]]:
        """Yields one message per session that has sent prompts since the last call. It names those
        that have had no event."""
        legs: defaultdict[Session, list[LegName]] = defaultdict(list)
        for key in self._new:
            clock = self._clocks.get((key.router_id, key.session), {}).get(key)
            if clock is not None and not clock.is_prompt_done:
                legs[key.router_id, key.session].append(key.leg)
        self._new.clear()
        for session, names in legs.items():
            yield session, LegsWaiting(legs=tuple(names))

    def forget_finished(self, kept: Set[RequestKey]) -> None:
        """Forgets the legs that neither the engine nor a phase holds any more. `kept` are those of
        phases."""
        for clocks in self._clocks.values():
            for key in [key for key in clocks if key not in kept and not self._engine.knows(key)]:
                del clocks[key]

    def _is_in_order(self, key: RequestKey, clock: LegClock, goes_on: bool) -> bool:
        """True if a leg at the engine waits in a queue that moves, or its prompt got further than
        before."""
        if self._engine.waits(key):
            return goes_on
        return clock.advanced(self._engine.num_prompt_rows(key))

    def _count_cancelled(self, clock: LegClock, choices: tuple[int, ...] | None) -> None:
        times = clock.cancel(choices, time.monotonic(), self._device_seconds)
        if times is not None:
            self._metrics.leg_done(times, clock.stages)
