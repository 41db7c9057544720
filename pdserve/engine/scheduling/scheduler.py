"""Decides how many tokens of which sequence the next step computes, and gives them blocks.

One scheduler for both phases: `schedule()` returns a chunk of rows for each sequence under a token
budget. Running sequences come first (a decode is one token, a prefill a chunk), then waiting ones
are admitted. When blocks run out, the running sequence that comes last in order is preempted: it
loses its blocks and computes everything again later. Knows nothing of devices, sampling or
hand-off; called by the engine.

    WAITING --admit--> RUNNING --finish--> FINISHED
       ^------preempt-----'

A running sequence has a slot, its row in the device's tables. Plans are made from counts alone, so
the next one does not wait for the tokens of a step in flight (docs/engine-step.md).
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence as SequenceOf

from pdserve.engine.memory.block_manager import BlockManager, OutOfBlocks
from pdserve.engine.scheduling.home import Home
from pdserve.engine.scheduling.sequence import Sequence, Status
from pdserve.engine.scheduling.step_plan import Chunk, StepPlan
from pdserve.protocol.block_digests import BlockHasher
from pdserve.protocol.request_key import RequestKey

# tokens that fill a GPU: beside another prompt both would only wait for each other
LONG_PROMPT = 2048
# tokens, at most, of an overlapped prompt's last chunk: what is left to move when it is computed
LAST_CHUNK = 2048
# sequences whose cached prefix tells the queue's length: hashing 16 x 8k tokens takes 11 ms
QUEUE_LOOK_UPS = 16
ADMITTED_KEPT = 4096  # more than a step admits; whoever counts times empties it after each


class Scheduler:
    """Continuous batching with chunked prefill, prefix caching, priorities and preemption by
    recompute."""

    def __init__(
        self,
        homes: SequenceOf[Home],
        hasher: BlockHasher,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        num_stages: int = 1,
    ) -> None:
        self.homes = tuple(homes)
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
        """Forget all sequences, whatever state an interruption left the queues in. Totals stay."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.admitted: deque[RequestKey] = deque(maxlen=ADMITTED_KEPT)
        for home in self.homes:
            home.free_all_slots()
        self.wants_blocks = False  # the first in line waits for blocks

    def home_of(self, seq: Sequence) -> Home:
        return self.homes[seq.home]

    @property
    def parts_from(self) -> int:
        """Overlapped prompts of so many tokens take more than one step: shorter ones are faster in
        one."""
        return min(2 * self.last_chunk_tokens, self.max_num_batched_tokens + 1)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def num_queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed, of waiting and of half-computed sequences.
        Cached prefixes are left out: as many of all that wait as of the first in line."""
        cut = sum(seq.num_uncomputed for seq in self.running if seq.num_uncomputed > 1)
        first = self.waiting[:QUEUE_LOOK_UPS]
        looked_at = sum(seq.num_uncomputed for seq in first)
        cached = (
            sum(len(self._cached_prefix(seq)) for seq in first if not seq.block_table)
            * self.hasher.block_size
        )
        total = sum(seq.num_uncomputed for seq in self.waiting)
        return cut + (total * (looked_at - cached) // looked_at if looked_at else 0)

    def add(self, seq: Sequence) -> None:
        """Queue a waiting sequence: those that own (imported) blocks first, then by priority and
        arrival."""
        insort(self.waiting, seq, key=lambda s: (not s.block_table, *s.order))

    def run(self, seq: Sequence) -> None:
        """Run a sequence that admission has counted: that it took from the queue, or that just
        forked off a running one."""
        seq.status = Status.RUNNING
        seq.slot = self.home_of(seq).take_slot()
        seq.num_synced = 0
        insort(self.running, seq, key=lambda s: s.order)

    def finish(self, seq: Sequence) -> None:
        """Take the sequence out and free its blocks; idempotent."""
        if seq.status is Status.FINISHED:
            return
        if seq.status is Status.RUNNING:
            self._stop_running(seq)
        else:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED
        self._drop_blocks(seq)

    def schedule(self, may_preempt: bool = True) -> StepPlan:
        """The next step's work; empty when nothing can run now (no work, or the blocks are pinned
        elsewhere).

        may_preempt: False while steps are in flight, whose blocks and tokens a preemption would
        pull away.
        """
        plan = StepPlan()
        self.wants_blocks = False
        budget = self.max_num_batched_tokens
        preemptions = self.num_preemptions
        for seq in _in_order(self.running, self.num_stages):
            if budget == 0:
                break
            # It may have been preempted for one before it.
            if seq.status is Status.RUNNING and not seq.is_complete:
                budget -= self._continue(seq, budget, plan, may_preempt)
        if self.num_preemptions == preemptions and not plan.blocked:
            self._admit(budget, plan)
        if not plan and self.waiting and not self.running and may_preempt:
            self._break_hold_and_wait()
        if self.num_stages > 1:
            self._num_plans += 1
            for seq in plan.chunks:
                seq.last_plan = self._num_plans
        return plan

    def commit_full_blocks(self, seq: Sequence) -> None:
        """Make the full blocks whose tokens are known findable. Their rows may be in flight:
        whoever reads them by a later step reads behind the write, and nothing is published before
        its step is complete.
        """
        full = min(seq.num_computed, len(seq.token_ids)) // self.hasher.block_size
        if full > seq.num_committed:
            blocks = self.home_of(seq).blocks
            if blocks.enable_caching:
                hashes = seq.hashes(self.hasher)
                for index in range(seq.num_committed, full):
                    blocks.commit(seq.block_table[index], hashes[index])
            seq.num_committed = full

    def check_integrity(self) -> None:
        """AssertionError when a queue holds a sequence in the wrong state."""
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

    def _continue(self, seq: Sequence, budget: int, plan: StepPlan, may_preempt: bool) -> int:
        """StepPlan the next chunk of a running sequence, preempting from the back; returns its
        tokens (0: preempted itself, or blocked), less those of whom it pushed out of the plan.
        """
        count = self._chunk(seq, seq.num_uncomputed, budget, self.last_chunk_tokens + 1)
        given_back = 0
        while seq.status is Status.RUNNING:
            try:
                self._provide(seq, count, plan)
            except OutOfBlocks:
                if not may_preempt:
                    plan.blocked = True
                    return 0
                given_back += self.preempt(self.running[-1], plan)
            else:
                plan.chunks[seq] = _chunk_of(seq, count)
                return count - given_back
        return -given_back

    def _admit(self, budget: int, plan: StepPlan) -> None:
        """Start waiting sequences while they fit. A prompt is cut only where it is the step's only
        one: a whole prompt is faster than two parts, and a step that is not quite full loses
        nothing. A long one has a step for itself.
        """
        if not self.waiting:
            return
        slots = self.max_num_seqs - sum(
            1 + len(s.pending_forks) for s in self.running if not s.is_complete
        )
        # complete ones keep theirs while their last step is in flight
        free = [home.num_free_slots for home in self.homes]
        for running in self.running:
            free[running.home] -= len(running.pending_forks)
        longest = max((chunk.num_rows for chunk in plan.chunks.values()), default=0)
        while self.waiting and budget > 0:
            seq = self.waiting[0]
            width = 1 + len(seq.pending_forks)
            cached = [] if seq.block_table else self._cached_prefix(seq)
            wanted = seq.num_uncomputed - len(cached) * self.hasher.block_size
            is_crowded = min(longest, wanted) > 1 and (
                wanted > budget or max(wanted, longest) >= LONG_PROMPT
            )
            if width > min(slots, free[seq.home]) or is_crowded:
                return
            if not self._fits(seq, cached):
                self.wants_blocks = True
                return
            if not seq.block_table:
                self._take_prefix(seq, cached)
            count = self._chunk(seq, wanted, budget, 2 * self.last_chunk_tokens)
            self._provide(seq, count, plan)
            self.waiting.pop(0)
            self.admitted.append(seq.request.key)
            self.run(seq)
            plan.chunks[seq] = _chunk_of(seq, count)
            longest = max(longest, count)
            budget -= count
            slots -= width
            free[seq.home] -= width

    def _chunk(self, seq: Sequence, wanted: int, budget: int, least: int) -> int:
        """How many of the tokens to compute now. Of `least` or more, an overlapped prompt's last
        chunk is short, and the others are whole blocks.
        """
        if not seq.request.overlap or wanted < least:
            return min(wanted, budget)
        size = self.hasher.block_size
        return min(-(-(wanted - self.last_chunk_tokens) // size) * size, budget)

    def _fits(self, seq: Sequence, cached: list[int]) -> bool:
        """Whether all tokens of a waiting sequence fit now behind its cached prefix, beside a block
        for each running one to grow into: else it would soon be preempted again.
        """
        home = self.home_of(seq)
        blocks = home.blocks
        shared = self._writes_shared_block(seq, blocks)
        missing = self._num_missing(seq, seq.num_tokens) - len(cached) + shared
        return missing + blocks.num_free_among(cached) + home.num_running <= blocks.num_free

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        blocks = self.home_of(seq).blocks
        if seq.request.wants_prompt_logprobs or not blocks.enable_caching:
            return []
        # the last token is always computed, for its logits
        limit = (seq.num_tokens - 1) // self.hasher.block_size
        return blocks.match(seq.hashes(self.hasher)[:limit])

    def _take_prefix(self, seq: Sequence, cached: list[int]) -> None:
        self.home_of(seq).blocks.acquire(cached)
        seq.block_table = cached
        seq.num_committed = len(cached)
        seq.num_computed = len(cached) * self.hasher.block_size
        request = seq.request
        if not request.prefix_looked_up:  # after a preemption it would find what it computed itself
            request.prefix_looked_up = True
            request.cached_tokens = seq.num_computed
            self.prefix_queries += seq.num_tokens
            self.prefix_hits += seq.num_computed

    def _provide(self, seq: Sequence, count: int, plan: StepPlan) -> None:
        """Blocks for the next `count` rows of `seq`, its own copy of a shared partial block first;
        or OutOfBlocks."""
        blocks = self.home_of(seq).blocks
        missing = self._num_missing(seq, seq.num_computed + count)
        shared = self._writes_shared_block(seq, blocks)
        if missing + shared > blocks.num_free:
            raise OutOfBlocks(f"{missing + shared} blocks wanted, {blocks.num_free} free")
        if shared:
            index = seq.num_computed // self.hasher.block_size
            source = seq.block_table[index]
            [target] = blocks.allocate(1)
            blocks.release([source])
            seq.block_table[index] = target
            seq.num_synced = min(seq.num_synced, index)
            plan.copies.append((source, target))
        if missing:
            after = seq.block_table[-1] if seq.block_table else None
            seq.block_table += blocks.allocate(missing, after)

    def _num_missing(self, seq: Sequence, num_rows: int) -> int:
        return max(0, -(-num_rows // self.hasher.block_size) - len(seq.block_table))

    def _writes_shared_block(self, seq: Sequence, blocks: BlockManager) -> bool:
        index = seq.num_computed // self.hasher.block_size
        return index < len(seq.block_table) and blocks.num_owners(seq.block_table[index]) > 1

    def preempt(self, seq: Sequence, plan: StepPlan) -> int:
        """The sequence waits again, without blocks, and leaves the plan. Returns how many of its
        tokens were in it."""
        planned = plan.chunks.pop(seq, None)
        plan.copies = [
            (source, target) for source, target in plan.copies if target not in seq.owned_blocks
        ]
        self._stop_running(seq)
        seq.status = Status.WAITING
        self._drop_blocks(seq)
        self.add(seq)
        self.num_preemptions += 1
        return planned.num_rows if planned else 0

    def _break_hold_and_wait(self) -> None:
        """Nothing runs and the first in line does not fit: the last waiting owner of imported
        blocks loses them."""
        owners = [s for s in self.waiting[1:] if s.block_table]
        if owners:
            seq = owners[-1]
            self.waiting.remove(seq)
            self._drop_blocks(seq)
            self.add(seq)
            self.num_preemptions += 1

    def _drop_blocks(self, seq: Sequence) -> None:
        self.home_of(seq).blocks.release(seq.owned_blocks)
        seq.block_table = []
        seq.num_dropped = 0
        seq.num_computed = 0
        seq.num_committed = 0


def _chunk_of(seq: Sequence, num_rows: int) -> Chunk:
    """The last row of a sequence samples, if tokens are wanted of it."""
    samples = num_rows == seq.num_uncomputed and seq.request.kind == "generate"
    return Chunk(num_rows, num_samples=int(samples))


def _in_order(running: list[Sequence], num_stages: int) -> list[Sequence]:
    """Returns those that may go on: decodes first, however late they came. With stages only decodes
    whose newest token is known, and an equal share of them, so that each stage has some; those
    first that waited longest."""
    if num_stages == 1:
        return sorted(running, key=lambda s: s.num_uncomputed > 1)
    decodes = [s for s in running if s.num_uncomputed == 1 and not s.is_complete]
    share = -(-len(decodes) // num_stages)
    known = sorted((s for s in decodes if not s.num_pending), key=lambda s: s.last_plan)
    return known[:share] + [s for s in running if s.num_uncomputed > 1]
