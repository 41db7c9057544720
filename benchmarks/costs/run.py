"""Predicts whole rows of benchmarks/targets by the cost model. All prompts are given at once, and
steps are planned as the engine's scheduler plans them.

- Prompts are admitted whole under the token budget. Decodes come first. A prompt of LONG_PROMPT has
  a step for itself.
- With one stage, two steps are in flight.
- With several stages, a sequence is planned again when its token is known. A step has an equal
  share of the decodes, and the number of steps in flight is the number of stages plus one.
- A prompt is admitted if its blocks are free and each running sequence may grow into another one.
  If blocks run out, steps in flight are completed, and the last running sequence is preempted.
- A stage that waited computes its next step at the rate of a card that has rested.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.targets.table import OfflineRow
from pdserve.engine.scheduling.room import LONG_PROMPT
from pdserve.plan.costs.step import PIECES, Chunk, CostModel, Pieces, Step

BUDGET = 8192  # tokens per step, as in benchmarks/targets/measure.py
MAX_SEQS = 512
BLOCK = 64  # tokens per block, EngineConfig.block_size


@dataclass(eq=False)
class _Sequence:
    uncomputed: int
    left: int  # tokens that are still to be planned
    keys: int = 0
    is_running: bool = False
    num_in_flight: int = 0
    last_plan: int = 0

    @property
    def num_blocks(self) -> int:
        return -(-self.keys // BLOCK)


@dataclass(frozen=True)
class Run:
    """The prediction of one row."""

    seconds: float  # from the call to the last token
    num_steps: int
    pieces: Pieces  # mean over stages; `idle` is waiting for the host or for another stage


def run(model: CostModel, num_requests: int, num_in: int, num_out: int) -> Run:
    """Predicts a run. With several homes, each has an equal share of the requests."""
    homes = min(model.degrees.dp, num_requests)
    given = homes, -(-num_requests // homes), num_in, num_out
    # Rows are measured again and again, so that stages begin as rested as the run before left them.
    before = _Schedule(model, *given)
    predicted = before.run()
    if model.degrees.pp == 1:
        return predicted
    return _Schedule(model, *given, rested=before.rested_at_end()).run()


def figure(model: CostModel, row: OfflineRow) -> tuple[float, Run]:
    """Returns the row's figure in its own unit, and the run from which it comes. Raises ValueError
    if the row is not a run of fixed lengths."""
    shape = row.shape
    if shape is None or shape.input_len.low != shape.input_len.high:
        raise ValueError(f"{row.id}: no fixed lengths")
    num, num_in, num_out = shape.num_prompts, shape.input_len.low, shape.output_len.low
    whole = run(model, num, num_in, num_out)
    if row.metric == "prefill_ms":
        return whole.seconds * 1e3, whole
    if row.metric == "decode_ms_per_token":
        prompt = run(model, num, num_in, 1)
        return (whole.seconds - prompt.seconds) / (num_out - 1) * 1e3, whole
    if row.metric == "tokens_per_s":
        return num * (num_in + num_out) / whole.seconds, whole
    return whole.seconds, whole


class _Schedule:
    """rested: seconds that each stage may begin at the rate of a rested card."""

    def __init__(
        self,
        model: CostModel,
        homes: int,
        num_requests: int,
        num_in: int,
        num_out: int,
        rested: Sequence[float] | None = None,
    ) -> None:
        self.model, self.homes = model, homes
        rates = model.rates
        self.rested_model = replace(
            model, rates=replace(rates, flops_per_s=rates.rested_flops_per_s)
        )
        self.num_stages = model.degrees.pp
        self.in_flight_limit = 2 if self.num_stages == 1 else self.num_stages + 1
        self.waiting = deque(_Sequence(num_in, num_out) for _ in range(num_requests))
        self.running: list[_Sequence] = []
        self.num_plans = 0
        self.is_blocked = False
        self.stage_layers = model.stage_layers()
        self.num_blocks = model.room() // BLOCK
        if self.num_blocks * BLOCK < num_in + num_out:
            raise ValueError(f"{model.degrees}: no request of {num_in + num_out} tokens fits")
        self.host = rates.host_prompt_s + rates.host_token_s * num_requests * num_in * homes
        self.stage_free = [0.0] * self.num_stages
        self.rested = list(rested or [0.0] * self.num_stages)
        self.pieces: Pieces = dict.fromkeys(PIECES, 0.0)

    def run(self) -> Run:
        in_flight: deque[tuple[float, Step, list[_Sequence]]] = deque()
        while self.waiting or self.running or in_flight:
            is_open = len(in_flight) < self.in_flight_limit
            is_open = is_open and not (self.is_blocked and in_flight)
            if is_open and (members := self._members(may_preempt=not in_flight)):
                step = self._plan(members)
                self.host += self._host_s(step) * self.model.rates.host_planning_share
                in_flight.append((self._device(step), step, [seq for seq, _ in members]))
                continue
            ended, step, sequences = in_flight.popleft()
            share = 1 - self.model.rates.host_planning_share
            self.host = max(self.host, ended) + self._host_s(step) * share
            for seq in sequences:
                seq.num_in_flight -= 1
                if not seq.left and not seq.num_in_flight:
                    self._stop(seq)
        busy = sum(self.pieces.values())
        return Run(self.host, self.num_plans, self.pieces | {"idle": self.host - busy})

    def rested_at_end(self) -> list[float]:
        """Returns the seconds that each stage has rested since its last steps, after run()."""
        ends = zip(self.rested, self.stage_free, strict=True)
        return [self._rest(rested, self.host - free) for rested, free in ends]

    def _members(self, may_preempt: bool) -> list[tuple[_Sequence, int]]:
        """Returns the sequences of the next step, and their rows. Sets is_blocked if a running one
        lacks blocks, which steps in flight still have."""
        self.is_blocked = False
        members: list[tuple[_Sequence, int]] = []
        free = self.num_blocks - sum(seq.num_blocks for seq in self.running)
        for seq in self._decodes():
            if not seq.is_running:  # an earlier one has preempted it
                continue
            while seq.keys % BLOCK == 0 and not free:
                if not may_preempt:
                    self.is_blocked = True
                    return members
                last = self.running[-1]
                free += last.num_blocks
                members = [member for member in members if member[0] is not last]
                self._preempt(last)
                if last is seq:
                    break
            else:
                free -= seq.keys % BLOCK == 0
                members.append((seq, 1))
        budget = BUDGET - len(members)
        longest = 1 if members else 0
        for seq in self.running:
            if seq.uncomputed and budget:
                count = min(seq.uncomputed, budget)
                members.append((seq, count))
                budget -= count
                longest = max(longest, count)
        while self.waiting and budget and len(self.running) < MAX_SEQS:
            wanted = self.waiting[0].uncomputed
            blocks = -(-wanted // BLOCK)
            is_crowded = min(longest, wanted) > 1 and (
                wanted > budget or max(wanted, longest) >= LONG_PROMPT
            )
            if is_crowded or blocks > free - len(self.running):
                break
            seq = self.waiting.popleft()
            self.running.append(seq)
            seq.is_running = True
            free -= blocks
            count = min(wanted, budget)
            members.append((seq, count))
            budget -= count
            longest = max(longest, count)
        return members

    def _decodes(self) -> list[_Sequence]:
        """Returns the decodes that may be planned, in their order."""
        decodes = [seq for seq in self.running if not seq.uncomputed and seq.left]
        if self.num_stages == 1:
            return decodes
        share = -(-len(decodes) // self.num_stages)
        known = [seq for seq in decodes if not seq.num_in_flight]
        return sorted(known, key=lambda seq: seq.last_plan)[:share]

    def _preempt(self, seq: _Sequence) -> None:
        """Sends a running sequence back to wait. It computes again what it had, and then its newest
        token."""
        self._stop(seq)
        seq.uncomputed += seq.keys + (not seq.uncomputed)
        seq.keys = 0
        self.waiting.appendleft(seq)

    def _stop(self, seq: _Sequence) -> None:
        self.running.remove(seq)
        seq.is_running = False

    def _plan(self, members: list[tuple[_Sequence, int]]) -> Step:
        self.num_plans += 1
        chunks = []
        num_decodes, num_keys = 0, 0
        for seq, count in members:
            if seq.uncomputed:
                seq.uncomputed -= count
                chunks.append(Chunk(seq.keys, count, samples=not seq.uncomputed))
            else:
                num_decodes += 1
                num_keys += seq.keys + 1
            seq.keys += count
            seq.num_in_flight += 1
            seq.last_plan = self.num_plans
            seq.left -= not seq.uncomputed
        return Step(num_decodes, num_keys, tuple(chunks), self.homes)

    def _device(self, step: Step) -> float:
        """Returns when the last stage is done with a step that is sent now."""
        ready = self.host + self.model.rates.message_s * (self.model.degrees.num_gpus > 1)
        stages = zip(self.model.stages(step), self.rested_model.stages(step), strict=True)
        for number, (at_limit, fast) in enumerate(stages):
            begin = max(ready, self.stage_free[number])
            pieces = self._paced(number, begin, at_limit, fast)
            seconds = sum(pieces.values())
            if step.chunks:  # an eager step takes at least the time of its launches
                seconds = max(seconds, self.model.launches_s(self.stage_layers[number]))
            ready = begin + seconds
            self.stage_free[number] = ready
            for piece, part in pieces.items():
                self.pieces[piece] += part / self.num_stages
        return ready

    def _paced(self, number: int, begin: float, at_limit: Pieces, fast: Pieces) -> Pieces:
        """Returns the pieces of a stage's step: at the rates of a rested card for as long as the
        stage has rested, and then at those of a card at its power limit."""
        rested = self._rest(self.rested[number], begin - self.stage_free[number])
        whole = sum(fast.values())
        share = min(1.0, rested / whole)
        self.rested[number] = rested - share * whole
        return {piece: share * fast[piece] + (1 - share) * part for piece, part in at_limit.items()}

    def _rest(self, rested: float, idle_s: float) -> float:
        return min(rested + idle_s, self.model.rates.rest_s)

    def _host_s(self, step: Step) -> float:
        rates = self.model.rates
        return rates.host_step_s + rates.host_row_s * step.num_samples * self.homes
