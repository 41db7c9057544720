"""WholePrompts: runs a model over whole prompts, one after another, with a KV cache of its own.

The rows go through the same kernels as an engine's prefill. This module knows no scheduling.
"""

import torch
from torch import Tensor

from pdserve.engine.execution.attention import AttentionBatch, PagedAttention
from pdserve.engine.memory.kv_cache import KVCache, layout_of
from pdserve.engine.memory.kv_cache_size import allocate_kv_cache
from pdserve.engine.memory.row_scales import row_scales
from pdserve.engine.stepping.work import StepShape
from pdserve.kernels.ops import Ops
from pdserve.models.kv_scales import KvScales
from pdserve.models.registry import CausalLM
from pdserve.models.step_context import StepContext


class WholePrompts:
    """Runs a model over one whole prompt at a time. Block 0 is the null block. The rows of a prompt
    stand in the other blocks, in order.

    - kv_dtype: Dtype of the cache, as LayerGroup names it.
    - longest: Tokens of the longest prompt.
    - scales: Scales of a cache in e4m3.
    """

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        kv_dtype: str,
        longest: int,
        block_size: int,
        scales: KvScales | None = None,
    ) -> None:
        device = model.weights.device
        layout = layout_of(model.attention, block_size, kv_dtype)
        self._num_blocks = layout.num_blocks_for(longest)
        self.kv_cache: KVCache = allocate_kv_cache(layout, self._num_blocks + 1, device)
        self._model = model
        self._ops = ops
        self._scales = row_scales(scales, model.attention, device)

    @torch.inference_mode()
    def hidden(self, ids: list[int]) -> Tensor:
        """Returns the hidden states `[T, hidden]`, from which the model makes logits."""
        device = self.kv_cache.device
        block_size = self.kv_cache.layout.block_size

        def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        count = len(ids)
        batch = AttentionBatch(
            shape=StepShape(num_decodes=0, max_decode_context=0, chunks=((0, count),)),
            positions=torch.arange(count, dtype=torch.int32, device=device),
            slot_mapping=torch.arange(count, device=device) + block_size,
            block_tables=torch.arange(1, self._num_blocks + 1, dtype=torch.int32, device=device)[
                None
            ],
            table_rows=ints([0]),
            context_lens=ints([count]),
            query_starts=ints([0, count]),
        )
        attend = PagedAttention(self.kv_cache, self._ops, batch, self._scales)
        step = StepContext(attend, batch.positions, attend_latent=attend.latent)
        stream = self._model.embed(ints(ids, torch.int64), step)
        return self._model.hidden(self._model.forward(stream, step))
