"""Carries steps out on this process's device: the model runner, then the sampler.

An engine with one rank uses it as its executor. In a larger engine each rank uses it to carry out
its messages. Knows no plan and no sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.execution.expert_load import ExpertLoad
from pdserve.engine.execution.fence import Fence
from pdserve.engine.execution.model_runner import ModelRunner
from pdserve.engine.execution.trial_steps import warm_prefill
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.engine.sampling.device_copies import HostCopy
from pdserve.engine.sampling.sampled_tokens import Sampled, SampledTokens, Scores
from pdserve.engine.sampling.sampler import Sampler
from pdserve.engine.step_result import HomeSize
from pdserve.engine.stepping.executor import Padding
from pdserve.engine.stepping.work import ForwardWork, SampleWork, ScoredRows
from pdserve.protocol.events import TokenLogprob
from pdserve.protocol.start_progress import Report

# Prompt positions whose logits are held at once; those of a whole chunk would fill gigabytes.
SCORED_ROWS = 256
NO_ROWS = np.zeros(0, dtype=np.int32)


class LocalStep:
    """StepHandle of a step on this device.

    - forwarded, resumed: for a late step, the two ends of the gap before its sampling.
    - check: raises if what the device has done is not valid.
    """

    def __init__(
        self,
        began: Fence,
        scores: list[list[Scores]],
        hidden: HostCopy | None,
        check: Callable[[], None],
    ) -> None:
        self.began = began
        self.forwarded: Fence | None = None
        self.resumed: Fence | None = None
        self.ended: Fence | None = None
        self.sampled: SampledTokens | None = None
        self._scores = scores
        self._hidden = hidden
        self._check = check

    def ready(self) -> bool:
        return self._end.ready()

    def wait(self) -> None:
        self._end.wait()
        self._check()

    def seconds(self) -> float:
        seconds = self._end.seconds_since(self.began)
        if self.forwarded is not None and self.resumed is not None:
            seconds -= self.resumed.seconds_since(self.forwarded)
        return seconds

    def samples(self) -> list[Sampled]:
        return self.sampled.fetch() if self.sampled is not None else []

    def scores(self) -> list[list[TokenLogprob]]:
        return [[entry for part in parts for entry in part.fetch()] for parts in self._scores]

    def hidden(self) -> np.ndarray:
        if self._hidden is None:
            return np.empty((0, 0), dtype=np.float32)
        return self._hidden.tensors()[0].numpy()

    @property
    def _end(self) -> Fence:
        assert self.ended is not None, "the step was never sampled"
        return self.ended


@dataclass(frozen=True)
class _Open:
    """A step that is not sampled yet. It does not keep hidden, which may be large, because the gap
    may be long."""

    number: int
    logits: Tensor
    slots: Tensor
    step: LocalStep


class LocalExecutor:
    """Executor on this process's device.

    - runner: already has its KV cache.
    - load: rows per expert; None if the model has no experts.
    """

    def __init__(
        self, runner: ModelRunner, sampler: Sampler, load: ExpertLoad | None = None
    ) -> None:
        self.runner = runner
        self.sampler = sampler
        self.load = load
        self.kv_cache: KVCache = runner.kv_cache
        self._device = runner.device
        self._open: _Open | None = None

    def padding(self, homes: Sequence[HomeSize]) -> list[Padding]:
        return self.runner.padding(homes)

    def forward(self, work: ForwardWork) -> LocalStep:
        assert self._open is None, "a step is forwarded before the previous one was sampled"
        began = Fence(self._device)
        output = self.runner.forward(work)
        assert output is not None, "rank 0 has the last stage"
        scores = [
            [
                self.sampler.score(logits, targets, scored.num_top)
                for targets, logits in logits_to_score(self.runner, output.hidden, home, scored)
            ]
            for home, scored in scores_of(work)
        ]
        embedded = embedded_rows(self.runner, output.hidden, work)
        hidden = HostCopy([embedded.float()]) if embedded is not None else None
        step = LocalStep(began, scores, hidden, self.runner.check)
        if not work.num_samples:
            step.ended = Fence(self._device)
            return step
        if work.is_late:
            step.forwarded = Fence(self._device)
        self._open = _Open(work.number, output.logits, output.slots, step)
        return step

    def sample(self, work: SampleWork) -> None:
        opened = self._open
        assert opened is not None and opened.number == work.number, (
            f"step {work.number} is to be sampled, but another one was forwarded last"
        )
        self._open = None
        step = opened.step
        if step.forwarded is not None:
            step.resumed = Fence(self._device)
        step.sampled = self.sampler.sample(opened.logits, work.rows)
        self.runner.share_tokens(opened.slots, step.sampled.token_ids)
        step.ended = Fence(self._device)

    def warm_prefill(self, num_rows: int) -> None:
        warm_prefill(self.runner, num_rows)

    def expert_load(self) -> dict[int, np.ndarray]:
        return self.load.now() if self.load is not None else {}

    def clear_expert_load(self) -> None:
        if self.load is not None:
            self.load.clear()

    def compile(self, decodes: Sequence[int], prompts: Sequence[int], report: Report) -> None:
        """Compile the sampler's kernels in a thread while the graphs are captured, because a
        capture leaves Python to other threads. decodes, prompts: see ModelRunner.capture_graphs."""
        with ThreadPoolExecutor(1) as beside:
            sampling = beside.submit(self.sampler.warm_up, self.runner.model.weights.dtype)
            if decodes:
                self.runner.capture_graphs(decodes, prompts, report)
            sampling.result()

    def reset(self) -> None:
        if self._open is not None:
            # other ranks wait for its tokens
            self.runner.share_tokens(self._open.slots, torch.zeros_like(self._open.slots))
            self._open = None
        self.runner.synchronize()

    def close(self) -> None:
        self.reset()


def scores_of(work: ForwardWork) -> list[tuple[int, ScoredRows]]:
    """The prompt tokens to score, each with its home, in the order that all ranks use."""
    return [(number, scored) for number, home in enumerate(work.homes) for scored in home.scores]


def logits_to_score(
    runner: ModelRunner, hidden: Tensor, home: int, scored: ScoredRows
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Yield some of a home's tokens to score, with the logits of their rows, until all are done.
    Every rank of the last stage must call it."""
    for start in range(0, len(scored.targets), SCORED_ROWS):
        targets = scored.targets[start : start + SCORED_ROWS]
        first = scored.first_row + start
        rows = [NO_ROWS] * runner.stage.dims.dp
        rows[home] = np.arange(first, first + len(targets), dtype=np.int32)
        yield targets, runner.logits(hidden, rows)


def embedded_rows(runner: ModelRunner, hidden: Tensor, work: ForwardWork) -> Tensor | None:
    """The wanted hidden rows of all homes; None if there are none. Every rank of the last stage
    must call it."""
    wanted = [home.hidden_rows for home in work.homes]
    if all(rows is None for rows in wanted):
        return None
    return runner.rows_of(hidden, [NO_ROWS if rows is None else rows for rows in wanted])
