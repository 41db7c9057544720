"""The least cost of a step: bytes and floating-point operations, counted by hand, over the card's
ceilings.

Each part costs max(bytes / read rate, operations / product rate). Inputs are read once, outputs are
written once, and parts share nothing. Of a mixture's experts, those are read that the rows are
expected to choose. Over latents, a decode attends in the latents' space, and a prompt expands the
latents to keys and values. Quantised weights count with their scales and zero points, and cached
rows with the dtype of the KV cache. This module only knows shapes, and needs no torch.
benchmarks/engine/step_profile.py uses it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.costs.matrix_bytes import format_of, is_rounded, matrix_bytes
from pdserve.models.config import ModelSpec
from pdserve.models.facts.experts import ExpertSpec
from pdserve.models.facts.latent import LatentSpec
from pdserve.models.formats.source_format import SourceFormat
from pdserve.plan.costs.step import Chunk

# The parts of a step, in the order in which they run. latents: products into the latents' space and
# out of it, or products that expand latents. In a mixture, gate-up, activation and down are those
# of the shared expert.
PARTS = (
    "inputs",
    "norm",
    "qkv",
    "rope + KV write",
    "latents",
    "attention",
    "o",
    "router",
    "gate-up",
    "activation",
    "down",
    "experts",
    "head",
    "sampling",
)


FP8_SPEED = 2.0  # tensor cores multiply numbers of 8 bits twice as fast as those of 16


@dataclass(frozen=True)
class Ceilings:
    """The best rates of a card."""

    bytes_per_s: float  # device memory
    flops_per_s: float  # matrix products in 16 bits

    def seconds(self, num_bytes: float, flops: float = 0.0) -> float:
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True)
class Stored:
    """The bytes of numbers: `item` of activations and of weights that are not quantised, and
    `cached` of the KV cache. `formats` are those of the quantised parts."""

    item: int = 2
    cached: int = 2
    formats: Mapping[str, SourceFormat] = field(default_factory=dict)


@dataclass(frozen=True)
class _Card:
    """Computes seconds of work on stored numbers."""

    stored: Stored
    ceilings: Ceilings

    def product(self, num_rows: int, num_in: int, num_out: int, part: str = "") -> float:
        """Returns the floor of a product of rows with the matrix of a part, which may be quantised,
        or, without a part, with one that is not."""
        flops = 2.0 * num_rows * num_in * num_out
        return self.matrices(part, 1, num_in, num_out, num_rows, num_rows, flops)

    def matrices(
        self,
        part: str,
        count: float,
        num_in: int,
        num_out: int,
        rows_in: float,
        rows_out: float,
        flops: float,
    ) -> float:
        """Returns the floor of products with `count` matrices `[num_out, num_in]` that read and
        write so many rows. Products in fp8 read rows of 8 bits."""
        format = format_of(self.stored.formats, part)
        item = self.stored.item
        in_fp8 = is_rounded(format.kind, max(rows_in, rows_out))
        num_bytes = count * matrix_bytes(format, num_in, num_out, item)
        num_bytes += rows_in * num_in * (1 if in_fp8 else item)
        num_bytes += rows_out * num_out * item
        return self.ceilings.seconds(num_bytes, flops / (FP8_SPEED if in_fp8 else 1))

    def work(self, numbers: float, flops: float = 0.0, cached: float = 0.0) -> float:
        """Returns the floor of moving numbers that are not quantised, and others that are in the KV
        cache."""
        num_bytes = numbers * self.stored.item + cached * self.stored.cached
        return self.ceilings.seconds(num_bytes, flops)


def step_floor(
    spec: ModelSpec, stored: Stored, ceilings: Ceilings, chunks: Sequence[Chunk]
) -> dict[str, float]:
    """Returns the seconds of one step by part."""
    card = _Card(stored, ceilings)
    rows = sum(chunk.num_rows for chunk in chunks)
    samples = sum(chunk.samples for chunk in chunks)
    hidden = spec.hidden_size
    once = {
        "inputs": card.work(2 * rows * hidden),  # the embedding's rows
        "norm": card.work(2 * rows * hidden),
        "head": card.product(samples, hidden, spec.vocab_size) if samples else 0.0,
        "sampling": card.work(samples * spec.vocab_size),
    }
    norms = {"norm": 2 * card.work(2 * rows * hidden)}
    attention = (
        _attention(card, spec, chunks)
        if spec.latent is None
        else _latent_attention(card, spec, spec.latent, chunks)
    )
    layers = [(1, once), (spec.num_layers, norms), (spec.num_layers, attention)]
    num_dense = spec.num_layers
    if spec.experts is not None:
        num_dense = len(spec.experts.dense_layers)
        mixture = _mixture(card, spec.experts, hidden, rows)
        layers.append((spec.num_layers - num_dense, mixture))
    layers.append((num_dense, _mlp(card, hidden, spec.intermediate_size, rows)))
    total: dict[str, float] = defaultdict(float)
    for count, parts in layers:
        for part, seconds in parts.items():
            total[part] += count * seconds
    return {part: total[part] for part in PARTS}


def _attention(card: _Card, spec: ModelSpec, chunks: Sequence[Chunk]) -> dict[str, float]:
    """Returns the seconds of attention: two products of head_dim for each pair of query and key."""
    rows = sum(chunk.num_rows for chunk in chunks)
    q_width = spec.num_heads * spec.head_dim
    kv_width = spec.num_kv_heads * spec.head_dim

    def attends(chunk: Chunk) -> float:
        read = 2 * chunk.num_keys * kv_width
        return card.work(2 * chunk.num_rows * q_width, 4.0 * q_width * chunk.num_pairs, read)

    made = rows * (q_width + 2 * kv_width)
    return {
        "qkv": card.product(rows, spec.hidden_size, q_width + 2 * kv_width, "qkv"),
        "rope + KV write": card.work(made + rows * q_width, cached=2 * rows * kv_width),
        "attention": sum(attends(chunk) for chunk in chunks),
        "o": card.product(rows, q_width, spec.hidden_size, "o"),
    }


def _latent_attention(
    card: _Card, spec: ModelSpec, sizes: LatentSpec, chunks: Sequence[Chunk]
) -> dict[str, float]:
    """Returns the seconds of attention over latents. Some chunks (decodes) stay in the latents'
    space, and others expand their whole context."""
    heads = spec.num_heads
    rank, rope = sizes.kv_rank, sizes.rope_dim
    stored = rank + rope  # numbers per token in the cache
    rows = sum(chunk.num_rows for chunk in chunks)
    inside = [chunk for chunk in chunks if _stays_in_latent(sizes, chunk)]
    expanding = [chunk for chunk in chunks if not _stays_in_latent(sizes, chunk)]
    q_width = heads * (sizes.nope_dim + rope)
    if sizes.q_rank is None:
        qkv = card.product(rows, spec.hidden_size, q_width + stored, "qkv")
    else:
        qkv = card.product(rows, spec.hidden_size, sizes.q_rank + stored, "qkv")
        qkv += card.product(rows, sizes.q_rank, q_width, "qkv")

    # For each head, a row goes into the latents' space as nope_dim and comes out as v_dim. An
    # expanded latent becomes keys and values of all heads. The matrices are the same.
    made = heads * (sizes.nope_dim + sizes.v_dim)
    num_rows = sum(chunk.num_rows for chunk in inside)
    num_keys = sum(chunk.num_keys for chunk in expanding)
    numbers = rank * made + num_rows * (made + 2 * heads * rank) + num_keys * made
    flops = 2.0 * (num_rows + num_keys) * rank * made
    latents = card.work(numbers, flops, cached=num_keys * rank)

    def attends_inside(chunk: Chunk) -> float:
        numbers = chunk.num_rows * heads * (stored + rank)
        flops = 2.0 * heads * (stored + rank) * chunk.num_pairs
        return card.work(numbers, flops, cached=chunk.num_keys * stored)

    def attends(chunk: Chunk) -> float:
        numbers = chunk.num_keys * made + chunk.num_rows * (q_width + heads * sizes.v_dim)
        flops = 2.0 * (made + heads * rope) * chunk.num_pairs
        return card.work(numbers, flops, cached=chunk.num_keys * rope)

    return {
        "qkv": qkv,
        "rope + KV write": card.work(rows * (2 * heads * rope + stored), cached=rows * stored),
        "latents": latents,
        "attention": sum(map(attends_inside, inside)) + sum(map(attends, expanding)),
        "o": card.product(rows, heads * sizes.v_dim, spec.hidden_size, "o"),
    }


def _stays_in_latent(sizes: LatentSpec, chunk: Chunk) -> bool:
    """True if staying in the latents' space takes fewer operations than expanding: for a decode,
    and for a few rows after a long context. Compares half the operations of one head."""
    rank = sizes.kv_rank
    per_row = rank * (sizes.nope_dim + sizes.v_dim)  # the same for an expanded key
    wide, narrow = 2 * rank, sizes.nope_dim + sizes.v_dim
    inside = chunk.num_rows * per_row + chunk.num_pairs * wide
    return inside < chunk.num_keys * per_row + chunk.num_pairs * narrow


def _mixture(card: _Card, experts: ExpertSpec, hidden: int, rows: int) -> dict[str, float]:
    """Returns the seconds of a mixture: three products of each row with each of its experts."""
    routing = experts.routing
    read = expected_experts(rows, routing.num_experts, routing.top_k) + routing.num_shared
    flops = 2.0 * rows * routing.num_places * hidden * experts.size
    mixed = card.matrices("experts", read, hidden, 2 * experts.size, rows, 0, 2 * flops)
    mixed += card.matrices("experts", read, experts.size, hidden, 0, rows, flops)
    scores = routing.num_experts + (experts.gated_size > 0)
    shared = _mlp(card, hidden, experts.gated_size, rows) if experts.gated_size else {}
    return shared | {
        "router": card.product(rows, hidden, scores),
        "experts": mixed,
    }


def expected_experts(num_rows: int, num_experts: int, top_k: int) -> float:
    """Returns the expected number of experts that get a row, if each row chooses `top_k` of them
    and all choices are equally likely."""
    return num_experts * (1 - (1 - top_k / num_experts) ** num_rows)


def _mlp(card: _Card, hidden: int, size: int, rows: int) -> dict[str, float]:
    return {
        "gate-up": card.product(rows, hidden, 2 * size, "gate-up"),
        "activation": card.work(3 * rows * size),
        "down": card.product(rows, size, hidden, "down"),
    }


def prompt_chunks(num_tokens: int, budget: int) -> list[Chunk]:
    """Returns the steps of one prompt under a token budget. Only the last one samples."""
    starts = range(0, num_tokens, budget)
    return [Chunk(s, min(budget, num_tokens - s), s + budget >= num_tokens) for s in starts]
