"""Makes what a benchmark asks for: shapes, prompts of random token ids, and arrival times.

Everything follows from a seed. Knows neither engines nor servers. Torch-free. Used by
bench.offline, bench.load and benchmarks/targets/measure.py.
"""

import random
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens, drawn evenly from low..high; both are at least 1."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Parses `1024` or `512-1024`. Raises a ValueError that says what is wrong."""
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
        if match is None:
            raise ValueError(f"a length must look like 1024 or 512-1024 (tokens), not {text!r}")
        low = int(match[1])
        high = int(match[2] or low)
        if not 1 <= low <= high:
            raise ValueError(f"a length must be at least 1 and a range must rise, not {text!r}")
        return cls(low, high)

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Shape:
    """A batch: number of prompts, their length, and the tokens that each generates.

    It is written 64x1024x256.
    """

    num_prompts: int
    input_len: Lengths
    output_len: Lengths

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Parses `PROMPTSxINPUTxOUTPUT`, where input and output may be ranges.

        Raises a ValueError that says what is wrong.
        """
        parts = text.lower().split("x")
        if len(parts) != 3 or not parts[0].strip().isdecimal() or int(parts[0]) < 1:
            raise ValueError(
                "a shape must look like 64x1024x256 or 64x512-1024x256 (prompts x in x out), not "
                f"{text!r}"
            )
        return cls(int(parts[0]), Lengths.parse(parts[1]), Lengths.parse(parts[2]))

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the longest request, prompt and output together."""
        return self.input_len.high + self.output_len.high

    def __str__(self) -> str:
        return f"{self.num_prompts}x{self.input_len}x{self.output_len}"


@dataclass(frozen=True)
class Work:
    """One request: its prompt's token ids, and how many tokens it should generate."""

    prompt_token_ids: list[int]
    output_len: int


def draw_work(shape: Shape, vocab_size: int, seed: int | str) -> list[Work]:
    """Returns `shape.num_prompts` requests whose prompts are evenly random token ids below
    vocab_size."""
    rng = random.Random(seed)
    return [
        Work(
            rng.choices(range(vocab_size), k=shape.input_len.draw(rng)), shape.output_len.draw(rng)
        )
        for _ in range(shape.num_prompts)
    ]


def poisson_arrivals(rate: float, num_requests: int, seed: int | str) -> list[float]:
    """Returns the seconds from the start at which requests arrive.

    Arrivals are a Poisson process of `rate` requests per second.
    """
    rng = random.Random(seed)
    now = 0.0
    times = []
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        times.append(now)
    return times
