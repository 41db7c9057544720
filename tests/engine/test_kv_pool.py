"""The pool's size follows the configuration and the device, its memory is its own, and errors say
what to change."""

import ctypes
import gc
import math
import time
from typing import Any

import pytest
import torch

from pdserve.configs.engine import EngineConfig
from pdserve.configs.kv_layout import KVLayout
from pdserve.engine.memory import device_memory, kv_cache_size
from pdserve.engine.memory.kv_cache import TORCH_DTYPES
from pdserve.engine.memory.kv_cache_size import (
    allocate_kv_cache,
    await_those_who_leave,
    num_blocks_for,
)

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
GIB = 1 << 30


def layout(
    dtype: str = "bfloat16", num_layers: int = 32, head_dim: int = 128, block_size: int = 16
) -> KVLayout:
    return KVLayout.uniform(
        num_layers=num_layers,
        heads=tuple(range(8)),
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 100 GiB, 20 of them in use."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (80 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 14 * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_pool_has_the_layouts_shape_and_zeros(dtype: str) -> None:
    made = layout(dtype, 3, 80)
    pool = allocate_kv_cache(made, 5, CPU)
    [rows] = pool.groups
    assert rows.shape == (5, 8, 3, 2, 16, 80) and rows.dtype == TORCH_DTYPES[dtype]
    assert rows.is_contiguous() and pool.data.shape == (5, made.block_bytes)
    assert pool.num_blocks == 5 and not pool.data.any()
    for layer in range(3):
        assert pool.layers[layer].data_ptr() == rows[:, :, layer].data_ptr()
        assert pool.layers[layer].stride() == rows[:, :, layer].stride()


def blocks_of(gib: int) -> int:
    return gib * GIB // layout().block_bytes


def test_the_engines_share_less_what_it_holds_and_reserves(card: None) -> None:
    config = EngineConfig(kv_memory_fraction=0.8)
    # 14 in torch's allocator, 2 of links and 1 of CUDA's own; others hold 3
    found = num_blocks_for(config, layout(), CUDA, 6 * GIB, links_bytes=2 * GIB)
    assert found == blocks_of(80 - 14 - 2 - 1 - 6)


@pytest.mark.parametrize("others", [0, 3, 40])
def test_what_others_hold_takes_nothing_from_a_share(
    others: int, card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers with 0.4 of a device each, of which one starts again."""
    free = (100 - 15 - others) * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, 100 * GIB))
    config = EngineConfig(kv_memory_fraction=0.4)
    await_those_who_leave(config, CUDA, wait_s=0.0)
    assert num_blocks_for(config, layout(), CUDA, 5 * GIB) == blocks_of(40 - 15 - 5)


def test_what_others_hold_is_not_taken(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (30 * GIB, 100 * GIB))
    config = EngineConfig(kv_memory_fraction=0.9)
    assert num_blocks_for(config, layout(), CUDA, 6 * GIB) == blocks_of(30 - 6 - 1)
    with pytest.raises(
        ValueError, match=r"gets 0 bytes: 30.00 GiB of 100.00 GiB are free, .* end what else uses"
    ):
        num_blocks_for(config, layout(), CUDA, 30 * GIB)


def test_a_share_that_is_too_small_says_what_to_change(card: None) -> None:
    with pytest.raises(
        ValueError,
        match=r"gets 0 bytes: kv_memory_fraction 0.1 of 100.00 GiB minus 15.00 GiB that this",
    ):
        num_blocks_for(EngineConfig(kv_memory_fraction=0.1), layout(), CUDA, GIB)


def test_a_configured_pool_that_cannot_fit_is_refused_by_name(card: None) -> None:
    fits = 70 * GIB // layout().block_bytes
    assert num_blocks_for(EngineConfig(num_kv_blocks=fits), layout(), CUDA, 10 * GIB) == fits
    with pytest.raises(
        ValueError,
        match=rf"num_kv_blocks asks for .* 70.00 GiB available .*\({fits} blocks would fit",
    ):
        num_blocks_for(EngineConfig(num_kv_blocks=fits + 1), layout(), CUDA, 10 * GIB)


def test_the_machines_memory_is_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_blocks_for(EngineConfig(kv_memory_bytes=GIB), layout(), CPU, 0) == 512
    monkeypatch.setattr(device_memory, "available_bytes", lambda device: GIB)
    with pytest.raises(
        ValueError, match=rf"kv_memory_bytes .* 1.00 GiB available .* \({GIB} bytes would"
    ):
        num_blocks_for(EngineConfig(kv_memory_bytes=2 * GIB), layout(), CPU, 0)
    with pytest.raises(ValueError, match="lower num_kv_blocks"):
        allocate_kv_cache(layout(), 1000, CPU)
    with pytest.raises(ValueError, match=r"at least 2 blocks .* raise kv_memory_bytes"):
        num_blocks_for(EngineConfig(kv_memory_bytes=3 << 20), layout(), CPU, 0)


def test_available_memory_is_what_the_system_says() -> None:
    page = torch.ones(1)  # something is in use
    assert page.numel() <= device_memory.available_bytes(CPU)
    assert device_memory.available_bytes(CPU) < 1 << 50, "Linux tells"


class Runtime:
    """Implements four functions of cudart over host memory."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.calls: list[tuple[str] | tuple[str, int]] = []

    def cudaMalloc(self, pointer: Any, size: Any) -> int:
        self.calls.append(("malloc", size.value))
        pointer._obj.value = 4096
        return self.error

    def cudaFree(self, pointer: Any) -> int:
        self.calls.append(("free", pointer.value))
        return 0

    def cudaGetLastError(self) -> int:
        self.calls.append(("clear",))
        return self.error


def test_memory_is_freed_once_and_errors_are_cleared() -> None:
    runtime = Runtime()
    memory = device_memory._CudaBytes(runtime, 512)
    assert memory.__cuda_array_interface__["data"] == (4096, False)
    del memory
    gc.collect()
    assert runtime.calls == [("malloc", 512), ("free", 4096)]
    for error, kind in ((2, device_memory.OutOfMemory), (35, RuntimeError)):
        runtime = Runtime(error)
        with pytest.raises(kind):
            device_memory._CudaBytes(runtime, 512)
        gc.collect()
        assert runtime.calls == [("malloc", 512), ("clear",)]


@pytest.mark.parametrize(
    ("fraction", "others", "looks"),
    [
        # GiB of 100 that others hold, look by look; a process of this engine has two of its own
        (0.9, [80, 80, 45, 8], 4),
        (0.9, [8], 1),
        (0.45, [47], 1),
        (0.45, [92, 47], 2),
    ],
)
def test_a_start_waits_for_a_process_that_leaves(
    fraction: float, others: list[int], looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def mem_get_info(device: object) -> tuple[int, int]:
        asked.append(others[len(asked)])
        return (98 - asked[-1]) * GIB, 100 * GIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB)
    monkeypatch.setattr(kv_cache_size, "LOOK_S", 0.001)
    await_those_who_leave(EngineConfig(kv_memory_fraction=fraction), torch.device("cuda"))
    assert len(asked) == looks


def test_a_start_waits_for_one_that_stays_so_long_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(kv_cache_size, "LOOK_S", 0.001)
    began = time.monotonic()
    await_those_who_leave(EngineConfig(), torch.device("cuda"), wait_s=0.05)
    assert 0.05 <= time.monotonic() - began < 2.0
    assert caplog.text.count("other processes hold 49.00 GiB of cuda") == 1
    with_blocks = EngineConfig(num_kv_blocks=9)
    await_those_who_leave(with_blocks, torch.device("cuda"), wait_s=3600.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_on_the_device_the_pool_is_outside_torchs_cache_and_returns(dtype: str) -> None:
    shape = layout(dtype, 4, 80)
    num_blocks = GIB // shape.block_bytes
    torch.zeros(1, device=CUDA)  # the context's own memory
    gc.collect()  # the pools of other tests
    free = device_memory.available_bytes(CUDA)
    reserved = torch.cuda.memory_reserved()
    pool = allocate_kv_cache(shape, num_blocks, CUDA)
    assert torch.cuda.memory_reserved() == reserved
    assert free - torch.cuda.mem_get_info()[0] >= pool.data.nbytes
    handle = (ctypes.c_byte * 64)()
    assert (
        device_memory.cudart().cudaIpcGetMemHandle(handle, ctypes.c_void_p(pool.data.data_ptr()))
        == 0
    ), "UCX needs one"
    assert pool.data.data_ptr() % 256 == 0 and pool.data.is_contiguous() and not pool.data.any()
    row = pool.groups[0][-1, -1].view(-1)
    row.copy_(torch.arange(row.numel(), device=CUDA) % 251)
    del pool
    gc.collect()
    assert torch.equal(row.float(), (torch.arange(row.numel(), device=CUDA) % 251).float()), (
        "a view keeps it alive"
    )
    del row
    gc.collect()
    assert abs(device_memory.available_bytes(CUDA) - free) < 64 << 20


@pytest.mark.gpu
def test_on_the_device_a_pool_that_is_too_large_is_an_error_with_a_cure() -> None:
    shape = layout()
    room = device_memory.available_bytes(CUDA)
    with pytest.raises(ValueError, match="lower num_kv_blocks"):
        allocate_kv_cache(shape, room // shape.block_bytes + 64, CUDA)
    assert torch.ones(8, device=CUDA).sum().item() == 8, (
        "the failed allocation is nobody else's error"
    )


@pytest.mark.gpu
def test_on_the_device_torch_runs_out_behind_the_pool_and_recovers() -> None:
    free = device_memory.available_bytes(CUDA)
    config = EngineConfig(kv_memory_fraction=0.9)
    pool = allocate_kv_cache(layout(), num_blocks_for(config, layout(), CUDA, 4 * GIB), CUDA)
    assert math.isclose(torch.cuda.mem_get_info()[0], free - pool.data.nbytes, abs_tol=64 << 20)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(free // 2, dtype=torch.uint8, device=CUDA)
    assert (
        torch.empty(GIB, dtype=torch.uint8, device=CUDA).fill_(1).sum(dtype=torch.int64).item()
        == GIB
    )
    del pool
    gc.collect()
    assert torch.empty(free // 2, dtype=torch.uint8, device=CUDA).numel() == free // 2
