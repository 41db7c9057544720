"""Attention over latents (MLA, DeepSeek-V2): a token stores one latent row for all heads. The step
computes the attention itself, including the rotation."""

from functools import cached_property

from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.collective.ops import Stream
from pdserve.kernels.latents.spec import LatentAttentionSpec, LatentHeads
from pdserve.kernels.linear.schemes.dense import Dense
from pdserve.models.facts.latent import LatentSpec
from pdserve.models.layers.context import LayerContext
from pdserve.models.layers.linear import Linear, Stack, column_parts, row_shard
from pdserve.models.layers.norm import RmsNorm
from pdserve.models.step_context import RopeTables, StepContext
from pdserve.models.weights import Part

LATENT_EPS = 1e-6  # eps of the latents' own norms, whatever the model's is


class LatentAttention:
    """The attention of one layer over latents.

    norm: is applied to the stream before the projections.
    attends: the spec of this rank's heads, in the latent's space. Every rank stores whole latents.
    """

    def __init__(
        self, context: LayerContext, layer: int, module: str, rope: RopeTables, norm: RmsNorm
    ) -> None:
        spec = context.spec
        sizes = spec.latent
        assert sizes is not None, "the model has no attention over latents"
        self._layer = layer
        self._rope = rope
        self._norm = norm
        self._spec = latent_attention_spec(context, sizes)
        self.attends = self._spec.attends
        num_heads = self.attends.num_heads
        head = sizes.nope_dim + sizes.rope_dim
        queries = column_parts(context, {f"{module}.q_proj": spec.num_heads * head})
        self._query_norm: RmsNorm | None = None
        if sizes.q_rank is not None:
            [up] = column_parts(context, {f"{module}.q_b_proj": spec.num_heads * head})
            self._query_up = Linear(context, [up], sizes.q_rank, bias=False)
            self._query_norm = RmsNorm(context, f"{module}.q_a_layernorm", sizes.q_rank, LATENT_EPS)
            queries = [Part(f"{module}.q_a_proj", sizes.q_rank)]
        self._latent_norm = RmsNorm(context, f"{module}.kv_a_layernorm", sizes.kv_rank, LATENT_EPS)
        latent = Part(f"{module}.kv_a_proj_with_mqa", sizes.kv_rank + sizes.rope_dim)
        self._down = Linear(context, [*queries, latent], spec.hidden_size, spec.qkv_bias)
        self._widths = [sum(part.num_held for part in queries), latent.num_held]
        rows = sizes.nope_dim + sizes.v_dim
        heads = column_parts(context, {f"{module}.kv_b_proj": spec.num_heads * rows})
        # Absorbed: attention takes the matrix apart and multiplies with its numbers, so it is dense
        # whatever the checkpoint has.
        self._heads = Stack(context, heads, num_heads, sizes.kv_rank, target=Dense())
        out = [Part(f"{module}.o_proj", spec.hidden_size)]
        self._o = Linear(context, out, num_heads * sizes.v_dim, spec.o_bias, row_shard(context))

    def __call__(self, stream: Stream, step: StepContext) -> Stream:
        made, stream = self._down.of_norm(stream, self._norm)
        queries, latent = made.split_with_sizes(self._widths, 1)
        if self._query_norm is not None:
            queries = self._query_up(self._query_norm(queries))
        q = queries.unflatten(1, (self.attends.num_heads, -1))
        attended = step.attend_latent(
            self._layer, self._spec, q, latent, self._latent_heads, self._rope
        )
        return self._o.add_to(stream, attended.flatten(1))

    @cached_property
    def _latent_heads(self) -> LatentHeads:
        data = self._heads.value.data
        nope = self._spec.nope_dim
        return LatentHeads(self._latent_norm.value, keys=data[:, :nope], values=data[:, nope:])


def latent_attention_spec(context: LayerContext, sizes: LatentSpec) -> LatentAttentionSpec:
    """Returns how this rank's heads attend."""
    spec = context.spec
    assert spec.attention_scale is not None, "the scale must be given: heads are not head_dim wide"
    attends = AttentionSpec(
        num_heads=spec.num_heads // context.dims.tp,
        num_kv_heads=1,
        head_dim=sizes.kv_rank + sizes.rope_dim,
        scale=spec.attention_scale,
        value_width=sizes.kv_rank,
    )
    return LatentAttentionSpec(attends, sizes.nope_dim, sizes.v_dim, sizes.is_interleaved)
