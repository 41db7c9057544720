"""An engine whose homes share experts, and its clients, in virtual time.

Engine, scheduler and pace are the real ones. A step takes what the cost model says for the rows of
all homes together: each computes as many rows as the largest does if the step replays graphs, and
the experts see the rows of all. While the host launches a step without graphs, it sees nothing
else. Routers and HTTP are a delay per token and per request. `virtual_time.patch_clocks` must run
before this module is imported. homes_on_paper.py uses it.
"""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.configs.engine import EngineConfig
from pdserve.configs.router import SloConfig
from pdserve.engine.engine import Engine
from pdserve.engine.graph_sizes import decode_sizes, nearest_size
from pdserve.engine.step_result import HomeSize
from pdserve.engine.stepping.executor import Padding
from pdserve.engine.stepping.packing import unpack
from pdserve.engine.stepping.work import ForwardWork, HomeWork, StepShape
from pdserve.engine.warm_up import teach_pace
from pdserve.models.config import ModelSpec
from pdserve.plan.costs.step import Chunk, CostModel, Degrees, Step
from pdserve.plan.profile.profile import DEFAULT, read_profile
from pdserve.plan.profile.step_times import StepTimes
from pdserve.plan.simulation.paper_engine import paper_engine
from pdserve.plan.simulation.paper_executor import PaperExecutor, PaperStep
from pdserve.plan.simulation.virtual_time import CLOCK
from pdserve.protocol.commands import Start, Submit
from pdserve.protocol.events import Delta
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams

HEAD_START_S = 5e-3  # within which the clients of a closed loop begin


@dataclass(frozen=True)
class Costs:
    """Seconds that the cost model does not know, and factors on those that it says."""

    captured: Sequence[int]  # numbers of rows of the steps with prompts that have graphs
    eager_s: float = 80e-3  # the host's launches of a step with prompts without graphs
    eager_spread: float = 0.2  # its standard deviation, relative
    graphs_s: float = 3e-3  # the same with graphs
    alone: float = 1.06  # factor on steps of decodes, and on those in which one home has prompts
    together: float = 1.15  # factor on steps in which several homes have prompts
    noise: float = 0.02  # a step takes at least its predicted time
    plan_s: float = 0.4e-3
    plan_row_s: float = 4.2e-6
    call_s: float = 2e-3  # from the client to the engine
    answer_s: float = 1.2e-3  # from the engine to the client
    router_token_s: float = 40e-6  # of a router's thread, for a token
    router_call_s: float = 0.6e-3  # of a router's thread, for a request


class LockStepExecutor(PaperExecutor):
    """An executor on paper for homes in lock step. num_mixed, num_eager: steps with prompts so far,
    and those of them without graphs."""

    def __init__(self, engine: Engine, model: CostModel, costs: Costs, seed: int) -> None:
        super().__init__(StepTimes(read_profile(DEFAULT)), engine.layout)
        self._model = model
        self._costs = costs
        self._decode_sizes = decode_sizes(engine.config.max_num_seqs)
        self._random = random.Random(seed)
        self.clear()

    def clear(self) -> None:
        """Set the counts to 0."""
        self.num_mixed = self.num_eager = 0

    def padding(self, homes: Sequence[HomeSize]) -> list[Padding]:
        found = super().padding(homes)
        if all(home.is_decode for home in homes):
            return found
        is_eager = not nearest_size(self._costs.captured, max(home.num_rows for home in homes))
        return [replace(padding, is_eager=is_eager) for padding in found]

    def forward(self, work: ForwardWork) -> PaperStep:
        costs = self._costs
        shapes = [home.shape for home in work.homes]
        is_mixed = any(shape.chunks for shape in shapes)
        most = max(shape.num_rows for shape in shapes)
        size = nearest_size(costs.captured if is_mixed else self._decode_sizes, most)
        seconds = self._seconds(work.homes, size) * (1 + costs.noise * abs(self._draw()))
        num_sequences = sum(shape.num_decodes + len(shape.chunks) for shape in shapes)
        CLOCK.now += costs.plan_s + costs.plan_row_s * num_sequences
        begins = max(CLOCK.now, self._stages[0])
        if is_mixed:
            spread = max(0.3, 1 + costs.eager_spread * self._draw())
            CLOCK.now += costs.graphs_s if size else costs.eager_s * spread
        ends = self._stages[0] = max(begins + seconds, CLOCK.now)
        if is_mixed:
            self.num_mixed += 1
            self.num_eager += not size
        return PaperStep(ends, ends - begins, work.num_samples)

    def _seconds(self, homes: Sequence[HomeWork], size: int) -> float:
        """Seconds of the slowest home. size: number of rows of the step's graphs; 0: it has
        none."""
        shapes = [home.shape for home in homes]
        total = sum(shape.num_rows for shape in shapes)
        num_prompting = sum(bool(shape.chunks) for shape in shapes)
        factor = self._costs.together if num_prompting > 1 else self._costs.alone
        slowest = 0.0
        for home, shape in zip(homes, shapes, strict=True):
            rows = shape.num_rows
            step = Step(
                shape.num_decodes,
                _num_keys(home, shape),
                tuple(Chunk(*chunk) for chunk in shape.chunks),
                num_elsewhere=total - rows,
                num_padding=max(size, 1) - rows if size or not rows else 0,
            )
            [pieces] = self._model.stages(step)
            slowest = max(slowest, factor * sum(pieces.values()))
        return slowest

    def _draw(self) -> float:
        return self._random.gauss(0, 1)


def _num_keys(home: HomeWork, shape: StepShape) -> int:
    contexts = unpack(home.packed, home.lengths).context_lens
    return int(contexts[: shape.num_decodes].sum())


def lock_step_engine(
    spec: ModelSpec, num_homes: int, slo: SloConfig, costs: Costs, seed: int
) -> Engine:
    """Makes an engine on paper whose pace knows its steps. With several homes, they share the
    experts. seed: of the noise."""
    model = CostModel(spec, Degrees(dp=num_homes, ep=num_homes > 1))
    config = EngineConfig(
        data_parallel=num_homes, expert_parallel=num_homes > 1, enable_prefix_caching=False
    )
    times = StepTimes(read_profile(DEFAULT))
    engine = paper_engine(spec, config, times, model.room(), "bfloat16", slo)
    engine.steps.executor = LockStepExecutor(engine, model, costs, seed)
    teach_pace(engine)  # again: now by the steps of the other executor
    return engine


@dataclass(frozen=True)
class Load:
    """num_requests of num_in and num_out tokens, from `clients` that each send their next one when
    the last has ended, or `rate` per second at random times. One of both is set."""

    num_requests: int
    num_in: int
    num_out: int
    clients: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        how = f"{self.clients} clients" if self.clients else f"{self.rate:g} requests/s"
        return f"{how}, {self.num_in}/{self.num_out}"


@dataclass
class Course:
    """A request: when it was called, and when its client had each token."""

    called_at: float
    tokens: list[float]


class Clients:
    """The clients of an engine, and the router between them."""

    def __init__(self, engine: Engine, load: Load, costs: Costs, seed: int) -> None:
        self._engine = engine
        self._load = load
        self._costs = costs
        self._random = random.Random(seed)
        self._arrivals: list[tuple[float, int]] = []  # at the engine, by number of the request
        self.courses: list[Course] = []
        self._router_free_at = CLOCK.now

    def run(self) -> list[Course]:
        """Sends all requests, and returns them when the last one has ended."""
        self._begin()
        num_ended = 0
        while num_ended < self._load.num_requests:
            while self._arrivals and self._arrivals[0][0] <= CLOCK.now:
                self._add(heapq.heappop(self._arrivals)[1])
            if not self._engine.has_work:
                CLOCK.now = self._arrivals[0][0]
                continue
            events = self._engine.step().events
            self._router_free_at = max(self._router_free_at, CLOCK.now)
            for key, event in events:
                if isinstance(event, Delta):
                    num_ended += self._got(int(key.request_id), event)
        return self.courses

    def _begin(self) -> None:
        at = CLOCK.now
        if self._load.clients is not None:
            for _ in range(self._load.clients):
                self._call(at + HEAD_START_S * self._random.random())
            return
        assert self._load.rate is not None
        for _ in range(self._load.num_requests):
            at += self._random.expovariate(self._load.rate)
            self._call(at)

    def _call(self, at: float) -> None:
        number = len(self.courses)
        self.courses.append(Course(at, []))
        arrives = max(at, self._router_free_at) + self._costs.call_s
        heapq.heappush(self._arrivals, (arrives, number))

    def _add(self, number: int) -> None:
        sampling = SamplingParams(
            temperature=0, seed=0, max_tokens=self._load.num_out, ignore_eos=True
        )
        submit = Submit(
            key=RequestKey("paper", 0, str(number)),
            phase="full",
            prompt_token_ids=(1,) * self._load.num_in,
            sampling=sampling,
            starts=(Start(0),),
            waited_ms=(CLOCK.now - self.courses[number].called_at) * 1e3,
        )
        self._engine.add(self._engine.make_request(submit), submit.starts)

    def _got(self, number: int, delta: Delta) -> bool:
        """Hands a token to its client, who may send the next request. True if it was the last."""
        self._router_free_at += self._costs.router_token_s
        at = self._router_free_at + self._costs.answer_s
        self.courses[number].tokens += [at] * len(delta.token_ids)
        if delta.finish_reason is None:
            return False
        if self._load.clients and len(self.courses) < self._load.num_requests:
            self._router_free_at += self._costs.router_call_s
            self._call(at)
        return True
