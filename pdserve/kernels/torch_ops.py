"""Every op of ops.py in plain torch: the oracle of the Triton kernels and the production path on
CPU.

This module only gathers the ops, as `triton_ops.py` does; each stands in the `reference.py` of its
room, beside the kernels whose twin it is. On CPU the results are batch-invariant bit for bit
(linear/reference.py, attention/reference.py). Knows nothing of models, schedulers or block
managers. Called by models through ops_for().
"""

from pdserve.kernels.attention.reference import (
    chunk_prefill,
    chunk_prefill_pays,
    dense_attention,
    fresh_prefill,
    fresh_prefill_pays,
    join_attention,
    paged_decode,
    paged_prefill,
    warm_dense_prefill,
)
from pdserve.kernels.batch.reference import gather_inputs, store_tokens, update_tables
from pdserve.kernels.kv.reference import (
    apply_rope,
    copy_blocks,
    gather_kv,
    repack,
    rope_write_kv,
    write_kv,
)
from pdserve.kernels.linear.reference import linear, linear_add, norm_linear, norm_linear_silu_mul
from pdserve.kernels.norm.reference import rms_norm, silu_mul
from pdserve.kernels.sampling.reference import (
    apply_edits,
    apply_penalties,
    cut_tokens,
    draw_tokens,
    gumbel,
    mix_32,
    token_logprobs,
)

__all__ = [
    "apply_edits",
    "apply_penalties",
    "apply_rope",
    "chunk_prefill",
    "chunk_prefill_pays",
    "copy_blocks",
    "cut_tokens",
    "dense_attention",
    "draw_tokens",
    "fresh_prefill",
    "fresh_prefill_pays",
    "gather_inputs",
    "gather_kv",
    "gumbel",
    "join_attention",
    "linear",
    "linear_add",
    "mix_32",
    "norm_linear",
    "norm_linear_silu_mul",
    "paged_decode",
    "paged_prefill",
    "repack",
    "rms_norm",
    "rope_write_kv",
    "silu_mul",
    "store_tokens",
    "token_logprobs",
    "update_tables",
    "warm_dense_prefill",
    "write_kv",
]
