"""Decides how many tokens of which sequence the next step computes, and gives them blocks.

One scheduler serves both phases and all homes. `schedule()` gives each sequence a chunk of rows,
within a token budget per home. Running sequences come first (a decode is one token, a prefill a
chunk). Then waiting ones are admitted, each to the home that suits it best. When blocks run out,
the last running sequence of that home is preempted: it loses its blocks and is computed again
later. Knows nothing of devices, sampling or hand-off. Called by the engine.

    WAITING --admit--> RUNNING --finish--> FINISHED
       ^------preempt-----'

A running sequence has a slot, its row in the device's tables. Plans are made from counts alone. So
the next plan need not wait for the tokens of a step in flight (docs/design/engine-step.md).
"""

from bisect import bisect_left, insort
from collections import deque

from pdserve.engine.memory.block_manager import OutOfBlocks
from pdserve.engine.pacing.pace import Pace
from pdserve.engine.scheduling import placing
from pdserve.engine.scheduling.home import Home, Homes
from pdserve.engine.scheduling.room import Room
from pdserve.engine.scheduling.sequence import Sequence, Status
from pdserve.engine.scheduling.step_plan import StepPlan, chunk_of
from pdserve.engine.scheduling.turns import PromptTurns, Turn, place_of
from pdserve.protocol.block_digests import BlockHasher
from pdserve.protocol.prompt_work import prompt_work
from pdserve.protocol.request_key import RequestKey

# Maximum tokens of an overlapped prompt's last chunk, which is what is left to move at the end.
LAST_CHUNK = 2048
# Sequences whose cached prefixes estimate the queue's length; hashing 16 x 8k tokens takes 11 ms.
QUEUE_LOOK_UPS = 16
ADMITTED_KEPT = 4096  # more than a step admits; the reader empties it after each step


class Scheduler:
    """Continuous batching with chunked prefill, prefix caching, priorities and preemption by
    recompute.

    - max_num_batched_tokens, max_num_seqs: limits per home and step.
    - pace: decides speed and order of prompts in steps with decodes (docs/design/pacing.md). None:
      full speed, by arrival.
    """

    def __init__(
        self,
        homes: Homes,
        hasher: BlockHasher,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        num_stages: int = 1,
        pace: Pace | None = None,
    ) -> None:
        assert pace is None or num_stages == 1, "an engine of several stages has no pace"
        self._turns = PromptTurns(pace) if pace is not None else None
        self.homes = homes
        self.hasher = hasher
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.num_stages = num_stages
        self._num_plans = 0
        self.last_chunk_tokens = min(LAST_CHUNK, max_num_batched_tokens)
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.reset()

    def reset(self) -> None:
        """Forget all sequences, in whatever state an interruption left the queues. Totals stay."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.admitted: deque[RequestKey] = deque(maxlen=ADMITTED_KEPT)
        for home in self.homes:
            home.free_all_slots()
            home.wants_blocks = False

    def home_of(self, seq: Sequence) -> Home:
        return self.homes[seq.home]

    @property
    def wants_blocks(self) -> bool:
        """True if the first in line for some home waits for blocks."""
        return any(home.wants_blocks for home in self.homes)

    @property
    def parts_from(self) -> int:
        """Minimum length of an overlapped prompt that takes several steps; a shorter one is faster
        in one."""
        return min(2 * self.last_chunk_tokens, self.max_num_batched_tokens + 1)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def queued_work(self, pair_tokens: float) -> float:
        """Work (protocol.prompt_work) of the prompts in waiting and in half-computed sequences.
        Cached prefixes do not count: their share in the first ones is extrapolated to all."""

        def work(seq: Sequence, cached: int = 0) -> float:
            return prompt_work(seq.num_uncomputed - cached, seq.num_computed + cached, pair_tokens)

        cut = sum(work(seq) for seq in self.running if seq.num_uncomputed > 1)
        first, size = self.waiting[:QUEUE_LOOK_UPS], self.hasher.block_size
        cached = [0 if each.block_table else size * self._longest_prefix(each) for each in first]
        share = sum(map(work, first, cached)) / (sum(map(work, first)) or 1.0)
        return cut + share * sum(map(work, self.waiting))

    def add(self, seq: Sequence) -> None:
        """Queue a waiting sequence. Owners of (imported) blocks come first, then priority and
        arrival decide; with a pace, the turn decides."""
        if self._turns is None:
            insort(self.waiting, seq, key=lambda s: (not s.block_table, *s.order))
            return
        if not seq.request.num_expected:
            cached = 0 if seq.block_table else self._longest_prefix(seq)
            self._turns.arrived(seq, cached * self.hasher.block_size)
        insort(self.waiting, seq, key=place_of)

    def run(self, seq: Sequence) -> None:
        """Run a sequence that admission has counted: one from the queue, or one that just forked
        from a running one."""
        seq.status = Status.RUNNING
        seq.slot = self.home_of(seq).take_slot()
        seq.num_synced = 0
        insort(self.running, seq, key=lambda s: s.order)

    def finish(self, seq: Sequence) -> None:
        """Take out the sequence and free its blocks; idempotent."""
        if seq.status is Status.FINISHED:
            return
        if seq.status is Status.RUNNING:
            self._stop_running(seq)
        else:
            self.waiting.remove(seq)
        if self._turns is not None:
            self._turns.ended(seq)
        seq.status = Status.FINISHED
        if seq.block_table:
            self.home_of(seq).drop_blocks(seq)

    def schedule(self, may_preempt: bool = True) -> StepPlan:
        """Plan the next step. The plan is empty when nothing can run now, because there is no work
        or other owners hold the blocks.

        may_preempt: must be False while steps are in flight, because a preemption would take away
        their blocks and tokens.
        """
        plan = StepPlan(len(self.homes))
        rooms = [Room(home, self.max_num_batched_tokens) for home in self.homes]
        in_order = _in_order(self.running, self.num_stages)
        num_first = len(in_order)
        if self._turns is not None:
            num_first = bisect_left(in_order, True, key=_computes_prompt)
        for seq in in_order[:num_first]:
            # an earlier sequence may have preempted this one
            if seq.status is Status.RUNNING and not seq.is_complete and rooms[seq.home].budget:
                self._continue(seq, rooms[seq.home], plan, may_preempt)
        for home in self.homes:
            home.wants_blocks = False
        turn: Turn | None = None
        if self._turns is not None:
            partial = [seq for seq in in_order[num_first:] if seq.status is Status.RUNNING]
            if self.waiting or partial:
                turn = self._turns.next(self.waiting, partial, plan, rooms)
                self._take_turns(turn, partial, rooms, plan, may_preempt)
        elif self.waiting:
            self._admit(rooms, plan)
        for home in self.homes:
            if home.wants_blocks and not home.num_running:
                self._break_hold_and_wait(home)
        if self.num_stages > 1:
            self._num_plans += 1
            for seq, _ in plan:
                seq.last_plan = self._num_plans
        if self._turns is not None and plan:
            self._turns.planned(plan, turn)
        return plan

    def check_integrity(self) -> None:
        """AssertionError if a queue holds a sequence in the wrong state."""
        assert all(s.status is Status.RUNNING for s in self.running)
        assert all(s.status is Status.WAITING for s in self.waiting)
        assert len(set(map(id, self.running + self.waiting))) == len(self.running) + len(
            self.waiting
        )
        for number, home in enumerate(self.homes):
            home.check_slots(seq.slot for seq in self.running if seq.home == number)
        assert not any(seq.slot for seq in self.waiting)

    def _stop_running(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.home_of(seq).free_slot(seq.slot)
        seq.slot = 0

    def _continue(self, seq: Sequence, room: Room, plan: StepPlan, may_preempt: bool) -> None:
        """Plan the next chunk of a running sequence, preempting the last sequences of its home if
        needed. It may be preempted itself, or blocked."""
        count = self._chunk(seq, seq.num_uncomputed, room, self.last_chunk_tokens + 1)
        if not count:
            return
        while seq.status is Status.RUNNING:
            try:
                copies = room.home.provide(seq, count)
            except OutOfBlocks:
                room.is_short = True
                room.is_open = False
                if not may_preempt:
                    plan.blocked = True
                    return
                last = next(s for s in reversed(self.running) if s.home == seq.home)
                room.budget += self.preempt(last, plan)
            else:
                plan.add(seq, chunk_of(seq, count), copies)
                room.spend(count)
                return

    def _take_turns(
        self,
        turn: Turn,
        partial: list[Sequence],
        rooms: list[Room],
        plan: StepPlan,
        may_preempt: bool,
    ) -> None:
        """Give rows to sequences that compute several, running (partial) and waiting, in the order
        of their turn. A sequence that lacks blocks or a slot closes its homes to later ones."""
        if not turn:
            return
        assert self._turns is not None
        self._open(rooms, plan)
        for seq in (*turn.streams, *turn.prompts):
            if seq.status is Status.RUNNING:
                room = rooms[seq.home]
                if not seq.is_complete and room.budget and not room.is_crowded(seq.num_uncomputed):
                    self._continue(seq, room, plan, may_preempt)
            elif any(room.is_open for room in rooms):
                suiting = self._turns.open_to(seq, self._suiting(rooms, seq), partial, plan)
                if any(room.is_open and self._admit_to(room, seq, plan) for room in suiting):
                    self.waiting.remove(seq)
                    partial.append(seq)
                    self._turns.started(seq)
                else:
                    _close(suiting)

    def _admit(self, rooms: list[Room], plan: StepPlan) -> None:
        """Start waiting sequences while they fit, each in its home, or in the best home that suits
        it. One that is not admitted closes its homes to later ones in line, so nobody overtakes by
        being small."""
        self._open(rooms, plan)
        index = 0
        while index < len(self.waiting) and any(room.is_open for room in rooms):
            seq = self.waiting[index]
            suiting = self._suiting(rooms, seq)
            if any(room.is_open and self._admit_to(room, seq, plan) for room in suiting):
                del self.waiting[index]
                continue
            _close(suiting)
            index += 1

    def _open(self, rooms: list[Room], plan: StepPlan) -> None:
        """Count what is left in the rooms after the running sequences got what they need."""
        for room in rooms:
            number = room.home.number
            running = [seq for seq in self.running if seq.home == number]
            room.open(running, plan.homes[number], self.max_num_seqs)

    def _suiting(self, rooms: list[Room], seq: Sequence) -> list[Room]:
        """The rooms that suit the sequence, best first. If it has a home, only that one; else those
        in which its first token comes at most one step later than in the best one."""
        if seq.request.home is not None:
            return [rooms[seq.request.home]]
        if len(rooms) == 1:
            return rooms
        size = self.hasher.block_size
        costs = {
            room.home.number: room.load - len(room.home.cached_prefix(seq)) * size for room in rooms
        }
        ordered = placing.in_order(self.homes, costs)
        most = costs[ordered[0].number] + self.max_num_batched_tokens
        return [rooms[home.number] for home in ordered if costs[home.number] <= most]

    def _admit_to(self, room: Room, seq: Sequence, plan: StepPlan) -> bool:
        """Try to run the sequence in this home now; True if it runs. A prompt is cut only if it is
        the only one of the step. A whole prompt is faster than two parts, and a step that is not
        quite full loses nothing. A long prompt has a step for itself.
        """
        home = room.home
        width = 1 + len(seq.pending_forks)
        cached = [] if seq.block_table else home.cached_prefix(seq)
        room.lacked_blocks = False
        wanted = seq.num_uncomputed - len(cached) * self.hasher.block_size
        if width > room.num_slots or room.is_crowded(wanted):
            return False
        count = self._chunk(seq, wanted, room, 2 * self.last_chunk_tokens)
        if not count:
            return False
        if not home.fits(seq, cached):
            room.lacked_blocks = True
            return False
        seq.request.home = home.number
        if not seq.block_table:
            home.take_prefix(seq, cached)
            self._count_prefix(seq)
        # with a pace, a long prompt may wait between two chunks: it must have all its blocks then
        copies = home.provide(seq, count if self._turns is None else seq.num_uncomputed)
        self.admitted.append(seq.request.key)
        self.run(seq)
        plan.add(seq, chunk_of(seq, count), copies)
        room.take(seq, count)
        return True

    def _chunk(self, seq: Sequence, wanted: int, room: Room, least: int) -> int:
        """Number of the wanted tokens to compute now. For `least` or more, an overlapped prompt's
        last chunk is short, and its other chunks are whole blocks. In a paced step a chunk that is
        not a prompt's last makes the rows of the step a multiple of a block. So they fill the CUDA
        graph that they run in.
        """
        size = self.hasher.block_size
        count = room.rows_for(wanted)
        if seq.request.overlap and wanted >= least:
            count = min(-(-(wanted - self.last_chunk_tokens) // size) * size, count)
        if room.is_paced and 1 < count < wanted:
            before = seq.num_computed  # may lie inside a block
            if not seq.request.overlap:
                before = self.max_num_batched_tokens - room.budget
            count = max(0, (before + count) // size * size - before)
        return count

    def _longest_prefix(self, seq: Sequence) -> int:
        """Number of cached blocks that a waiting sequence may begin with."""
        own = seq.request.home
        homes = self.homes if own is None else [self.homes[own]]
        return max(len(home.cached_prefix(seq)) for home in homes)

    def _count_prefix(self, seq: Sequence) -> None:
        request = seq.request
        if not request.prefix_looked_up:  # a preempted one would find what it computed itself
            request.prefix_looked_up = True
            request.cached_tokens = seq.num_computed
            self.prefix_queries += seq.num_tokens
            self.prefix_hits += seq.num_computed

    def preempt(self, seq: Sequence, plan: StepPlan) -> int:
        """Send a running sequence back to the queue, without blocks and out of the plan. Returns
        its number of rows in the plan."""
        num_rows = plan.remove(seq)
        self._stop_running(seq)
        seq.status = Status.WAITING
        self._give_back(seq)
        return num_rows

    def _give_back(self, seq: Sequence) -> None:
        """Take the blocks of a waiting sequence. Its request may then live in another home, unless
        another of its sequences has blocks."""
        self.home_of(seq).drop_blocks(seq)
        request = seq.request
        if not any(other.block_table for other in request.sequences):
            request.home = None
        self.add(seq)
        self.num_preemptions += 1

    def _break_hold_and_wait(self, home: Home) -> None:
        """Let the last waiting owner of imported blocks lose them, because nothing runs in the home
        and the first in line does not fit."""
        owners = [s for s in self.waiting if s.block_table and s.home == home.number]
        if len(owners) > 1:
            seq = owners[-1]
            self.waiting.remove(seq)
            self._give_back(seq)


def _close(rooms: list[Room]) -> None:
    """Close rooms to later sequences in line, because one was not admitted to them."""
    for room in rooms:
        room.home.wants_blocks |= room.lacked_blocks
        room.is_open = False


def _computes_prompt(seq: Sequence) -> bool:
    """True if a running sequence has more to compute than a decode."""
    return seq.num_uncomputed > 1


def _in_order(running: list[Sequence], num_stages: int) -> list[Sequence]:
    """The sequences that may continue: decodes first, however late they came. With stages, only
    decodes whose newest token is known, an equal share from each home, so that each stage has some.
    Those that waited longest come first."""
    if num_stages == 1:
        return sorted(running, key=_computes_prompt)
    decodes: dict[int, list[Sequence]] = {}
    for seq in running:
        if seq.num_uncomputed == 1 and not seq.is_complete:
            decodes.setdefault(seq.home, []).append(seq)
    chosen: list[Sequence] = []
    for in_home in decodes.values():
        known = sorted((s for s in in_home if not s.num_pending), key=lambda s: s.last_plan)
        chosen += known[: -(-len(in_home) // num_stages)]
    return chosen + [s for s in running if s.num_uncomputed > 1]
