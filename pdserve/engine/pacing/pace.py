"""How many prompt rows the next step may take beside the sequences that decode.

Each stream was promised a mean time between its tokens. The next step may last until the first of
their tokens is due, or later when prompts need it and the streams will make that good. What a step
of the decodes alone leaves of it goes to prompts, in chunks that are worth a step.

Knows counts, seconds and promises; no queue and no blocks. Asked by the scheduler
(`scheduling.turns`); told by the engine when steps end. docs/design/pacing.md says what is
promised, and where the constants come from.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.configs.router import SloConfig
from pdserve.engine.pacing.lengths import Lengths
from pdserve.engine.pacing.need import Need, Prompt, need_of
from pdserve.engine.pacing.promise import Promise, begun
from pdserve.engine.pacing.prompt_speed import PromptSpeed, full_speed, speed_beside
from pdserve.engine.pacing.step_model import LEAST_EFFICIENT, NOTHING, StepLoad, StepModel
from pdserve.engine.pacing.time_share import TimeShare
from pdserve.protocol.events import PaceState

MARGIN = 0.95  # of the promised interval: a stream that ends early has paid nothing back yet
DEFAULT_TTFT_S = 1.0  # by which prompts are put in order when nothing is promised
SLOWDOWN = 1.5  # times a step of the decodes alone: what routers take for promised when nothing is
OWN_TIMES = 3  # a prompt's first token is due after so many times its own computing time at least
MAX_STALL = 8  # promised intervals: no step is longer, however much its streams have earned
STRETCH = 1.25  # times as many rows, if they are all that prompts want
STALL_S = 0.05  # without a promise: no step beside decodes is longer, nor than MAX_STALL of theirs
LATE_SHARE = 0.1  # of the time, for prompts, when one of them is late
LOST_SHARE = 0.5  # of the time, for prompts, when no stream's promise can be kept
OWED = 0.7  # of what a stream will still gain as far as one can tell: so late it may be then
# A stream keeps its interval as long as prompts come soon (`need.EARLY`) without more. When that
# takes more than SPENDS of what streams leave, prompts get what streams have saved; when coming in
# time takes more than BORROWS of it, prompts also get what streams will still gain.
SPENDS, BORROWS = 0.5, 0.7
TYPICAL_TOKENS = 512  # that a stream asks for, for what routers hear
LATE_TOKENS = 4  # tokens that a late stream may take to recover before it is brought in gently
CHUNK_SHARE = 0.25  # of the promised first token: no step of a long prompt alone takes longer,
LEAST_CHUNK = 2048  # unless it has no more rows than these, which fill any GPU
GAP_KEPT = 0.98  # of the mean gap between the device's steps, when one ends
SAMPLE_EVERY = 8  # decode-only steps, of which one is measured


class Stream(Protocol):
    """A sequence that decodes. first_token_at: in the clock's seconds; None: not known yet."""

    first_token_at: float | None
    promise: Promise | None

    @property
    def next_position(self) -> int: ...

    @property
    def tokens_left(self) -> int: ...


@dataclass
class PaceTotals:
    """Running totals: predicted seconds by which steps were longer for prompts beside decodes;
    prompt rows in them; prompts whose first rows came later than their latest start; streams whose
    promise was given up."""

    slack_seconds: float = 0.0
    rows_beside_decodes: int = 0
    late_prompts: int = 0
    given_up: int = 0


@dataclass(frozen=True)
class _Flight:
    """A step that is not collected. load: None: it is not to be learned from. seconds: predicted.
    is_mixed: prompts waited, or were computed, beside decodes."""

    load: StepLoad | None
    seconds: float
    num_prompt_rows: int
    is_mixed: bool


class Pace:
    """ttft_s, tpot_s: what users are promised, None: nothing. max_rows: of a step without
    decodes. clock: seconds that go on evenly."""

    def __init__(
        self,
        ttft_s: float | None,
        tpot_s: float | None,
        max_rows: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.model = StepModel()
        self.totals = PaceTotals()
        self.has_late_class = ttft_s is not None
        self._ttft_s = DEFAULT_TTFT_S if ttft_s is None else ttft_s
        self._tpot_s = tpot_s
        self._max_rows = max_rows
        self._speed = PromptSpeed()
        self.lengths = Lengths()
        self.reset()

    @staticmethod
    def of(slo: SloConfig, max_rows: int) -> "Pace":
        """The pace of a worker whose users are promised this."""
        ttft, tpot = slo.ttft_ms, slo.tpot_ms
        return Pace(ttft and ttft / 1e3, tpot and tpot / 1e3, max_rows)

    def reset(self) -> None:
        """Forget the steps in flight; what was learned stays."""
        self._flights: deque[_Flight] = deque()
        self._began = self.clock()  # the oldest step in flight, or the engine's rest
        self._is_at_rest = True
        self._last_seconds = 0.0
        self._gap = 0.0  # seconds between two ends, beyond the device's
        self._unmeasured = _Flight(None, 0.0, 0, False)  # a step of the decodes lately
        self._num_unmeasured = 0
        self._owes = False
        self._late = TimeShare(LATE_SHARE)
        self._lost = TimeShare(LOST_SHARE)

    def forget(self) -> None:
        """Forget what was learned, and count from 0."""
        self.model = StepModel()
        self._speed = PromptSpeed()
        self.lengths = Lengths()
        self.forget_totals()
        self.reset()

    def forget_totals(self) -> None:
        """Count from 0."""
        self.totals = PaceTotals()

    # --- prompts ---

    def latest_start(self, called_at: float, num_tokens: int) -> float:
        """When a prompt of so many uncached tokens must start to be in time, in the clock's
        seconds. A long one may take OWN_TIMES its own computing time."""
        own = self.model.prompt_seconds(num_tokens, self._max_rows)
        return called_at + max(self._ttft_s, OWN_TIMES * own) - own

    def due_at(self, latest_start: float, num_tokens: int) -> float:
        """When the first token of a prompt is due that must start then at the latest."""
        return latest_start + self.model.prompt_seconds(num_tokens, self._max_rows)

    def prompt_rows(
        self,
        streams: Iterable[Stream],
        homes: Sequence[StepLoad],
        wanted: int,
        context: int,
        has_late: bool,
        need: Need,
    ) -> list[int] | None:
        """Prompt rows that each home may have in the step that is being planned. None: as many as
        fit, because nothing decodes.

        streams: the decodes of all homes. homes: the load that they are to each. wanted: rows that
        prompts want in all. context: computed rows of the first of them. has_late: one of them
        should have started earlier. need: see `need_of`.
        """
        self._owes = True
        busiest = max(homes, key=lambda load: (load.num_decodes, load.context_tokens))
        if not busiest.num_decodes:
            return None
        base = max(self.model.decode_seconds(load) for load in homes)
        least = min(wanted, self._worthwhile_rows(busiest, context))
        if self._tpot_s is None:
            longest = max(STALL_S, MAX_STALL * base)
            within = [self.model.prompt_rows_within(longest, load, context) for load in homes]
            if wanted <= STRETCH * max(within):  # rather than a step more for the rest
                least = wanted
            return [max(least, each) for each in within]
        cost = self.model.seconds(busiest.with_prompt(least, context)) - base
        allowed = self._allowed(streams, base, max(0.0, cost), has_late, need)
        rows = [self.model.prompt_rows_within(allowed, load, context) for load in homes]
        return [each if each >= least else 0 for each in rows]

    def _worthwhile_rows(self, decodes: StepLoad, context: int) -> int:
        """Rows that make a step beside these decodes worth its cost, as far as they fit into the
        longest step."""
        rows = self.model.efficient_rows(decodes)
        if self._tpot_s is None:
            return rows
        most = self.model.prompt_rows_within(MAX_STALL * self._tpot_s / 2, decodes, context)
        return min(rows, max(LEAST_EFFICIENT, most))

    def need_of(self, prompts: Iterable[Prompt], now: float) -> Need:
        """What prompts need that wait, in their order."""
        return need_of(prompts, now, lambda rows: self.model.prompt_seconds(rows, self._max_rows))

    def chunk_rows(self, context: int) -> int:
        """Rows of one step of a long prompt where nothing decodes, so that others need not wait
        long. context: rows of it that are computed."""
        rows = self.model.prompt_rows_within(CHUNK_SHARE * self._ttft_s, NOTHING, context)
        return max(LEAST_CHUNK, rows)

    def _allowed(
        self, streams: Iterable[Stream], base: float, cost: float, has_late: bool, need: Need
    ) -> float:
        """How long the next step may take, in seconds, when something is promised. base: of its
        decodes alone. cost: what a worthwhile chunk adds."""
        assert self._tpot_s is not None
        longest = MAX_STALL * max(self._tpot_s, base)
        allowed = min(self._least_slack(streams, base, cost, need), longest)
        if has_late:
            self._late.earn(self._last_seconds, longest + cost)
            allowed = max(allowed, base + self._late.credit)
        return allowed

    def _least_slack(
        self, streams: Iterable[Stream], base: float, cost: float, need: Need
    ) -> float:
        """Seconds until the first token of a stream whose promise can be kept is due; when there
        is none, what prompts have earned meanwhile."""
        assert self._tpot_s is not None
        at = self._free_at()
        interval = MARGIN * self._tpot_s
        gain = interval - base
        steady = max(0.0, gain) / interval
        owed = OWED * max(0.0, gain) if need.at_least > BORROWS * steady else 0.0
        too_late = base - LATE_TOKENS * max(0.0, gain)
        least = math.inf
        for stream in streams:
            position = stream.next_position
            if position < 1:
                continue
            promise = stream.promise
            if promise is None:
                promise = self._begin(stream, interval, gain, at)
            left = self.lengths.left(position, stream.tokens_left)
            slack = promise.slack(position, interval, at)
            if slack < too_late:
                if gain <= 0:
                    continue
                late = at - promise.first_at - (position - 1) * interval
                kept = promise.bring_in(late, position, stream.tokens_left, gain)
                self.totals.given_up += not kept
            least = min(least, promise.slack(position, interval, at, owed * left))
        if not math.isinf(least):
            return min(least, interval) if need.soon <= SPENDS * steady else least
        self._lost.earn(self._last_seconds, MAX_STALL * base + cost)
        return base + self._lost.credit

    def _begin(self, stream: Stream, interval: float, gain: float, at: float) -> Promise:
        promise, kept = begun(
            stream.first_token_at,
            stream.next_position,
            stream.tokens_left,
            interval,
            gain,
            at,
        )
        # one whose first token is in flight is only known when that has come
        if stream.first_token_at is not None or stream.next_position > 1:
            stream.promise = promise
        self.totals.given_up += not kept
        return promise

    def _free_at(self) -> float:
        """When the device is done with all that is in flight."""
        now = self.clock()
        if not self._flights:
            return now
        first, *others = self._flights
        return max(now, self._began + first.seconds) + sum(each.seconds for each in others)

    # --- steps ---

    @property
    def measures_next(self) -> bool:
        """Whether the load of the next step is wanted even if it is decode-only."""
        return self._num_unmeasured + 1 >= SAMPLE_EVERY or not self.model.knows_decodes

    def planned(self, load: StepLoad | None, is_scored: bool, waits: bool) -> None:
        """A step was planned, and is forwarded now. load: of its busiest home; None for a
        decode-only one that is not measured. is_scored: it also scores prompts, so its time says
        nothing. waits: a prompt waits, or is computed."""
        if not self._flights and self._is_at_rest:
            self._began = self.clock()
        self._is_at_rest = False
        if load is None:
            self._num_unmeasured += 1
            self._flights.append(self._unmeasured)
            return
        self._num_unmeasured = 0
        base = self.model.decode_seconds(load)
        seconds = self.model.seconds(load)
        self._unmeasured = _Flight(None, base, 0, False)
        beside = waits and load.num_decodes > 0
        if beside and load.num_prompt_rows:
            extra = seconds - base
            for share in (self._late, self._lost):
                share.spend(extra)
            self.totals.slack_seconds += extra
            self.totals.rows_beside_decodes += load.num_prompt_rows
        rows = load.num_prompt_rows
        self._flights.append(_Flight(None if is_scored else load, seconds, rows, beside))

    def collected(self, device_seconds: float = 0.0) -> None:
        """The oldest step in flight has ended. device_seconds: that the device took for it; 0:
        nobody measured.

        Where the host launches a step's kernels one by one, the end of the step before is noticed
        late. So the time between two ends is right in the mean alone, and what a step takes is the
        device's time and the mean of what ends lie further apart.
        """
        now = self.clock()
        flight = self._flights.popleft()
        seconds = now - self._began
        self._began = now
        self._last_seconds = seconds
        if seconds <= 0:
            return
        if device_seconds > 0:
            self._gap += (seconds - device_seconds - self._gap) * (1 - GAP_KEPT)
            seconds = device_seconds + max(0.0, self._gap)
        if flight.load is not None:
            self.model.observe(flight.load, seconds)
        if flight.is_mixed:
            self._speed.observe(flight.num_prompt_rows, seconds, now)

    def rested(self) -> None:
        """Nothing is in flight, and nothing can run: the time until the next step is none of
        it."""
        self._is_at_rest = True

    def nobody_waits(self) -> None:
        """No prompt waits: nothing is owed to any."""
        if not self._owes:
            return
        self._owes = False
        for share in (self._late, self._lost):
            share.clear()

    # --- what routers hear ---

    def state(self, decodes: StepLoad) -> PaceState:
        """The pace beside these decodes, those of the busiest home."""
        base = self.model.decode_seconds(decodes)
        tpot = SLOWDOWN * base if self._tpot_s is None else self._tpot_s
        return PaceState(
            tpot_ms=tpot * 1e3,
            base_step_ms=base * 1e3,
            row_ms=self.model.row_seconds(decodes) * 1e3,
            prompt_tokens_per_s=self._prompt_speed(decodes, base, tpot),
            burst_tokens=self._burst_tokens(decodes, base),
        )

    def _burst_tokens(self, decodes: StepLoad, base: float) -> int:
        """Prompt rows beside these decodes that need not wait: for which streams have saved time
        when no prompt came lately, or will still gain it when they are halfway."""
        if self._tpot_s is None:
            return self._max_rows
        gain = MARGIN * self._tpot_s - base
        if gain <= 0:
            return 0
        half = self.lengths.left(0, TYPICAL_TOKENS) // 2
        extra = MAX_STALL * self._tpot_s - base + OWED * gain * half
        return int(extra * speed_beside(self.model, decodes, 1.0))

    def _prompt_speed(self, decodes: StepLoad, base: float, tpot: float) -> float:
        if not decodes.num_decodes:
            rows = min(self._max_rows, self.model.most_rows)
            return full_speed(self.model, rows)
        measured = self._speed.measured(self.clock())
        if measured is not None:
            return measured
        interval = MARGIN * tpot
        share = 1.0 if self._tpot_s is None else max(0.0, 1 - base / interval)
        return speed_beside(self.model, decodes, max(share, LATE_SHARE))
