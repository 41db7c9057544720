"""An engine in virtual time: the real scheduler, homes and pace over steps that take what a formula
says, for tests of what users wait for.

The formula is not the model's own form: the larger of reading weights and computing, plus
attention, plus what a step without a graph costs, with noise. No tokens are sampled and nothing is
hashed, so a minute of 50 streams takes a second.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.configs.router import SloConfig
from pdserve.engine.graph_sizes import nearest_size
from pdserve.engine.pacing.pace import Pace
from pdserve.engine.pacing.step_model import StepLoad, attended_by
from pdserve.engine.requests import Requests
from pdserve.engine.scheduling.home import Homes
from pdserve.engine.scheduling.request_checker import RequestChecker
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.scheduling.sequence import Request, Sequence, Status
from pdserve.engine.scheduling.step_plan import StepPlan
from pdserve.engine.warm_up import TAUGHT_LENGTHS, TAUGHT_TOKENS
from pdserve.protocol.block_digests import BlockHasher
from pdserve.protocol.commands import Start, Submit
from pdserve.protocol.request_key import RequestKey, RequestKind
from pdserve.protocol.sampling_params import SamplingParams

BLOCK = 16
StepTime = Callable[[StepPlan, random.Random], float]


GRAPHS = (*range(64, 385, 64), 512, 640, 768, 1024)  # rows of the graphs that an H200 uses


def seconds_of(load: StepLoad) -> float:
    """Seconds of a step of an 8B model on an H200, about (profile-h200.json)."""
    rows = load.num_rows
    if load.num_prompt_rows:
        rows = nearest_size(GRAPHS, rows) or rows
        seconds = max(5.6e-3, 3e-3 + rows * 16e-6, rows * 23e-6)
    else:
        seconds = max(4e-3, rows * 23e-6)
    return seconds + load.context_tokens * 3.3e-8 + load.attended * 1.3e-9


def h200(plan: StepPlan, rng: random.Random, noise: float = 0.03, slower: float = 1.0) -> float:
    """Seconds of a step, with noise."""
    longest = 0.0
    for home in plan.homes:
        decodes = prompts = context = 0
        attended = 0.0
        for seq, chunk in home.chunks.items():
            if chunk.num_rows == 1:
                decodes += 1
                context += seq.num_computed
            else:
                prompts += chunk.num_rows
                start = seq.num_computed - chunk.num_rows  # the plan has counted its rows
                attended += attended_by(chunk.num_rows, start)
        longest = max(longest, seconds_of(StepLoad(prompts, decodes, context, attended)))
    return longest * slower * (1 + noise * abs(rng.gauss(0, 1)))


@dataclass
class Call:
    """A call that comes at second `at`. num_output: tokens that it really generates. max_tokens:
    tokens that it asks for."""

    at: float
    num_prompt: int
    num_output: int
    max_tokens: int = 0
    n: int = 1
    priority: int = 0
    kind: RequestKind = "generate"
    starts: tuple[Start, ...] = ()
    waited_ms: float = 0.0


@dataclass
class Course:
    """The course of a call: when its tokens came, for each choice."""

    call: Call
    tokens: dict[int, list[float]] = field(default_factory=dict)
    ended_at: float | None = None

    @property
    def ttft_s(self) -> float:
        """From the call to the first token of any choice (or, of an embedding, to its end)."""
        firsts = [times[0] for times in self.tokens.values() if times]
        at = min(firsts) if firsts else self.ended_at
        return float("inf") if at is None else at - self.call.at + self.call.waited_ms / 1e3

    @property
    def tpot_s(self) -> float:
        """Mean between the tokens behind the first, of the slowest choice."""
        spans = [(t[-1] - t[0]) / (len(t) - 1) for t in self.tokens.values() if len(t) > 1]
        return max(spans, default=0.0)

    def keeps(self, ttft_s: float, tpot_s: float) -> bool:
        return self.ended_at is not None and self.ttft_s <= ttft_s and self.tpot_s <= tpot_s


class PaperTime:
    """An engine in paper time. budget: max_num_batched_tokens. slo: None means no pace."""

    def __init__(
        self,
        slo: SloConfig | None,
        budget: int = 8192,
        step_time: StepTime = h200,
        num_blocks: int = 20_000,
        num_homes: int = 1,
        max_num_seqs: int = 256,
        max_in_flight: int = 2,
        seed: int = 0,
    ) -> None:
        self.now = 0.0
        hasher = BlockHasher("rows", BLOCK, "model")
        self.homes = Homes(num_homes, num_blocks, hasher, max_num_seqs, enable_caching=False)
        self.pace = None
        if slo is not None:
            self.pace = Pace(
                slo.ttft_ms and slo.ttft_ms / 1e3,
                slo.tpot_ms and slo.tpot_ms / 1e3,
                budget,
                lambda: self.now,
                GRAPHS,
            )
        self.scheduler = Scheduler(self.homes, hasher, budget, max_num_seqs, 1, self.pace)
        self.requests = Requests(self.scheduler)
        self.checker = RequestChecker(256, (), 1 << 20, max_num_seqs, lambda: self.now)
        self.courses: list[Course] = []
        self.steps: list[tuple[float, int, int]] = []  # seconds, prompt rows, decodes
        self.on_step: Callable[[StepPlan], None] = lambda plan: None
        self._course_of: dict[RequestKey, Course] = {}
        self._step_time = step_time
        self._max_in_flight = max_in_flight
        self._rng = random.Random(seed)
        self._names = itertools.count()
        self._in_flight: deque[tuple[StepPlan, list[Sequence], float]] = deque()
        self._embedded: dict[int, list[Sequence]] = {}
        self._device_free_at = 0.0
        self._calls: list[tuple[float, int, Call]] = []

    def teach(self) -> None:
        """Show the pace some steps, as an engine that starts does (engine/warm_up.py)."""
        assert self.pace is not None
        for rows in (8192, *TAUGHT_LENGTHS):
            prompt = StepLoad().with_prompt(rows, 0)
            for load in (prompt, *[StepLoad(0, 1, rows)] * TAUGHT_TOKENS):
                self.pace.model.observe(load, seconds_of(load))

    def submit(self, call: Call) -> Request:
        """It comes now."""
        sampling = SamplingParams(
            temperature=0, seed=0, n=call.n, max_tokens=call.max_tokens or call.num_output
        )
        key = RequestKey("paper", 0, str(next(self._names)))
        starts = call.starts or tuple(Start(choice) for choice in range(call.n))
        request = self.checker.request(
            Submit(
                key=key,
                phase="full",
                prompt_token_ids=(1,) * call.num_prompt,
                sampling=sampling,
                starts=starts,
                priority=call.priority,
                kind=call.kind,
                waited_ms=call.waited_ms,
            )
        )
        self.requests.register(request)
        self.courses.append(Course(call))
        self._course_of[key] = self.courses[-1]
        fresh = not any(start.forced for start in starts)
        for start in starts[:1] if fresh else starts:
            seq = self.requests.new_sequence(request, start)
            if fresh:
                seq.pending_forks = tuple(s.choice for s in starts[1:])
            self.scheduler.add(seq)
        return request

    def run(self, calls: list[Call], until: float = float("inf")) -> list[Course]:
        """All that come, to their ends, or until that second."""
        for call in calls:
            heapq.heappush(self._calls, (call.at, next(self._names), call))
        while self.now < until and (self._calls or self.scheduler.has_work or self._in_flight):
            while self._calls and self._calls[0][0] <= self.now:
                self.submit(heapq.heappop(self._calls)[2])
            if not self._step():
                assert self._calls, "nothing can run, and nothing will come"
                self.now = max(self.now, self._calls[0][0])
        return self.courses

    def _step(self) -> bool:
        while len(self._in_flight) < self._max_in_flight:
            plan = self.scheduler.schedule(may_preempt=not self._in_flight)
            if not plan:
                break
            self._forward(plan)
            if plan.blocked:
                break
        ended = bool(self._in_flight)
        if ended:
            self._collect()
        goes_on = ended and self.scheduler.has_work
        if self.pace is not None and not self._in_flight and not goes_on:
            self.pace.in_flight.rested()
        return ended

    def _forward(self, plan: StepPlan) -> None:
        self.on_step(plan)
        members = []
        for home in self.homes:
            home.blocks.begin_step()
            home.freed_slots.clear()
        for seq, chunk in plan:
            seq.num_computed += chunk.num_rows
            if chunk.num_samples:
                members += [seq, *self._fork(seq)]
        for seq in members:
            seq.num_pending += 1
        seconds = self._step_time(plan, self._rng)
        rows = sum(c.num_rows for _, c in plan if c.num_rows > 1)
        self.steps.append((seconds, rows, sum(c.num_rows == 1 for _, c in plan)))
        self._device_free_at = max(self._device_free_at, self.now) + seconds
        self._in_flight.append((plan, members, self._device_free_at))

    def _fork(self, seq: Sequence) -> list[Sequence]:
        forks = []
        for choice in seq.pending_forks:
            fork = self.requests.new_sequence(seq.request, Start(choice))
            fork.num_computed = seq.num_computed
            fork.block_table = list(seq.block_table)
            self.scheduler.home_of(fork).blocks.acquire(fork.owned_blocks)
            self.scheduler.run(fork)
            forks.append(fork)
        seq.pending_forks = ()
        return forks

    def _collect(self) -> None:
        plan, members, ended_at = self._in_flight.popleft()
        self.now = ended_at
        for home in self.homes:
            home.blocks.end_step()
        for seq in members:
            if seq.status is Status.FINISHED:
                continue
            course = self._course_of[seq.request.key]
            if not seq.num_generated:
                seq.first_token_at = self.now
            seq.num_pending -= 1
            seq.token_ids.append(1)
            course.tokens.setdefault(seq.choice, []).append(self.now)
            if seq.num_generated >= course.call.num_output:
                self._finish(seq, course)
        for seq, _ in plan:
            if seq.request.kind == "embed" and not seq.num_uncomputed:
                self._finish(seq, self._course_of[seq.request.key])
        if self.pace is not None:
            self.pace.collected()

    def _finish(self, seq: Sequence, course: Course) -> None:
        if seq.status is not Status.FINISHED:
            self.requests.finish(seq)
            course.ended_at = self.now

    def assert_empty(self) -> None:
        self.scheduler.check_integrity()
        assert not self.scheduler.has_work
        assert self.homes.num_free_blocks == self.homes.num_usable_blocks


def poisson(
    rng: random.Random,
    rate: float,
    seconds: float,
    prompt: Callable[[], int],
    output: Callable[[], int],
) -> list[Call]:
    """Calls at random times. prompt, output: draw a number of tokens."""
    calls: list[Call] = []
    at = rng.expovariate(rate)
    while at < seconds:
        num_output = output()
        calls.append(Call(at, prompt(), num_output, max_tokens=2 * num_output))
        at += rng.expovariate(rate)
    return calls
