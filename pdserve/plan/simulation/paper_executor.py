"""An executor on paper: a step takes the time that a profile says for its rows, more or less by
chance if it has prompts, and always samples the same token.

    host      ... plan N+1, launch N+1 | wait for N | plan N+2 ...
    stages    step N on stage 0, then 1, ...; a stage takes one step after another

The engine calls it like any executor. It knows the shape of a step's message, but no tokens and no
blocks.
"""

import math
from collections.abc import Sequence
from random import Random

import numpy as np
import torch

from pdserve.configs.kv_layout import KVLayout
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.engine.sampling.sampled_tokens import Sampled
from pdserve.engine.step_result import HomeSize
from pdserve.engine.stepping.executor import Padding
from pdserve.engine.stepping.packing import unpack
from pdserve.engine.stepping.work import ForwardWork, HomeWork, SampleWork
from pdserve.plan.profile.step_times import StepLoad, StepTimes
from pdserve.plan.simulation.virtual_time import CLOCK
from pdserve.protocol.events import TokenLogprob

TOKEN = 7  # the token that every step samples
_SAMPLED = Sampled((TOKEN,), None)


class PaperStep:
    """A step in flight. `ends` is when the device is done with it, on the virtual clock. `takes` is
    its seconds on the device."""

    __slots__ = ("_num_samples", "ends", "takes")

    def __init__(self, ends: float, takes: float, num_samples: int) -> None:
        self.ends = ends
        self.takes = takes
        self._num_samples = num_samples

    def ready(self) -> bool:
        return CLOCK.now >= self.ends

    def wait(self) -> None:
        CLOCK.now = max(CLOCK.now, self.ends)

    def seconds(self) -> float:
        return self.takes

    def samples(self) -> list[Sampled]:
        return [_SAMPLED] * self._num_samples

    def scores(self) -> list[list[TokenLogprob]]:
        return []

    def hidden(self) -> np.ndarray:
        return np.empty((0, 0), dtype=np.float32)


class PaperExecutor:
    """An executor on paper.

    - num_stages: Number of pipeline stages, which share a step's time evenly.
    - seed: Of the chance by which steps with prompts take longer or shorter.
    - free_at: When the last stage is done with all steps that were sent.
    - busy_s: Seconds of all steps so far.
    - prompt_s: Seconds of all steps with prompts so far.
    """

    def __init__(
        self, times: StepTimes, layout: KVLayout, num_stages: int = 1, seed: int = 0
    ) -> None:
        memory = torch.empty((2, layout.block_bytes), dtype=torch.uint8, device="meta")
        self.kv_cache = KVCache(memory, layout)
        self.times = times
        self._chance = Random(seed)
        self.busy_s = self.prompt_s = 0.0
        self._stages = [0.0] * num_stages

    @property
    def free_at(self) -> float:
        return self._stages[-1]

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    def padding(self, homes: Sequence[HomeSize]) -> list[Padding]:
        if all(home.is_decode for home in homes):
            rows = [max(1, home.num_rows) for home in homes]
            return [Padding(1, each, each) for each in rows]
        most = self.times.padded(max(home.num_rows for home in homes))
        is_eager = not self.times.has_graph(most)
        return [Padding(0, most, max(1, home.num_sequences), is_eager) for home in homes]

    def forward(self, work: ForwardWork) -> PaperStep:
        loads = [_load_of(home) for home in work.homes]
        has_prompts = any(load.chunks for load in loads)
        seconds = max(map(self.times.seconds, loads))
        if has_prompts:
            seconds *= math.exp(self._chance.gauss(0.0, self.times.spread))
        launched = CLOCK.now + max(map(self.times.launch_s, loads))
        ends = max(self.send(seconds), launched)
        CLOCK.now = launched
        if has_prompts:
            self.prompt_s += seconds
        return PaperStep(ends, seconds, work.num_samples)

    def send(self, seconds: float) -> float:
        """Sends a step that takes `seconds` now. Returns when it is done."""
        ready = CLOCK.now + self.times.host_s
        for stage, free in enumerate(self._stages):
            ready = self._stages[stage] = max(ready, free) + seconds / len(self._stages)
        self.busy_s += seconds
        return ready

    def skip(self, seconds: float, free_at: float) -> None:
        """Counts steps that were done elsewhere and took `seconds`. The last one ends at
        `free_at`."""
        self.busy_s += seconds
        self._stages[-1] = free_at

    def sample(self, work: SampleWork) -> None: ...

    def warm_prefill(self, num_rows: int) -> None: ...

    def expert_load(self) -> dict[int, np.ndarray]:
        return {}

    def clear_expert_load(self) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


def _load_of(home: HomeWork) -> StepLoad:
    shape = home.shape
    contexts = unpack(home.packed, home.lengths).context_lens[: shape.num_decodes]
    return StepLoad(shape.num_decodes, int(contexts.sum()), shape.chunks)
