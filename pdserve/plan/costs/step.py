"""Seconds of one step on each stage of a group of ranks, by pieces.

A product takes hypot(bytes / read rate, operations / product rate) and a tail. Attention, light
kernels and transfers take the time of their bytes or operations, and a tail per kernel. Ranks of a
stage are equal, except the one with the most distinct experts, for which the others wait. This
module knows shapes, degrees and rates (rates.py). The schedule is in benchmarks/costs/run.py.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

from pdserve.kernels.experts.products.tiles import tile_for
from pdserve.models.config import ModelSpec
from pdserve.models.facts.experts import ExpertSpec
from pdserve.models.facts.latent import LatentSpec
from pdserve.parallel.dims import ParallelDims
from pdserve.plan.costs.rates import H200, Rates
from pdserve.plan.costs.sums import FEW_ROWS, ITEM, Sums

# Expected maximum of that many independent normal variables, in standard deviations. A larger group
# uses the last entry.
MAX_OF_NORMALS = {1: 0.0, 2: 0.564, 4: 1.029, 8: 1.423}

Pieces = dict[str, float]
PIECES = (
    "products",
    "experts",
    "attention",
    "light",
    "tails",
    "sums",
    "exchange",
    "pipe",
    "head",
    "logits",
)


@dataclass(frozen=True, order=True)
class Degrees:
    """Degrees of parallelism. tp, pp and dp are those of ParallelDims, which checks them. With ep,
    the ranks of a stage share the experts. Raises ValueError for dp without ep, because such
    engines would share nothing."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False

    def __post_init__(self) -> None:
        ParallelDims(tp=self.tp, pp=self.pp, dp=self.dp, ep=self.tp * self.dp if self.ep else 1)
        if self.dp > 1 and not self.ep:
            raise ValueError(f"dp={self.dp} needs ep: without it these are {self.dp} engines")

    @property
    def group(self) -> int:
        """Number of ranks of a stage."""
        return self.tp * self.dp

    @property
    def num_gpus(self) -> int:
        return self.group * self.pp

    def __str__(self) -> str:
        parts = [
            f"TP{self.tp}" * (self.tp > 1 or self.num_gpus == 1),
            f"PP{self.pp}" * (self.pp > 1),
            f"DP{self.dp}" * (self.dp > 1),
            f"EP{self.group}" * self.ep,
        ]
        return " ".join(filter(None, parts))


@dataclass(frozen=True)
class Chunk:
    """Rows of one sequence in one step: `start` are in its context, and `num_rows` are computed."""

    start: int
    num_rows: int
    samples: bool = True

    @property
    def num_keys(self) -> int:
        return self.start + self.num_rows

    @property
    def num_pairs(self) -> float:
        """Number of pairs of row and key: row i of the chunk attends to start + i + 1 keys."""
        return self.num_rows * self.start + self.num_rows * (self.num_rows + 1) / 2


@dataclass(frozen=True)
class Step:
    """Rows of one home's step: decodes with `num_keys` keys in all, and chunks of prompts. `homes`
    is the number of homes that have this many rows. num_elsewhere: rows of other homes, where they
    differ. num_padding: rows of padding in this home, which reach no expert."""

    num_decodes: int = 0
    num_keys: float = 0
    chunks: tuple[Chunk, ...] = ()
    homes: int = 1
    num_elsewhere: int = 0
    num_padding: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_decodes + sum(chunk.num_rows for chunk in self.chunks)

    @property
    def num_samples(self) -> int:
        return self.num_decodes + sum(chunk.samples for chunk in self.chunks)


@dataclass(frozen=True)
class CostModel:
    """The costs of one model on a group of ranks."""

    spec: ModelSpec
    degrees: Degrees = field(default_factory=Degrees)
    rates: Rates = H200

    def __post_init__(self) -> None:
        self.spec.check_parallel(ParallelDims(tp=self.degrees.tp, pp=self.degrees.pp))
        if self.degrees.ep and self.spec.experts is None:
            raise ValueError("ep: this model has no experts")

    def stages(self, step: Step) -> list[Pieces]:
        """Returns the device seconds by piece of each stage, in the order of the stages."""
        return [
            _Stage(self, step, len(dims.layers_of(self.spec.num_layers)), dims).pieces()
            for dims in self._dims()
        ]

    def room(self) -> int:
        """Returns the number of tokens in a home's KV cache beside the weights. Raises ValueError
        if the weights alone are too large."""
        tokens = []
        for dims in self._dims():
            stage = _Stage(self, Step(1, 1), len(dims.layers_of(self.spec.num_layers)), dims)
            stage.pieces()
            weights = stage.num_weights * ITEM
            if dims.is_first_stage:
                weights += self.spec.vocab_size * self.spec.hidden_size * ITEM
            free = self.rates.memory_bytes - weights
            if free <= 0:
                raise ValueError(
                    f"{self.degrees}: weights of {weights / 2**30:.0f} GiB per GPU do not fit "
                    f"{self.rates.memory_bytes / 2**30:.0f} GiB"
                )
            tokens.append(int(free / (stage.num_cached * ITEM)))
        return min(tokens)

    def _dims(self) -> list[ParallelDims]:
        """Returns the dims of one rank per stage, in the order of the stages."""
        pp = self.degrees.pp
        return [ParallelDims(pp=pp, rank=rank) for rank in reversed(range(pp))]

    def stage_layers(self) -> list[int]:
        return [len(dims.layers_of(self.spec.num_layers)) for dims in self._dims()]

    @cached_property
    def sums(self) -> Sums:
        """The costs of sums over the ranks of a home."""
        return Sums(self.spec.hidden_size, self.degrees.tp, self.rates)

    def launches_s(self, stage_layers: int) -> float:
        """Returns the seconds of a stage's launches, the least time of an eager step."""
        rates = self.rates
        per_layer = rates.launch_dense_s if self.spec.experts is None else rates.launch_mixture_s
        return stage_layers * per_layer


class _Stage:
    """The pieces of one stage's step, added up layer by layer."""

    def __init__(self, model: CostModel, step: Step, num_layers: int, dims: ParallelDims) -> None:
        self.spec, self.degrees, self.rates = model.spec, model.degrees, model.rates
        self.model = model
        self.step = step
        self.rows = step.num_rows + step.num_padding
        self.all_rows = step.num_rows * step.homes + step.num_elsewhere
        self.num_layers = num_layers
        self.is_last = dims.is_last_stage
        self.num_weights = 0.0  # numbers that this rank stores as weights
        self.num_cached = 0.0  # numbers per token in the KV cache
        self._total: dict[str, float] = defaultdict(float)
        self._times = 1.0  # number of layers for which the next pieces stand

    def pieces(self) -> Pieces:
        spec = self.spec
        self._times = self.num_layers
        if spec.latent is None:
            self._attention(spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim)
        else:
            self._latent_attention(spec.latent)
        dense = 1.0
        if spec.experts is not None:
            dense = len(spec.experts.dense_layers) / spec.num_layers
            self._times = self.num_layers * (1 - dense)
            self._mixture(spec.experts)
        if dense:
            self._times = self.num_layers * dense
            self._mlp(spec.intermediate_size)
            self._sum_product(spec.intermediate_size // self.degrees.tp)
        self._times = 1
        if self.degrees.pp > 1:
            # Every stage has this piece: a sender writes over the link, a receiver waits for it.
            self._add("pipe", self._stored(self.rows * spec.hidden_size))
        if self.is_last:
            self._ends()
        return {piece: self._total[piece] for piece in PIECES}

    # --- layers ---

    def _attention(self, q_width: int, kv_width: int) -> None:
        """Adds attention of one rank's heads. If ranks share a KV head, each reads it."""
        tp = self.degrees.tp
        q_width //= tp
        kv_width = max(kv_width // tp, self.spec.head_dim)
        self._product(self.spec.hidden_size, q_width + 2 * kv_width)
        self._light(2 * self.rows * (q_width + 2 * kv_width))
        self._decodes(2 * kv_width, self.rates.kv_bytes_per_s)
        self._prompts(4 * q_width)
        self._product(q_width, self.spec.hidden_size)
        self._sum_product(q_width)

    def _latent_attention(self, sizes: LatentSpec) -> None:
        """Adds attention over latents, which each rank reads. Decodes keep them, prompts expand."""
        heads = self.spec.num_heads // self.degrees.tp
        hidden, stored = self.spec.hidden_size, sizes.kv_rank + sizes.rope_dim
        q_width = heads * (sizes.nope_dim + sizes.rope_dim)
        made = heads * (sizes.nope_dim + sizes.v_dim)
        if sizes.q_rank is None:
            self._product(hidden, q_width + stored)
        else:
            self._product(hidden, sizes.q_rank + stored)
            self._product(sizes.q_rank, q_width)
        self._light(2 * self.rows * (q_width + stored))
        if self.step.num_decodes:
            for width in (sizes.nope_dim, sizes.v_dim):
                self._product(sizes.kv_rank, heads * width, rows=self.step.num_decodes)
        expanded = sum(chunk.num_keys for chunk in self.step.chunks)
        if expanded:
            self._product(sizes.kv_rank, made, rows=expanded)
            self._light(3 * expanded * made)
        self._decodes(stored, self.rates.latent_bytes_per_s)
        self._prompts(2 * (made + heads * sizes.rope_dim))
        self._product(heads * sizes.v_dim, hidden)
        self._sum_product(heads * sizes.v_dim)

    def _decodes(self, numbers_per_key: int, bytes_per_s: float) -> None:
        self.num_cached += self._times * numbers_per_key
        if self.step.num_decodes:
            read = self.step.num_keys * numbers_per_key * ITEM
            self._add("attention", read / bytes_per_s)
            self._add("tails", self.rates.attention_tail_s)

    def _prompts(self, flops_per_pair: int) -> None:
        chunks = self.step.chunks
        if chunks:
            rates = self.rates
            pairs = sum(c.num_pairs + rates.prompt_extra_keys * c.num_rows for c in chunks)
            self._add("attention", pairs * flops_per_pair / rates.prompt_flops_per_s)
            self._add("tails", rates.prompt_tail_s)

    def _mlp(self, size: int, rows: int | None = None) -> None:
        size //= self.degrees.tp
        rows = self.rows if rows is None else rows
        self._product(self.spec.hidden_size, 2 * size, rows=rows)
        self._product(size, self.spec.hidden_size, rows=rows)
        # The product of a single row includes the activation and the residual.
        self._light(3 * rows * size if rows > 1 else 0)

    def _mixture(self, experts: ExpertSpec) -> None:
        routing, hidden, degrees = experts.routing, self.spec.hidden_size, self.degrees
        self._product(hidden, routing.num_experts)
        self._add("experts", self.rates.route_s + self.rates.route_row_s * self.rows)
        rows = self.all_rows if degrees.ep else self.step.num_rows
        parts = degrees.group if degrees.ep else degrees.tp
        if degrees.ep:
            read = busiest_experts(rows, routing.num_experts, routing.top_k, parts)
            width = experts.size
            places = rows * routing.num_places / parts
        else:
            read = busiest_experts(rows, routing.num_experts, routing.top_k, 1)
            width = experts.size // parts
            places = float(rows * routing.num_places)
        read += routing.num_shared
        share = rows * routing.num_places / (routing.num_experts + routing.num_shared)
        tile = tile_for(share, hidden, is_gated=True, itemsize=ITEM).rows
        self.num_weights += (
            self._times
            * (routing.num_experts / (parts if degrees.ep else 1) + routing.num_shared)
            * 3
            * hidden
            * width
        )
        weights = read * 3 * hidden * width * ITEM / self.rates.weight_bytes_per_s
        # On average, the last tile of an expert is half empty.
        padded = places + read * (tile / 2 if rows > 1 else 0)
        flops = 6.0 * padded * hidden * width / self.rates.expert_flops_per_s
        self._add("experts", math.hypot(weights, flops))
        self._add("tails", self.rates.experts_tail_s if rows > 1 else 2 * self.rates.row_tail_s)
        self._light((places + 2 * self.rows) * hidden)
        if experts.gated_size:
            self._mlp(experts.gated_size)
        if degrees.dp > 1:
            self._exchange(hidden)
        else:
            self._sum()

    # --- pieces ---

    def _add(self, piece: str, seconds: float) -> None:
        self._total[piece] += self._times * seconds

    def _product(self, num_in: int, num_out: int, rows: int | None = None) -> None:
        self.num_weights += self._times * num_in * num_out
        rows = self.rows if rows is None else rows
        self._add("products", self._product_s(num_in, num_out, rows))
        self._add("tails", self.rates.row_tail_s if rows == 1 else self.rates.rows_tail_s)

    def _product_s(self, num_in: int, num_out: int, rows: int) -> float:
        read = (num_in * num_out + rows * (num_in + num_out)) * ITEM
        flops = 2.0 * rows * num_in * num_out
        return math.hypot(read / self.rates.weight_bytes_per_s, flops / self.rates.flops_per_s)

    def _light(self, numbers: float) -> None:
        if numbers:
            self._add("light", numbers * ITEM / self.rates.light_bytes_per_s)
            self._add("tails", self.rates.light_tail_s)

    def _stored(self, numbers: float) -> float:
        """Returns the seconds to store `numbers` numbers in another rank's memory."""
        return self.rates.flag_s + numbers * ITEM / self.rates.store_bytes_per_s

    def _sum_product(self, num_in: int) -> None:
        """Adds the norm before the next product, and the sum over ranks that is fused with it. The
        sum's rows come from a product of num_in inputs per rank, which may hide their transfer."""
        sums = self.model.sums
        parts = sums.parts(self.rows, num_in)
        if len(parts) == 1 or not self.step.chunks:
            self._sum()
            return
        hiding = self._product_s(num_in, self.spec.hidden_size, self.rows)
        self._norm(sums.beside_s(parts, hiding))

    def _sum(self) -> None:
        """Adds the norm before the next product, and the sum over ranks that is fused with it."""
        self._norm(self.model.sums.seconds(self.rows))

    def _norm(self, sum_s: float) -> None:
        numbers = self.rows * self.spec.hidden_size
        self._add("light", 2 * numbers * ITEM / self.rates.light_bytes_per_s)
        if self.degrees.tp == 1:
            self._add("tails", self.rates.light_tail_s)
        else:
            self._add("sums", sum_s)

    def _exchange(self, hidden: int) -> None:
        """Adds the exchange of experts. Rows of each home go to the ranks of the other homes, and
        the parts come back, where they are summed together with the norm. The ranks of a home share
        the work in both directions, and send each other their sums."""
        tp, group = self.degrees.tp, self.degrees.group
        numbers = self.rows * hidden * ((group - tp) + (group - 1) + (tp - 1)) / tp
        is_few = self.all_rows <= FEW_ROWS
        numbers *= 2 if is_few else 1
        seconds = self.rates.flag_s + self.rates.sum_s
        seconds += numbers * ITEM / self.rates.store_bytes_per_s
        self._add("exchange", seconds)
        self._add("light", 2 * self.rows * hidden * ITEM / self.rates.light_bytes_per_s)

    def _ends(self) -> None:
        """Adds the norm, the logits and the greedy choice. Columns of other ranks go to rank 0.
        With several homes, the rows that sample first go to all ranks."""
        samples, group = self.step.num_samples * self.step.homes, self.degrees.group
        if not samples:
            return
        vocab, hidden = self.spec.vocab_size, self.spec.hidden_size
        self.num_weights += hidden * vocab // group
        self._add("head", self._product_s(hidden, vocab // group, samples))
        self._add("head", samples * vocab * ITEM / self.rates.sample_bytes_per_s)
        self._add("tails", 2 * self.rates.rows_tail_s + self.rates.light_tail_s)
        if group > 1:
            self._add("logits", self._stored(samples * vocab * (group - 1) / group))
            self._add("logits", self.rates.flag_s)  # tokens go back to all ranks
        if self.degrees.dp > 1:
            self._add("logits", self._stored(self.step.num_samples * hidden * (group - 1)))


def busiest_experts(num_rows: int, num_experts: int, top_k: int, parts: int) -> float:
    """Returns the expected number of distinct experts that rows reach on the rank with the most: a
    mean and the maximum of `parts` counts. They are nearly normal with a nearly constant sum."""
    local = num_experts / parts
    reached = 1 - (1 - top_k / num_experts) ** num_rows
    known = max(p for p in MAX_OF_NORMALS if p <= parts)
    deviation = math.sqrt(local * reached * (1 - reached))
    return min(local, local * reached + MAX_OF_NORMALS[known] * deviation)
