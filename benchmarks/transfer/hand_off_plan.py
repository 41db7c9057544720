"""The plan of benchmarks/transfer/hand_off.py: its options, prompts, and summaries of times.

This module knows no engine and needs no torch. hand_off.py and hand_off_steps.py use it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.record import Json, percentiles
from pdserve.bench.workload import Lengths, Shape, draw_work
from pdserve.protocol.sampling_params import SamplingParams

PARTS = ("requests", "decode", "prefill")  # those that are measured unless others are named
TOGETHER = "together"
SETTLE = 8  # steps between two intervals


@dataclass(frozen=True)
class Plan:
    """The options of a run."""

    parts: tuple[str, ...]
    tokens: tuple[int, ...]
    output_len: int
    repeats: int
    batch: int
    context: int
    chunk: int
    pairs: int
    steps: int
    in_flight: int
    decodes: int
    seed: int
    must_agree: bool  # True: arithmetic is the same in every mode, so answers must agree

    def prompt(self, num_tokens: int, vocab_size: int, name: str) -> tuple[int, ...]:
        lengths = Lengths(num_tokens, num_tokens)
        [work] = draw_work(
            Shape(1, lengths, lengths), vocab_size, f"{self.seed}/{num_tokens}/{name}"
        )
        return tuple(work.prompt_token_ids)

    @property
    def num_units(self) -> int:
        """Number of units that the progress bar counts."""
        requests = len(self.tokens) * (self.repeats + 1) if "requests" in self.parts else 0
        together = self.decodes if TOGETHER in self.parts else 0
        return (
            requests
            + together
            + sum(self.pairs for part in ("decode", "prefill") if part in self.parts)
        )


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)


def batch_tokens(plan: Plan) -> int:
    """Returns the largest length of a sequence of the batch. It allows for twice the steps that
    count, and as many that do not (during the first and last transfers of an interval)."""
    return plan.context + 4 * plan.steps + 64 * SETTLE


def summary(seconds: Sequence[float]) -> Json:
    """Summarises seconds in milliseconds."""
    return percentiles(seconds) | {"worst": round(1e3 * max(seconds), 3)}
