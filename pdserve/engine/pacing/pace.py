"""Decides how many prompt rows the next step may take in addition to the sequences that decode.

Each stream was promised a mean time between its tokens. The next step may last until the first of
their next tokens is due, or longer if prompts need it and the streams will make up for it. Prompts
get the part of that time which a step of the decodes alone leaves, in chunks that are worth a step.

Knows counts, seconds and promises; no queue and no blocks. The scheduler asks it
(`scheduling.turns`), and the engine reports the end of each step. docs/design/pacing.md says what
is promised, and where the constants come from.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pdserve.configs.router import SloConfig
from pdserve.engine.pacing.in_flight import Flight, InFlight
from pdserve.engine.pacing.lengths import Lengths
from pdserve.engine.pacing.need import Need, Prompt, need_of
from pdserve.engine.pacing.promise import Promise, Stream, begun
from pdserve.engine.pacing.prompt_speed import PromptSpeed, full_speed, speed_beside
from pdserve.engine.pacing.step_model import LEAST_EFFICIENT, NOTHING, StepLoad, StepModel
from pdserve.engine.pacing.time_share import TimeShare
from pdserve.engine.pacing.unpromised import STALL_S, unpromised_rows
from pdserve.protocol.events import PaceState
from pdserve.protocol.prompt_work import prompt_work

MARGIN = 0.95  # share of the promised interval that is aimed at: a stream may end before it repays
DEFAULT_TTFT_S = 1.0  # orders the prompts when no TTFT is promised
SLOWDOWN = 1.5  # x a step of the decodes alone: reported as the TPOT when none is promised
OWN_TIMES = 3  # a first token is never due before OWN_TIMES x the prompt's own computing time
MAX_STALL = 8  # promised intervals: no step is longer, however much its streams have earned
LATE_SHARE = 0.1  # share of the time for prompts while one of them is late
LOST_SHARE = 0.5  # share of the time for prompts while no stream's promise can be kept
OWED = 0.7  # a stream may be late by this share of the time that it is expected to gain later
# A stream keeps its interval as long as prompts come soon (`need.EARLY`) without more time. If that
# takes more than SPENDS of what streams leave, prompts also get the time that streams have saved.
# If coming in time takes more than BORROWS of it, they get what streams will still gain, too.
SPENDS, BORROWS = 0.5, 0.5
TYPICAL_TOKENS = 512  # assumed length that a stream asks for, in what is reported to routers
LATE_TOKENS = 6  # tokens that a late stream may take to recover before it is brought in gently
# Where nothing decodes, a step of a long prompt takes at most CHUNK_SHARE of the promised TTFT,
# unless it has at most LEAST_CHUNK rows, which fill any GPU.
CHUNK_SHARE = 0.25
LEAST_CHUNK = 2048
GAP_KEPT = 0.98  # weight of the old mean gap between the device's steps when a new gap is added
SAMPLE_EVERY = 8  # one in so many decode-only steps is measured


@dataclass
class PaceTotals:
    """Running totals."""

    slack_seconds: float = 0.0  # predicted time that prompts added to steps with decodes
    rows_beside_decodes: int = 0  # prompt rows in those steps
    late_prompts: int = 0  # prompts whose first rows came after their latest start
    given_up: int = 0  # streams whose promise was given up


class Pace:
    """The pace of an engine's steps. ttft_s, tpot_s: what users are promised; None: nothing.
    max_rows: rows of a step without decodes. clock: monotonic seconds. graph_rows,
    most_pair_tokens: see StepModel.
    """

    def __init__(
        self,
        ttft_s: float | None,
        tpot_s: float | None,
        max_rows: int,
        clock: Callable[[], float] = time.monotonic,
        graph_rows: Sequence[int] = (),
        most_pair_tokens: float = math.inf,
    ) -> None:
        self.clock = clock
        self.model = StepModel(graph_rows, most_pair_tokens)
        self.totals = PaceTotals()
        self.has_late_class = ttft_s is not None
        self._ttft_s = DEFAULT_TTFT_S if ttft_s is None else ttft_s
        self._tpot_s = tpot_s
        self._max_rows = max_rows
        self._most_pair_tokens = most_pair_tokens
        self._speed = PromptSpeed()
        self.lengths = Lengths()
        self.reset()

    @staticmethod
    def of(slo: SloConfig, max_rows: int, hidden_size: int) -> "Pace":
        """The pace of a worker for these promises. hidden_size: the model's.

        A pair of tokens takes 4 operations per column of the queries. The projections of queries
        and outputs alone take 4 x hidden_size of them per token.
        """
        ttft, tpot = slo.ttft_ms, slo.tpot_ms
        most = 1 / hidden_size
        return Pace(ttft and ttft / 1e3, tpot and tpot / 1e3, max_rows, most_pair_tokens=most)

    def reset(self) -> None:
        """Forget the steps in flight; what was learned stays."""
        self.in_flight = InFlight(self.clock)
        self._last_seconds = 0.0
        self._gap = 0.0  # mean seconds between two ends of steps, beyond the device's time
        self._unmeasured = Flight(NOTHING, 0.0)  # stands for a recent decode-only step
        self.weight = 1.0  # work of the last collected step's prompts, per token
        self._num_unmeasured = 0
        self._owes = False
        self._late = TimeShare(LATE_SHARE)
        self._lost = TimeShare(LOST_SHARE)

    def forget(self, graph_rows: Sequence[int]) -> None:
        """Forget what was learned, and set the totals to 0. graph_rows: see StepModel."""
        self.model = StepModel(graph_rows, self._most_pair_tokens)
        self._speed = PromptSpeed()
        self.lengths = Lengths()
        self.totals = PaceTotals()
        self.reset()

    # --- prompts ---

    def due_at(self, called_at: float, num_tokens: int) -> float:
        """When the first token of a prompt with num_tokens uncached tokens is due by the order, in
        the clock's seconds. A long prompt may take OWN_TIMES its own computing time."""
        return called_at + max(self._ttft_s, OWN_TIMES * self.own_seconds(num_tokens))

    def own_seconds(self, num_tokens: int) -> float:
        """Predicted computing time of a prompt alone."""
        return self.model.prompt_seconds(num_tokens, self._max_rows)

    def promised_at(self, called_at: float) -> float:
        """When the first token is due by the promise, however long the prompt is."""
        return called_at + self._ttft_s

    def latest_start(self, due_at: float, num_left: int) -> float:
        """Latest time at which a prompt, or the rest of one, with num_left uncached tokens must
        start to be in time."""
        return due_at - self.own_seconds(num_left)

    def prompt_rows(
        self,
        streams: Iterable[Stream],
        homes: Sequence[StepLoad],
        wanted: int,
        context: int,
        has_late: bool,
        need: Need,
        expects_streams: bool = False,
    ) -> list[int] | None:
        """Prompt rows that each home may have in the step that is being planned. None: as many as
        fit, because nothing decodes.

        - streams: the decodes of all homes. homes: the load of each home's decodes.
        - wanted: number of rows that prompts want in all.
        - context: computed rows of the first prompt.
        - has_late: a prompt should have started earlier. need: see `need_of`.
        - expects_streams: streams are handed to this engine.
        """
        self._owes = True
        busiest = max(homes, key=lambda load: (load.num_decodes, load.context_tokens))
        if not busiest.num_decodes:
            return None
        base = max(self.model.decode_seconds(load) for load in homes)
        least = min(wanted, self._worthwhile_rows(busiest, context))
        if self._tpot_s is None:
            return unpromised_rows(
                self.model, homes, MAX_STALL * base, least, wanted, context, expects_streams
            )
        cost = self.model.seconds(busiest.with_prompt(least, context)) - base
        allowed = self._allowed(streams, base, max(0.0, cost), has_late, need)
        most = max(least, self.model.longest_rows(busiest))
        rows = [self.model.prompt_rows_within(allowed, load, context) for load in homes]
        return [
            self.model.filling_rows(min(each, most), load) if each >= least else 0
            for each, load in zip(rows, homes, strict=True)
        ]

    def _worthwhile_rows(self, decodes: StepLoad, context: int) -> int:
        """Number of rows that make a step with these decodes worth its cost, limited by what fits
        into the longest step."""
        rows = self.model.efficient_rows(decodes)
        if self._tpot_s is None:
            return rows
        most = self.model.prompt_rows_within(MAX_STALL * self._tpot_s / 2, decodes, context)
        rows = min(rows, max(LEAST_EFFICIENT, most))
        return self.model.filling_rows(rows, decodes) or rows

    def need_of(self, prompts: Iterable[Prompt], now: float) -> Need:
        """Shares of the time that waiting prompts need, in their order."""
        return need_of(prompts, now, self.own_seconds)

    def chunk_rows(self, context: int) -> int:
        """Rows of one step of a long prompt where nothing decodes, limited so that others need not
        wait long. context: number of its rows that are already computed."""
        rows = self.model.prompt_rows_within(CHUNK_SHARE * self._ttft_s, NOTHING, context)
        return max(LEAST_CHUNK, rows)

    def rows_before_streams(self, context: int) -> int:
        """Prompt rows of a step where nothing decodes, on an engine to which streams are handed:
        one that comes meanwhile must not wait for longer than it can make up for. context: number
        of the first prompt's rows that are already computed."""
        longest = STALL_S if self._tpot_s is None else MAX_STALL * self._tpot_s / 2
        rows = self.model.prompt_rows_within(longest, NOTHING, context)
        return max(self.model.efficient_rows(NOTHING), rows)

    def _allowed(
        self, streams: Iterable[Stream], base: float, cost: float, has_late: bool, need: Need
    ) -> float:
        """Seconds that the next step may take when a TPOT is promised. base: seconds of its decodes
        alone. cost: seconds that a worthwhile chunk adds."""
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
        """Seconds until the next token of a stream is due, over streams whose promise can be kept.
        Without such a stream: base, and what prompts have earned meanwhile."""
        assert self._tpot_s is not None
        at = self.in_flight.free_at()
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
            # what this token owes, the tokens after it repay
            owed_s = owed * max(0, left - 1)
            least = min(least, promise.slack(position, interval, at, owed_s))
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
        # if the first token is in flight, its time is known only when it has come
        if stream.first_token_at is not None or stream.next_position > 1:
            stream.promise = promise
        self.totals.given_up += not kept
        return promise

    # --- steps ---

    @property
    def measures_next(self) -> bool:
        """True if the load of the next step is wanted even if it is decode-only."""
        return self._num_unmeasured + 1 >= SAMPLE_EVERY or not self.model.knows_decodes

    def planned(self, load: StepLoad | None, is_scored: bool, waits: bool) -> None:
        """Record that a step was planned, and is forwarded now or when the step before has ended.

        - load: of its busiest home; None for a decode-only step that is not measured.
        - is_scored: it also scores prompts, so nothing is learned from its time.
        - waits: a prompt waits, or is computed.
        """
        if load is None:
            self._num_unmeasured += 1
            self.in_flight.planned(self._unmeasured)
            return
        self._num_unmeasured = 0
        base = self.model.decode_seconds(load)
        seconds = self.model.seconds(load)
        self._unmeasured = Flight(NOTHING, base)
        beside = waits and load.num_decodes > 0
        if beside and load.num_prompt_rows:
            extra = seconds - base
            for share in (self._late, self._lost):
                share.spend(extra)
            self.totals.slack_seconds += extra
            self.totals.rows_beside_decodes += load.num_prompt_rows
        self.in_flight.planned(Flight(load, seconds, beside, teaches=not is_scored))

    def collected(self, device_seconds: float = 0.0) -> None:
        """Record the end of the oldest step in flight. device_seconds: device time of the step; 0
        if it was not measured.

        Where the host launches a step's kernels one by one, it notices the previous end late. So
        the time between two ends is right only on average. A step is taken to last the device's
        time plus the mean gap between ends.
        """
        flight, seconds = self.in_flight.ended()
        rows = flight.load.num_prompt_rows
        work = flight.work(self.model.pair_tokens)
        self.weight = work / rows if rows else 1.0
        held_back = not rows or flight.load.num_decodes > 0  # prompts, for decodes
        self._last_seconds = seconds if held_back else 0.0
        if seconds <= 0:
            return
        if device_seconds > 0:
            self._gap += (seconds - device_seconds - self._gap) * (1 - GAP_KEPT)
            seconds = device_seconds + max(0.0, self._gap)
        if flight.teaches:
            self.model.observe(flight.load, seconds)
        if flight.is_mixed and self._tpot_s is None:  # with a promise nobody asks for it
            self._speed.observe(work, seconds, self.clock())

    def nobody_waits(self) -> None:
        """Record that no prompt waits, so no time is owed to prompts."""
        if not self._owes:
            return
        self._owes = False
        for share in (self._late, self._lost):
            share.clear()

    # --- what is reported to routers ---

    @property
    def full_speed(self) -> float:
        """Predicted work per second of prompts alone; 0 while nothing is known of rows."""
        if not self.model.knows_rows:
            return 0.0
        return full_speed(self.model, min(self._max_rows, self.model.most_rows))

    def state(self, decodes: StepLoad, streams: Sequence[Stream]) -> PaceState:
        """The pace with the busiest home's decodes. streams: the decodes of all homes."""
        base = self.model.decode_seconds(decodes)
        tpot = SLOWDOWN * base if self._tpot_s is None else self._tpot_s
        left = self.lengths.mean_left([(each.next_position, each.tokens_left) for each in streams])
        return PaceState(
            tpot_ms=tpot * 1e3,
            base_step_ms=base * 1e3,
            row_ms=self.model.row_seconds(decodes) * 1e3,
            prompt_tokens_per_s=self._prompt_speed(decodes, base, tpot),
            burst_tokens=self._burst_tokens(decodes, base, streams),
            stream_ms=left * tpot * 1e3,
            pair_tokens=self.model.pair_tokens,
            top_tokens_per_s=self._top_speed(decodes),
        )

    def _top_speed(self, decodes: StepLoad) -> float:
        """Predicted work per second of prompts of which every step with these decodes has a
        chunk."""
        if not decodes.num_decodes or self._tpot_s is None or not self.model.knows_rows:
            return 0.0
        room = max(1, self._max_rows - decodes.num_decodes)
        most = min(room, self.model.longest_rows(decodes))
        rows = self.model.filling_rows(most, decodes) or most
        seconds = self.model.seconds(decodes.with_prompt(rows, 0))
        return prompt_work(rows, 0, self.model.pair_tokens) / seconds if seconds > 0 else 0.0

    def _burst_tokens(self, decodes: StepLoad, base: float, streams: Iterable[Stream]) -> int:
        """Prompt rows, in addition to these decodes, that need not wait, because every stream has
        saved time for them or will gain it."""
        if self._tpot_s is None:
            return self._max_rows
        interval = MARGIN * self._tpot_s
        gain = interval - base
        if gain <= 0:
            return 0
        at = self.in_flight.free_at()
        half = self.lengths.left(0, TYPICAL_TOKENS) // 2
        least = MAX_STALL * self._tpot_s + OWED * gain * half
        for stream in streams:
            position, promise = stream.next_position, stream.promise
            if position < 1 or promise is None:
                continue
            left = self.lengths.left(position, stream.tokens_left)
            owed = OWED * gain * max(0, left - 1)
            least = min(least, promise.slack(position, interval, at, owed))
        return int(max(0.0, least - base) * speed_beside(self.model, decodes, 1.0))

    def _prompt_speed(self, decodes: StepLoad, base: float, tpot: float) -> float:
        if not decodes.num_decodes or not self.model.knows_rows:
            return self.full_speed
        if self._tpot_s is None:
            measured = self._speed.measured(self.clock())
            return speed_beside(self.model, decodes, 1.0) if measured is None else measured
        share = 1 - base / (MARGIN * tpot)
        least = LATE_SHARE if share > 0 else LOST_SHARE
        return speed_beside(self.model, decodes, max(share, least))
