"""The Llama family: Llama 2 and 3, Mistral (without window), Qwen2 and Qwen3; ModelSpec carries
every difference.

    ids -> embedding
        -> layers x [ norm, qkv (-> qk norm) -> attend -> o, add
                      -> norm, gate_up, silu_mul -> down, add ]
        -> norm -> hidden -> lm_head -> logits

Tokens of all sequences of a step lie in one flat axis T. The model knows neither sequences,
positions nor the KV cache: `attend`, given by the engine's model runner, rotates q and k, writes K
and V and reads the past. Arithmetic goes through Ops, so CPU and GPU differ only there; what stands
between two products is one op, for kernels to fuse. Shapes: T tokens, Hq query heads, Hk KV heads,
D head_dim.
"""

from collections.abc import Callable

import torch

from pdserve.kernels.ops import Ops
from pdserve.models.config import ModelSpec
from pdserve.models.rope import rope_tables
from pdserve.models.weights import Weight, WeightSet
from pdserve.parallel.dims import ParallelDims

Tensor = torch.Tensor
RopeTables = tuple[Tensor, Tensor]  # cos and sin, see models/rope.py
Attend = Callable[[int, Tensor, Tensor, Tensor, RopeTables], Tensor]
"""`attend(layer, q [T, Hq, D], k [T, Hk, D], v [T, Hk, D], rope) -> [T, Hq, D]`, scaled by D **
-0.5; it rotates q and k, and may do so in place."""


class Linear:
    """A projection `[T, in] -> [T, out]`; several (`outs`: checkpoint module -> rows) in one
    matrix."""

    def __init__(
        self, ops: Ops, weights: WeightSet, outs: dict[str, int], num_inputs: int, bias: bool
    ) -> None:
        self._ops = ops
        self._weight = weights.add(
            {f"{name}.weight": rows for name, rows in outs.items()}, num_inputs
        )
        self._bias = (
            weights.add({f"{name}.bias": rows for name, rows in outs.items()}, init="bias")
            if bias
            else None
        )

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual [T, out]` with the projection of `x [T, in]` added; use residual no more."""
        return self._ops.linear_add(x, *self.parameters, residual)

    @property
    def parameters(self) -> tuple[Tensor, Tensor | None]:
        return self._weight.data, self._bias.data if self._bias else None


class Attention:
    """Projections, optional norm of each q and k head; the attention itself, rotation included, is
    `attend`."""

    def __init__(
        self, spec: ModelSpec, layer: int, ops: Ops, weights: WeightSet, rope: RopeTables
    ) -> None:
        self._spec = spec
        self._layer = layer
        self._ops = ops
        self._rope = rope
        prefix = f"model.layers.{layer}"
        name = f"{prefix}.self_attn"
        q_size = spec.num_heads * spec.head_dim
        kv_size = spec.num_kv_heads * spec.head_dim
        self._heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        outs = {f"{name}.q_proj": q_size, f"{name}.k_proj": kv_size, f"{name}.v_proj": kv_size}
        self._norm = weights.add(
            {f"{prefix}.input_layernorm.weight": spec.hidden_size}, init="ones"
        )
        self._qkv = Linear(ops, weights, outs, spec.hidden_size, spec.qkv_bias)
        self._o = Linear(ops, weights, {f"{name}.o_proj": spec.hidden_size}, q_size, spec.o_bias)
        self._qk_norms: tuple[Weight, Weight] | None = None
        if spec.qk_norm:
            self._qk_norms = (
                weights.add({f"{name}.q_norm.weight": spec.head_dim}, init="ones"),
                weights.add({f"{name}.k_norm.weight": spec.head_dim}, init="ones"),
            )

    def __call__(self, residual: Tensor, attend: Attend) -> Tensor:
        eps = self._spec.rms_eps
        qkv = self._ops.norm_linear(residual, self._norm.data, eps, *self._qkv.parameters)
        q, k, v = qkv.view(len(qkv), sum(self._heads), self._spec.head_dim).split_with_sizes(
            self._heads, 1
        )
        if self._qk_norms:
            q, k = (
                self._ops.rms_norm(x, norm.data, eps)
                for x, norm in zip((q, k), self._qk_norms, strict=True)
            )
        return self._o.add_to(residual, attend(self._layer, q, k, v, self._rope).flatten(1))


class Mlp:
    """SwiGLU (Shazeer 2020): `down(silu(gate(x)) * up(x))` with gate and up in one matrix."""

    def __init__(self, spec: ModelSpec, layer: int, ops: Ops, weights: WeightSet) -> None:
        self._ops = ops
        self._eps = spec.rms_eps
        prefix = f"model.layers.{layer}"
        size = spec.intermediate_size
        name = f"{prefix}.mlp"
        outs = {f"{name}.gate_proj": size, f"{name}.up_proj": size}
        self._norm = weights.add(
            {f"{prefix}.post_attention_layernorm.weight": spec.hidden_size}, init="ones"
        )
        self._gate_up = Linear(ops, weights, outs, spec.hidden_size, spec.mlp_bias)
        self._down = Linear(
            ops, weights, {f"{name}.down_proj": spec.hidden_size}, size, spec.mlp_bias
        )

    def __call__(self, residual: Tensor) -> Tensor:
        hidden = self._ops.norm_linear_silu_mul(
            residual, self._norm.data, self._eps, *self._gate_up.parameters
        )
        return self._down.add_to(residual, hidden)


class Layer:
    """One decoder layer."""

    def __init__(
        self, spec: ModelSpec, layer: int, ops: Ops, weights: WeightSet, rope: RopeTables
    ) -> None:
        self._attention = Attention(spec, layer, ops, weights, rope)
        self._mlp = Mlp(spec, layer, ops, weights)

    def __call__(self, residual: Tensor, attend: Attend) -> Tensor:
        """`residual [T, hidden]` -> the same after this layer; it may be overwritten."""
        return self._mlp(self._attention(residual, attend))


class Llama:
    """A decoder-only model whose `weights` are declared here and filled by models/loader.py."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
        dims: ParallelDims,
    ) -> None:
        assert dims.world_size == 1, "every rank holds the whole model until weights are sharded"
        self.spec = spec
        self.weights = WeightSet(dtype, device)
        self._ops = ops
        self._embedding = self.weights.add(
            {"model.embed_tokens.weight": spec.vocab_size}, spec.hidden_size
        )
        rope = rope_tables(spec.rope, spec.head_dim, spec.max_position, device)
        self._layers = [Layer(spec, i, ops, self.weights, rope) for i in range(spec.num_layers)]
        self._norm = self.weights.add({"model.norm.weight": spec.hidden_size}, init="ones")
        self._lm_head = self._embedding
        if not spec.tie_embeddings:
            self._lm_head = self.weights.add({"lm_head.weight": spec.vocab_size}, spec.hidden_size)

    def forward(self, input_ids: Tensor, attend: Attend) -> Tensor:
        """`input_ids [T]` -> hidden `[T, hidden]`, normed."""
        residual = torch.nn.functional.embedding(input_ids, self._embedding.data)
        for layer in self._layers:
            residual = layer(residual, attend)
        return self._ops.rms_norm(residual, self._norm.data, self.spec.rms_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden [N, hidden]` -> `[N, vocab]`, in the model's dtype.

        `forward` and `logits` leave T and N as they are: where Ops wants padded rows (CPU), the
        caller pads.
        """
        return self._ops.linear(hidden, self._lm_head.data, None)
