"""The KV pool's memory: sized, allocated once, and never moved (a connector registers it).

Knows the layout and the device; not who owns which block (block_manager) nor what is in them.
"""

import torch
from torch import Tensor

from pdserve.configs.kv_layout import KVLayout
from pdserve.configs.schema import EngineConfig

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def allocate_pool(layout: KVLayout, num_blocks: int, device: torch.device) -> Tensor:
    """Zeroed `[num_blocks, kv_heads, layers, planes, block_size, row_width]`, contiguous."""
    return torch.zeros((num_blocks, *layout.block_shape), dtype=TORCH_DTYPES[layout.group.dtype], device=device)


def num_blocks_for(config: EngineConfig, layout: KVLayout, device: torch.device, peak_activation_bytes: int) -> int:
    """How many blocks the pool gets: as configured, else what `kv_memory_bytes` (CPU) or the free device memory holds.

    On CUDA: total * kv_memory_fraction, less what is in use now, less the activations of the largest step.
    ValueError when that is fewer than 2 blocks.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading and the profiling step left in PyTorch's cache is free, too
        free, total = torch.cuda.mem_get_info(device)
        budget = int(total * config.kv_memory_fraction) - (total - free) - peak_activation_bytes
    else:
        budget = config.kv_memory_bytes
    count = budget // layout.block_bytes
    if count < 2:
        raise ValueError(
            f"{budget >> 20} MiB are left for the KV pool, but one block of {layout.block_size} tokens takes "
            f"{layout.block_bytes >> 10} KiB: raise kv_memory_bytes or kv_memory_fraction, or lower "
            "max_num_batched_tokens"
        )
    return count
