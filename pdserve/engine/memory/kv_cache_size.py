"""Chooses how many blocks the KV cache gets, and allocates it. That happens once; the memory never
moves, because a connector registers it.

Knows the configuration, the layout and the device. Called by `engine.components`.
"""

import logging
import time
from collections.abc import Mapping

import torch

from pdserve.configs.engine import EngineConfig
from pdserve.configs.kv_layout import KVLayout
from pdserve.engine.memory import device_memory
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.kernels.kv.ops import NO_SCALES, RowScales

logger = logging.getLogger(__name__)

LEAVING_S = 30.0
LOOK_S = 0.1
CONTEXT_BYTES = 1 << 30  # more than what CUDA takes for a process
ROOM_BYTES = 1 << 30  # that stay free on a device that others use too


def allocate_kv_cache(
    layout: KVLayout,
    num_blocks: int,
    device: torch.device,
    scales: Mapping[int, RowScales] = NO_SCALES,
) -> KVCache:
    """Allocate a zeroed KV cache outside torch's allocator; it is freed with its last view. scales:
    see KVCache. ValueError if the device does not have enough memory.
    """
    shape = (num_blocks, layout.block_bytes)
    try:
        return KVCache(device_memory.zeros(shape, torch.uint8, device), layout, scales)
    except device_memory.OutOfMemory:
        raise _does_not_fit("num_kv_blocks", num_blocks, layout, device, 0) from None


def num_blocks_for(
    config: EngineConfig,
    layout: KVLayout,
    device: torch.device,
    reserved_bytes: int,
    links_bytes: int = 0,
) -> int:
    """Number of blocks of the KV cache: the configured number, else what fits into
    `kv_memory_bytes` (CPU) or the device's memory.

    On CUDA the engine may take kv_memory_fraction of the device in all, whatever others hold. The
    budget is what it has not taken yet, minus reserved_bytes; at most what is free, minus
    reserved_bytes and some room.

    - reserved_bytes: what steps will need in addition (activations, sampling, graphs).
    - links_bytes: device memory that the engine holds outside torch's allocator.

    ValueError names the parameter if the KV cache does not fit, or if fewer than 2 blocks do.
    """
    if config.num_kv_blocks is not None:
        return _checked("num_kv_blocks", config.num_kv_blocks, layout, device, reserved_bytes)
    if device.type != "cuda":
        count = _at_least_two(config.kv_memory_bytes, layout, "raise kv_memory_bytes")
        return _checked("kv_memory_bytes", count, layout, device, reserved_bytes)
    torch.cuda.empty_cache()  # what loading and profiling left in PyTorch's cache counts as free
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device) + links_bytes + CONTEXT_BYTES
    share = int(total * config.kv_memory_fraction) - own - reserved_bytes
    room = free - reserved_bytes - ROOM_BYTES
    if share <= room:
        cure = (
            f"kv_memory_fraction {config.kv_memory_fraction:g} of {_gib(total)} minus {_gib(own)} "
            f"that this engine holds and {_gib(reserved_bytes)} reserved for steps; raise "
            "kv_memory_fraction, or lower max_num_batched_tokens"
        )
    else:
        cure = (
            f"{_gib(free)} of {_gib(total)} are free, minus {_gib(reserved_bytes)} reserved for "
            f"steps and {_gib(ROOM_BYTES)} of room; end what else uses {device}, or lower "
            "max_num_batched_tokens"
        )
    return _at_least_two(min(share, room), layout, cure)


def await_those_who_leave(
    config: EngineConfig, device: torch.device, wait_s: float = LEAVING_S
) -> None:
    """Wait for processes that are about to leave the device. Runs on CUDA before weights are
    loaded.

    It waits up to wait_s while others hold so much of the device that `kv_memory_fraction` of it is
    not available. Such a process may be the engine's last incarnation, which is ending."""
    if device.type != "cuda" or config.num_kv_blocks is not None:
        return
    until = time.monotonic() + wait_s
    is_told = False
    while True:
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device) - CONTEXT_BYTES
        if others <= total * (1 - config.kv_memory_fraction) or time.monotonic() >= until:
            return
        if not is_told:
            is_told = True
            logger.warning(
                "other processes hold %s of %s, which leaves this engine less than its "
                "kv_memory_fraction %g: waiting up to %g s for processes that are ending",
                _gib(others),
                device,
                config.kv_memory_fraction,
                wait_s,
            )
        time.sleep(LOOK_S)


def _at_least_two(budget: int, layout: KVLayout, cure: str) -> int:
    count = budget // layout.block_bytes
    if count < 2:
        raise ValueError(
            f"the KV cache needs at least 2 blocks of {layout.block_bytes} bytes "
            f"({layout.block_size} tokens each), but gets {max(budget, 0)} bytes: {cure}"
        )
    return count


def _checked(
    name: str, num_blocks: int, layout: KVLayout, device: torch.device, reserved_bytes: int
) -> int:
    if num_blocks * layout.block_bytes > device_memory.available_bytes(device) - reserved_bytes:
        raise _does_not_fit(name, num_blocks, layout, device, reserved_bytes)
    return num_blocks


def _does_not_fit(
    name: str, num_blocks: int, layout: KVLayout, device: torch.device, reserved_bytes: int
) -> ValueError:
    room = max(0, device_memory.available_bytes(device) - reserved_bytes)
    fitting = room // layout.block_bytes
    cure = (
        f"{fitting} blocks would fit"
        if name == "num_kv_blocks"
        else f"{fitting * layout.block_bytes} bytes would"
    )
    return ValueError(
        f"{name} asks for a KV cache of {num_blocks} blocks of {layout.block_bytes} bytes, "
        f"{_gib(num_blocks * layout.block_bytes)} in all, but {device} has {_gib(room)} available "
        f"after what steps need: lower {name} ({cure})"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
