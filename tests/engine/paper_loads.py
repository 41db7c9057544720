"""Random loads for engines on paper, and how many of their requests keep what was promised."""

import random
from dataclasses import dataclass

from engine.paper_time import Call, PaperTime, poisson

from pdserve.configs.router import SloConfig

FIXED = (512, 2048, 8192)  # token budgets, as max_num_batched_tokens sets them


@dataclass(frozen=True)
class Load:
    """The calls that come within some seconds, and the promises made to them."""

    calls: list[Call]
    ttft_s: float
    tpot_s: float

    @property
    def slo(self) -> SloConfig:
        return SloConfig(ttft_ms=self.ttft_s * 1e3, tpot_ms=self.tpot_s * 1e3)

    def kept_by_pace(self, seed: int = 0) -> int:
        """How many requests keep both promises at an engine that has a pace."""
        engine = PaperTime(self.slo, seed=seed)
        engine.teach()
        return self._kept(engine)

    def kept_by_budget(self, budget: int, seed: int = 0) -> int:
        """Number of requests that keep both promises at an engine with a fixed budget."""
        return self._kept(PaperTime(None, budget, seed=seed))

    def _kept(self, engine: PaperTime) -> int:
        courses = engine.run(self.calls)
        engine.assert_empty()
        assert len(courses) == len(self.calls)
        return sum(course.keeps(self.ttft_s, self.tpot_s) for course in courses)


def random_load(seed: int, seconds: float = 10.0) -> Load:
    """Chats, documents or both, from a quarter to somewhat more than what the engine can do."""
    rng = random.Random(seed)
    mean_prompt = rng.choice([300, 1000, 2000, 4000, 8000])
    spread = rng.choice([0.1, 0.5, 1.0])
    mean_output = rng.choice([30, 100, 200, 400])
    busy = rng.uniform(0.25, 1.1)
    tpot_s = rng.choice([0.006, 0.007, 0.008, 0.010, 0.015, 0.025])
    ttft_s = rng.choice([0.2, 0.5, 1.0, 2.0])
    # a request takes its prompt's time, and its share of steps of some ten sequences
    needs = mean_prompt * 26e-6 + mean_output * (0.004 / 10 + mean_prompt * 3.3e-8)

    def length_of(mean: float, most: int) -> int:
        return int(min(most, 2 + mean * rng.lognormvariate(-spread * spread / 2, spread)))

    calls = poisson(
        rng,
        busy / needs,
        seconds,
        lambda: length_of(mean_prompt, 60_000),
        lambda: length_of(mean_output, 1500),
    )
    return Load(calls[:150], ttft_s, tpot_s)
