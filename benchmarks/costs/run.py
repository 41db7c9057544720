"""Predicts whole rows of benchmarks/targets by the cost model. All prompts are given at once, and
steps are planned as the engine's scheduler plans them.

- Prompts are admitted whole under the token budget. Decodes come first. A prompt of LONG_PROMPT has
  a step for itself.
- With one stage, two steps are in flight.
- With several stages, a sequence is planned again when its token is known. A step has an equal
  share of the decodes, and the number of steps in flight is the number of stages plus one.
- Only as many sequences run at once as the KV cache holds at their full length.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.targets.table import OfflineRow
from pdserve.engine.scheduling.room import LONG_PROMPT
from pdserve.plan.costs.step import PIECES, Chunk, CostModel, Pieces, Step

BUDGET = 8192  # tokens per step, as in benchmarks/targets/measure.py
MAX_SEQS = 512


@dataclass(eq=False)
class _Sequence:
    uncomputed: int
    left: int  # tokens that are still to be planned
    keys: int = 0
    num_in_flight: int = 0
    last_plan: int = 0


@dataclass(frozen=True)
class Run:
    """The prediction of one row."""

    seconds: float  # from the call to the last token
    num_steps: int
    pieces: Pieces  # mean over stages; `idle` is waiting for the host or for another stage


def run(model: CostModel, num_requests: int, num_in: int, num_out: int) -> Run:
    """Predicts a run. With several homes, each has an equal share of the requests."""
    homes = min(model.degrees.dp, num_requests)
    return _Schedule(model, homes, -(-num_requests // homes), num_in, num_out).run()


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
    def __init__(
        self, model: CostModel, homes: int, num_requests: int, num_in: int, num_out: int
    ) -> None:
        self.model, self.homes = model, homes
        self.num_stages = model.degrees.pp
        self.in_flight_limit = 2 if self.num_stages == 1 else self.num_stages + 1
        self.waiting = deque(_Sequence(num_in, num_out) for _ in range(num_requests))
        self.running: list[_Sequence] = []
        self.num_plans = 0
        self.stage_layers = model.stage_layers()
        # Sequences are admitted with their full length, so that none is preempted.
        self.max_running = min(MAX_SEQS, model.room() // (num_in + num_out))
        if not self.max_running:
            raise ValueError(f"{model.degrees}: no request of {num_in + num_out} tokens fits")
        rates = model.rates
        self.host = rates.host_prompt_s + rates.host_token_s * num_requests * num_in * homes
        self.stage_free = [0.0] * self.num_stages
        self.pieces: Pieces = dict.fromkeys(PIECES, 0.0)

    def run(self) -> Run:
        in_flight: deque[tuple[float, Step, list[_Sequence]]] = deque()
        while self.waiting or self.running or in_flight:
            if len(in_flight) < self.in_flight_limit and (members := list(self._members())):
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
                    self.running.remove(seq)
        busy = sum(self.pieces.values())
        return Run(self.host, self.num_plans, self.pieces | {"idle": self.host - busy})

    def _members(self) -> Iterator[tuple[_Sequence, int]]:
        """Yields the sequences of the next step, and their rows."""
        decodes = [seq for seq in self.running if not seq.uncomputed and seq.left]
        if self.num_stages > 1:
            share = -(-len(decodes) // self.num_stages)
            known = [seq for seq in decodes if not seq.num_in_flight]
            decodes = sorted(known, key=lambda seq: seq.last_plan)[:share]
        budget = BUDGET - len(decodes)
        yield from ((seq, 1) for seq in decodes)
        longest = 1 if decodes else 0
        for seq in self.running:
            if seq.uncomputed and budget:
                count = min(seq.uncomputed, budget)
                yield seq, count
                budget -= count
                longest = max(longest, count)
        while self.waiting and budget and len(self.running) < self.max_running:
            wanted = self.waiting[0].uncomputed
            is_crowded = min(longest, wanted) > 1 and (
                wanted > budget or max(wanted, longest) >= LONG_PROMPT
            )
            if is_crowded:
                return
            seq = self.waiting.popleft()
            self.running.append(seq)
            count = min(wanted, budget)
            yield seq, count
            budget -= count
            longest = max(longest, count)

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
        stages = self.model.stages(step)
        for number, (pieces, layers) in enumerate(zip(stages, self.stage_layers, strict=True)):
            seconds = sum(pieces.values())
            if step.chunks:  # an eager step takes at least the time of its launches
                seconds = max(seconds, self.model.launches_s(layers))
            ready = max(ready, self.stage_free[number]) + seconds
            self.stage_free[number] = ready
            for piece, part in pieces.items():
                self.pieces[piece] += part / self.num_stages
        return ready

    def _host_s(self, step: Step) -> float:
        rates = self.model.rates
        return rates.host_step_s + rates.host_row_s * step.num_samples * self.homes
