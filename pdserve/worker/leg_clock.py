"""Where the time of one leg (one Submit) went at this worker: waiting, prompt, tokens, and the device's part of it.

    arrived --queue--> first planned --prefill--> prompt computed --decode--> last token collected

Differences of this process's monotonic clock; nothing is compared between processes. The device's part is what steps
took it between first plan and last token, whoever's rows they computed; the rest of that time is the engine's host.
Knows no engine. Used by worker.loop, a few calls a request and none a token.
"""

from pdserve.engine.protocol import Delta, LegTimes, PromptScored


class LegClock:
    """arrived: monotonic seconds. num_choices: the leg is done when so many have ended. one_token: each choice ends
    with its first (phase "prefill")."""

    __slots__ = ("_arrived", "_device_before", "_left", "_one_token", "_planned", "_prompt_done")

    def __init__(self, arrived: float, num_choices: int, one_token: bool) -> None:
        self._arrived = arrived
        self._left = num_choices
        self._one_token = one_token
        self._planned: float | None = None
        self._device_before = 0.0
        self._prompt_done: float | None = None

    @property
    def done(self) -> bool:
        return self._left <= 0

    def planned(self, now: float, device_seconds: float) -> None:
        """Its first rows are in a step. device_seconds: the worker's running total. Later calls (after a preemption)
        change nothing."""
        if self._planned is None:
            self._planned, self._device_before = now, device_seconds

    def see(self, event: Delta | PromptScored, now: float, device_seconds: float) -> LegTimes | None:
        """Take note of one of the leg's events; the times so far when it ends a choice here."""
        if isinstance(event, PromptScored):
            self._prompt_done = now
            return None
        if event.finish_reason is None and not self._one_token:
            return None
        self._left -= 1
        planned = self._arrived if self._planned is None else self._planned
        prompt_done = planned if self._prompt_done is None else self._prompt_done
        device = min(device_seconds - self._device_before, now - planned)
        return LegTimes(planned - self._arrived, prompt_done - planned, now - prompt_done, device)
