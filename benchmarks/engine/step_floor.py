"""What a step must cost at least: bytes and floating-point operations counted by hand, over the
card's ceilings.

Each part costs max(bytes / read rate, operations / product rate): inputs read once, outputs written
once, nothing shared between parts. Knows shapes alone; no torch. Used by
benchmarks/engine/step_profile.py.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.models.config import ModelSpec

# The parts of a step, in the order they run in.
PARTS = (
    "inputs",
    "norm",
    "qkv",
    "rope + KV write",
    "attention",
    "o",
    "gate-up",
    "activation",
    "down",
    "head",
    "sampling",
)


@dataclass(frozen=True)
class Ceilings:
    """bytes_per_s: device memory. flops_per_s: matrix products in the model's dtype."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, num_bytes: float, flops: float = 0.0) -> float:
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True)
class Chunk:
    """Rows of one sequence in one step: `start` rows lie in its context already, `num_rows` are
    computed."""

    start: int
    num_rows: int
    samples: bool = True


def step_floor(
    spec: ModelSpec, itemsize: int, ceilings: Ceilings, chunks: Sequence[Chunk]
) -> dict[str, float]:
    """Part -> seconds of one step. itemsize: bytes of one number."""
    rows = sum(chunk.num_rows for chunk in chunks)
    samples = sum(chunk.samples for chunk in chunks)
    q_width = spec.num_heads * spec.head_dim
    kv_width = spec.num_kv_heads * spec.head_dim
    hidden = spec.hidden_size
    wide = spec.intermediate_size

    def product(num_rows: int, num_in: int, num_out: int) -> float:
        numbers = num_in * num_out + num_rows * (num_in + num_out)
        return ceilings.seconds(numbers * itemsize, 2.0 * num_rows * num_in * num_out)

    def moved(numbers: float) -> float:
        return ceilings.seconds(numbers * itemsize)

    layer = {
        "norm": 2 * moved(2 * rows * hidden),
        "qkv": product(rows, hidden, q_width + 2 * kv_width),
        "rope + KV write": moved(2 * rows * (q_width + 2 * kv_width)),
        "attention": sum(_attention(spec, itemsize, ceilings, chunk) for chunk in chunks),
        "o": product(rows, q_width, hidden),
        "gate-up": product(rows, hidden, 2 * wide),
        "activation": moved(3 * rows * wide),
        "down": product(rows, wide, hidden),
    }
    once = {
        "inputs": moved(2 * rows * hidden),  # the embedding's rows
        "norm": moved(2 * rows * hidden),
        "head": product(samples, hidden, spec.vocab_size) if samples else 0.0,
        "sampling": moved(samples * spec.vocab_size),
    }
    total: dict[str, float] = defaultdict(
        float, {part: spec.num_layers * seconds for part, seconds in layer.items()}
    )
    for part, seconds in once.items():
        total[part] += seconds
    return {part: total[part] for part in PARTS}


def _attention(spec: ModelSpec, itemsize: int, ceilings: Ceilings, chunk: Chunk) -> float:
    """Causal: row i of the chunk sees start + i + 1 keys; two products of head_dim each."""
    keys = chunk.start + chunk.num_rows
    seen = chunk.num_rows * chunk.start + chunk.num_rows * (chunk.num_rows + 1) / 2
    numbers = (
        2 * keys * spec.num_kv_heads * spec.head_dim
        + 2 * chunk.num_rows * spec.num_heads * spec.head_dim
    )
    return ceilings.seconds(numbers * itemsize, 4.0 * spec.num_heads * spec.head_dim * seen)


def prompt_chunks(num_tokens: int, budget: int) -> list[Chunk]:
    """The steps of one prompt under a token budget; only the last samples."""
    starts = range(0, num_tokens, budget)
    return [Chunk(s, min(budget, num_tokens - s), s + budget >= num_tokens) for s in starts]
