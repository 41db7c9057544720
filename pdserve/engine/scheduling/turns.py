"""Decides whose prompt is computed next, and how many rows of it, in an engine that has a pace.

Streams come before all prompts. Prompts are ordered by priority, and then by when their first token
is due, which is a fixed time, so nobody is overtaken for ever. A prompt whose latest start has
passed is late. Where first tokens are promised, late prompts come after those that can still be in
time, but have a share of the prompts' time. The pace says how many rows a step has for prompts.
Knows no blocks and admits nobody: the scheduler, its only user, does.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from pdserve.engine.pacing.need import ALL, Prompt
from pdserve.engine.pacing.pace import Pace
from pdserve.engine.pacing.step_model import StepLoad
from pdserve.engine.scheduling.room import Room
from pdserve.engine.scheduling.sequence import Sequence, Status
from pdserve.engine.scheduling.step_plan import StepPlan
from pdserve.protocol.events import PaceState
from pdserve.protocol.prompt_work import attended_by

LATE_PROMPTS_SHARE = 0.2  # share of the prompt rows for late prompts, while others wait, too
MOST_OWED = 1 << 14  # maximum rows owed to late prompts, or by them
LOOKED_AT = 64  # prompts checked for being cached, in a step that has no rows for others
EMBED_S = 1.0  # seconds after which a waiting embedding counts as late
HANDED_S = 60.0  # after a stream was handed to this engine, another is expected for so long
MAX_PARTIAL = 2  # partly computed prompts of a home, not counting much shorter ones


@dataclass(frozen=True)
class Turn:
    """The order of one step. streams: those that compute more than one row, or own blocks and wait.
    prompts: running and waiting ones, in order."""

    streams: list[Sequence]
    prompts: list[Sequence]

    def __bool__(self) -> bool:
        return bool(self.streams or self.prompts)


class PromptTurns:
    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._owed = 0.0  # rows owed to late prompts; negative if they had more than their share
        self._now = 0.0
        self._has_overdue = False
        self._handed_until = -math.inf  # when no further stream is expected to be handed over

    def arrived(self, seq: Sequence, num_cached: int) -> None:
        """Fix the place of a new request's prompt. num_cached: number of its cached tokens."""
        request = seq.request
        if seq.block_table:
            self._handed_until = self.pace.clock() + HANDED_S
        request.num_expected = max(1, seq.num_uncomputed - num_cached)
        request.due_at = self.pace.due_at(request.called_at, request.num_expected)
        request.latest_start = self.pace.latest_start(request.due_at, request.num_expected)
        if self.pace.has_late_class and request.kind == "embed":
            # it has no deadline, and counts as late from the start
            request.due_at = request.latest_start = request.called_at

    def next(
        self,
        waiting: SequenceOf[Sequence],
        partial: list[Sequence],
        plan: StepPlan,
        rooms: list[Room],
    ) -> Turn:
        """Decide the order of a step, and set how many prompt rows its rooms have.

        - partial: running sequences that compute more than one row.
        - plan: already has the sequences that compute one row.
        """
        self._now = self.pace.clock()
        first = bisect_left(waiting, True, key=lambda seq: place_of(seq)[0] >= PROMPTS)
        streams = [*(seq for seq in partial if seq.is_stream), *waiting[:first]]
        prompts = self._ordered(waiting, first)
        for seq in partial:
            if not seq.is_stream:
                insort(prompts, seq, key=self._rank)
        turn = Turn(streams, prompts)
        self._give_rows(turn, [seq for seq, _ in plan], rooms)
        if not any(room.num_prompt_rows for room in rooms):
            # Take only what costs no more than a decode: prompts cached except for the last token.
            turn = Turn(streams, [seq for seq in prompts[:LOOKED_AT] if _rows_wanted(seq) == 1])
        return turn

    def open_to(
        self, seq: Sequence, rooms: list[Room], partial: SequenceOf[Sequence], plan: StepPlan
    ) -> list[Room]:
        """The rooms in which a waiting sequence may begin. A room must have rows for it, and fewer
        than MAX_PARTIAL partly computed prompts. It may have more if the sequence is at most half
        as long as the rest of each. partial: the running ones."""
        rows = _rows_wanted(seq)
        return [
            room
            for room in rooms
            if room.rows_for(rows) and self._has_place(room, rows, partial, plan)
        ]

    def _has_place(
        self, room: Room, rows: int, partial: SequenceOf[Sequence], plan: StepPlan
    ) -> bool:
        if room.rows_for(rows) == rows:
            return True
        chunks = plan.homes[room.home.number].chunks
        left = [
            seq.num_uncomputed - (chunks[seq].num_rows if seq in chunks else 0)
            for seq in partial
            if seq.home == room.home.number
        ]
        left = [each for each in left if each]
        return len(left) < MAX_PARTIAL or 2 * rows <= min(left)

    def started(self, seq: Sequence) -> None:
        """Count an admitted sequence if it is late."""
        request = seq.request
        if seq.is_stream or request.is_late or not self._is_overdue(seq):
            return
        request.is_late = True
        self.pace.totals.late_prompts += 1

    def ended(self, seq: Sequence) -> None:
        """Learn the length of a stream that has ended."""
        if seq.is_stream:
            self.pace.lengths.ended(seq.num_generated)

    def planned(self, plan: StepPlan, turn: Turn | None) -> None:
        """Count a planned step. turn: its order; None: no prompt waits."""
        if turn is None:
            self.pace.nobody_waits()
        else:
            self._share_rows(plan, turn)
        if turn is None and not self.pace.measures_next:
            self.pace.planned(None, is_scored=False, waits=False)
            return
        loads = [_load_of(plan, number) for number in range(len(plan.homes))]
        busiest = max(loads, key=lambda load: (load.num_rows, load.context_tokens))
        is_scored = any(seq.request.wants_prompt_logprobs for seq, _ in plan)
        self.pace.planned(busiest, is_scored, waits=turn is not None)

    def _give_rows(self, turn: Turn, decodes: list[Sequence], rooms: list[Room]) -> None:
        ahead = [*turn.streams, *turn.prompts[:8]]
        wanted = [_rows_wanted(seq) for seq in ahead]
        context = next((seq.num_computed for seq in ahead if _rows_wanted(seq) > 1), 0)
        rows = self.pace.prompt_rows(
            decodes,
            [decode_load(decodes, room.home.number) for room in rooms],
            wanted=sum(each for each in wanted if each > 1),
            context=context,
            has_late=any(_rows_wanted(seq) > 1 for seq in turn.streams)
            or any(self._is_overdue(seq) for seq in turn.prompts[:1])
            or self._has_overdue,
            need=ALL if turn.streams else self.pace.need_of(map(self._due, ahead), self._now),
            expects_streams=self._expects_streams,
        )
        if rows is None:
            for room in rooms:
                room.chunk_rows = self.pace.chunk_rows(context)
                if self._expects_streams:
                    room.num_prompt_rows = self.pace.rows_before_streams(context)
                    room.is_paced = True
            return
        for room, each in zip(rooms, rows, strict=True):
            room.num_prompt_rows = each
            room.is_paced = True

    @property
    def _expects_streams(self) -> bool:
        return self._now < self._handed_until

    def _due(self, seq: Sequence) -> Prompt:
        """The pace's view of a prompt."""
        request = seq.request
        rows = _rows_wanted(seq)
        due_at = self.pace.promised_at(request.called_at)
        if self.pace.latest_start(due_at, rows) <= self._now:  # then as soon as was planned
            due_at = max(due_at, self._planned_at(seq))
        return Prompt(rows, request.called_at, due_at)

    def _ordered(self, waiting: SequenceOf[Sequence], first: int) -> list[Sequence]:
        """The waiting prompts, from index `first` on, in order. If first tokens are promised, late
        ones move to where their class belongs within their priority."""
        ordered: list[Sequence] = []
        self._has_overdue = False
        while first < len(waiting):
            priority = waiting[first].request.priority
            end = (PROMPTS, priority, math.inf, 0, 0)
            stop = bisect_left(waiting, end, lo=first, key=place_of)
            of_class = waiting[first:stop]
            self._has_overdue |= any(map(self._is_overdue, of_class))
            ordered += sorted(of_class, key=self._is_behind)
            first = stop
        return ordered

    def _rank(self, seq: Sequence) -> tuple[int, bool, float, int, int]:
        """Sort key for the order of `_ordered`."""
        request = seq.request
        is_behind = self._is_behind(seq)
        return request.priority, is_behind, request.due_at, request.arrival, seq.choice

    def _is_behind(self, seq: Sequence) -> bool:
        """True if it stands after the other class of its priority, that of late prompts or that of
        those which can be in time."""
        return self.pace.has_late_class and self._is_late(seq) != (self._owed > 0)

    def _is_late(self, seq: Sequence) -> bool:
        """True if it cannot be in time any more. What is computed of it need not start."""
        request = seq.request
        start = request.latest_start
        if seq.status is Status.RUNNING:
            start = self.pace.latest_start(self._planned_at(seq), seq.num_uncomputed)
        return start < self._now

    def _planned_at(self, seq: Sequence) -> float:
        """When its first token comes if it starts at its latest start, as predicted now."""
        request = seq.request
        return request.latest_start + self.pace.own_seconds(request.num_expected)

    def _is_overdue(self, seq: Sequence) -> bool:
        """True if its latest start has passed, even if it was begun before. An embedding is overdue
        some time after it counts as late."""
        grace = EMBED_S if seq.request.kind == "embed" else 0.0
        return seq.request.latest_start + grace < self._now

    def _share_rows(self, plan: StepPlan, turn: Turn) -> None:
        """Let late prompts earn their share of the prompt rows, while both kinds wait."""
        late = {self._is_late(seq) for seq in turn.prompts}
        if len(late) < 2 or not self.pace.has_late_class:
            self._owed = min(self._owed, 0.0) if True in late else 0.0
            return
        rows = late_rows = 0
        for seq, chunk in plan:
            if chunk.num_rows > 1 and not seq.is_stream:
                rows += chunk.num_rows
                late_rows += chunk.num_rows if self._is_late(seq) else 0
        owed = self._owed + LATE_PROMPTS_SHARE * rows - late_rows
        self._owed = min(max(owed, -MOST_OWED), MOST_OWED)


PROMPTS = 2


def place_of(seq: Sequence) -> tuple[int, int, float, int, int]:
    """Sort key of waiting sequences: owners of blocks, then other streams, then prompts."""
    request = seq.request
    if seq.block_table or seq.is_stream:
        kind = 0 if seq.block_table else 1
        return kind, request.priority, 0.0, request.arrival, seq.choice
    return PROMPTS, request.priority, request.due_at, request.arrival, seq.choice


def decode_load(decodes: Iterable[Sequence], home: int) -> StepLoad:
    """The load of these decodes in one home."""
    contexts = [seq.num_computed for seq in decodes if seq.request.home == home]
    return StepLoad(0, len(contexts), sum(contexts))


def pace_state(pace: Pace, running: Iterable[Sequence], num_homes: int) -> PaceState:
    """The pace that is reported to routers, with the present decodes of the home with most."""
    decodes = [seq for seq in running if seq.num_uncomputed <= 1 and not seq.is_complete]
    loads = [decode_load(decodes, home) for home in range(num_homes)]
    busiest = max(loads, key=lambda load: (load.num_decodes, load.context_tokens))
    return pace.state(busiest, decodes)


def _rows_wanted(seq: Sequence) -> int:
    """Rows that a sequence still has to compute, as far as is known."""
    if seq.status is Status.WAITING and not seq.block_table and not seq.is_stream:
        return seq.request.num_expected
    return seq.num_uncomputed


def _load_of(plan: StepPlan, home: int) -> StepLoad:
    """The load of a planned step in one home. Chunks of one row count as decodes, because they cost
    the same."""
    num_decodes = context = rows = 0
    attended = 0.0
    for seq, chunk in plan.homes[home].chunks.items():
        if chunk.num_rows == 1:
            num_decodes += 1
            context += seq.num_computed
        else:
            rows += chunk.num_rows
            attended += attended_by(chunk.num_rows, seq.num_computed)
    return StepLoad(rows, num_decodes, context, attended)
