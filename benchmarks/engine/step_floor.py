"""The least cost of a step: bytes and floating-point operations, counted by hand, over the card's
ceilings.

Each part costs max(bytes / read rate, operations / product rate). Inputs are read once, outputs are
written once, and parts share nothing. Of a mixture's experts, those are read that the rows are
expected to choose. Over latents, a decode attends in the latents' space, and a prompt expands the
latents to keys and values. This module only knows shapes, and needs no torch.
benchmarks/engine/step_profile.py uses it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.models.config import ModelSpec
from pdserve.models.facts.experts import ExpertSpec
from pdserve.models.facts.latent import LatentSpec
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


@dataclass(frozen=True)
class Ceilings:
    """The best rates of a card."""

    bytes_per_s: float  # device memory
    flops_per_s: float  # matrix products in the model's dtype

    def seconds(self, num_bytes: float, flops: float = 0.0) -> float:
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True)
class _Card:
    """Computes seconds of work on numbers of `itemsize` bytes."""

    itemsize: int
    ceilings: Ceilings

    def product(self, num_rows: int, num_in: int, num_out: int) -> float:
        numbers = num_in * num_out + num_rows * (num_in + num_out)
        return self.work(numbers, 2.0 * num_rows * num_in * num_out)

    def work(self, numbers: float, flops: float = 0.0) -> float:
        return self.ceilings.seconds(numbers * self.itemsize, flops)


def step_floor(
    spec: ModelSpec, itemsize: int, ceilings: Ceilings, chunks: Sequence[Chunk]
) -> dict[str, float]:
    """Returns the seconds of one step by part. `itemsize` is the bytes of one number."""
    card = _Card(itemsize, ceilings)
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
        numbers = 2 * chunk.num_keys * kv_width + 2 * chunk.num_rows * q_width
        return card.work(numbers, 4.0 * q_width * chunk.num_pairs)

    return {
        "qkv": card.product(rows, spec.hidden_size, q_width + 2 * kv_width),
        "rope + KV write": card.work(2 * rows * (q_width + 2 * kv_width)),
        "attention": sum(attends(chunk) for chunk in chunks),
        "o": card.product(rows, q_width, spec.hidden_size),
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
        qkv = card.product(rows, spec.hidden_size, q_width + stored)
    else:
        qkv = card.product(rows, spec.hidden_size, sizes.q_rank + stored)
        qkv += card.product(rows, sizes.q_rank, q_width)

    # For each head, a row goes into the latents' space as nope_dim and comes out as v_dim. An
    # expanded latent becomes keys and values of all heads. The matrices are the same.
    made = heads * (sizes.nope_dim + sizes.v_dim)
    num_rows = sum(chunk.num_rows for chunk in inside)
    num_keys = sum(chunk.num_keys for chunk in expanding)
    numbers = rank * made + num_rows * (made + 2 * heads * rank) + num_keys * (rank + made)
    latents = card.work(numbers, 2.0 * (num_rows + num_keys) * rank * made)

    def attends_inside(chunk: Chunk) -> float:
        numbers = chunk.num_keys * stored + chunk.num_rows * heads * (stored + rank)
        return card.work(numbers, 2.0 * heads * (stored + rank) * chunk.num_pairs)

    def attends(chunk: Chunk) -> float:
        numbers = chunk.num_keys * (made + rope)
        numbers += chunk.num_rows * (q_width + heads * sizes.v_dim)
        return card.work(numbers, 2.0 * (made + heads * rope) * chunk.num_pairs)

    return {
        "qkv": qkv,
        "rope + KV write": card.work(2 * rows * (heads * rope + stored)),
        "latents": latents,
        "attention": sum(map(attends_inside, inside)) + sum(map(attends, expanding)),
        "o": card.product(rows, heads * sizes.v_dim, spec.hidden_size),
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
    weights = read * 3 * hidden * experts.size
    flops = 6.0 * rows * routing.num_places * hidden * experts.size
    scores = routing.num_experts + (experts.gated_size > 0)
    shared = _mlp(card, hidden, experts.gated_size, rows) if experts.gated_size else {}
    return shared | {
        "router": card.product(rows, hidden, scores),
        "experts": card.work(weights + 2 * rows * hidden, flops),
    }


def expected_experts(num_rows: int, num_experts: int, top_k: int) -> float:
    """Returns the expected number of experts that get a row, if each row chooses `top_k` of them
    and all choices are equally likely."""
    return num_experts * (1 - (1 - top_k / num_experts) ** num_rows)


def _mlp(card: _Card, hidden: int, size: int, rows: int) -> dict[str, float]:
    return {
        "gate-up": card.product(rows, hidden, 2 * size),
        "activation": card.work(3 * rows * size),
        "down": card.product(rows, size, hidden),
    }


def prompt_chunks(num_tokens: int, budget: int) -> list[Chunk]:
    """Returns the steps of one prompt under a token budget. Only the last one samples."""
    starts = range(0, num_tokens, budget)
    return [Chunk(s, min(budget, num_tokens - s), s + budget >= num_tokens) for s in starts]
