"""Measures where the time of one leg (one Submit) went at this worker: waiting, prompt, tokens, and
the device's part.

    arrived --queue--> first planned --prefill--> prompt computed --decode--> last token collected,
                                                                              or cancelled

All times are differences of this process's monotonic clock; nothing is compared between processes.
The device's part is the time that steps took it between first plan and last token, whoever's rows
they computed. The rest of that time is the engine's host. Knows no engine. Used by `worker.legs`, a
few calls per request and none per token.
"""

from collections.abc import Iterable

from pdserve.protocol.events import Delta, Embedded, LegTimes, PromptScored
from pdserve.protocol.request_key import Phase


class LegClock:
    """The clock of a leg that arrived at `arrived`, in monotonic seconds.

    The leg is done when all its choices have ended. With phase "prefill" each choice ends with its
    first token.
    """

    __slots__ = (
        "_arrived",
        "_device_before",
        "_open",
        "_phase",
        "_planned",
        "_prompt_done",
        "_rows",
    )

    def __init__(self, arrived: float, choices: Iterable[int], phase: Phase) -> None:
        self._arrived = arrived
        self._open = set(choices)
        self._phase = phase
        self._planned: float | None = None
        self._device_before = 0.0
        self._prompt_done: float | None = None
        self._rows = 0

    @property
    def done(self) -> bool:
        return not self._open

    @property
    def is_prompt_done(self) -> bool:
        return self._prompt_done is not None

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of LegTimes that the leg has reached."""
        if self._planned is None:
            return ("queue",)
        begun = ("queue", "prefill", "device")
        return begun if self._prompt_done is None else (*begun, "decode")

    def planned(self, now: float, device_seconds: float) -> None:
        """Notes that the leg's first rows are in a step. `device_seconds` is the worker's running
        total.

        Later calls (after a preemption) change nothing.
        """
        if self._planned is None:
            self._planned = now
            self._device_before = device_seconds
            if self._phase == "decode":
                self._prompt_done = now

    def advanced(self, num_rows: int) -> bool:
        """True if more of the prompt's rows are computed than at any earlier call."""
        before = self._rows
        self._rows = max(self._rows, num_rows)
        return num_rows > before

    def see(
        self, event: Delta | Embedded | PromptScored, now: float, device_seconds: float
    ) -> LegTimes | None:
        """Takes note of one of the leg's events. Returns the times so far if it ends a choice
        here."""
        if isinstance(event, Embedded):
            return self.cancel(None, now, device_seconds)  # its only choice
        if isinstance(event, PromptScored):
            self._prompt_done = now
            return None
        if event.choice not in self._open or (
            event.finish_reason is None and self._phase != "prefill"
        ):
            return None
        self._open.remove(event.choice)
        return self._times(now, device_seconds)

    def cancel(
        self, choices: Iterable[int] | None, now: float, device_seconds: float
    ) -> LegTimes | None:
        """Ends these choices (None: all). Returns the times so far if that ends the leg."""
        if self.done:
            return None
        self._open.difference_update(set(self._open) if choices is None else choices)
        return self._times(now, device_seconds) if self.done else None

    def _times(self, now: float, device_seconds: float) -> LegTimes:
        if self._planned is None:
            return LegTimes(now - self._arrived, 0.0, 0.0, 0.0)
        prompt_done = now if self._prompt_done is None else self._prompt_done
        device = min(device_seconds - self._device_before, now - self._planned)
        return LegTimes(
            self._planned - self._arrived, prompt_done - self._planned, now - prompt_done, device
        )
