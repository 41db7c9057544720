"""Tests launch(): which launches share a compiled kernel, and what the driver gets. On a GPU
(marked gpu) the real Triton runs, and each launch twice: through JITFunction, and kept.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pdserve.kernels.launching import launch as launch_module
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2, not_launching
from pdserve.kernels.launching.notes import noting

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STREAM = 77


class Recorder(triton.JITFunction):
    """Stands for a kernel (x_ptr, y_ptr, number, scale, BLOCK): counts calls through Triton,
    records those past it."""

    def __init__(self) -> None:
        self.arg_names = ["x_ptr", "y_ptr", "number", "scale", "BLOCK"]
        self.num_jit_calls = 0
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: object) -> Any:
        def call(*args: Any, **options: Any) -> SimpleNamespace:
            self.num_jit_calls += 1
            return SimpleNamespace(
                run=lambda *a: self.launches.append(a), function="f", packed_metadata="m"
            )

        return call


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    driver = SimpleNamespace(get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    monkeypatch.setattr(launch_module, "_kept", {})
    yield Recorder()


def half(num: int = 32) -> Tensor:
    return torch.zeros(num, dtype=torch.float16)


def test_a_noted_launch_is_done_again_as_it_was_done(kernel: Recorder) -> None:
    """The first launch goes through Triton, the second past it; both can be repeated, also after
    kept kernels were forgotten."""
    x, y, other = half(), half(), half()
    for _ in range(2):
        with noting() as notes:
            launch(kernel, (4, 5), (x, y), (7, 0.5), BLOCK=64, num_warps=4)
        launch_module._kept.clear()
        again, pointers, takes_addresses = notes.launches[0]
        assert pointers == (x, y) and takes_addresses
        again([x.data_ptr(), other.data_ptr()])
        launch(kernel, (4, 5), (x, other), (7, 0.5), BLOCK=64, num_warps=4)
        launch(kernel, (4, 5), (x, other), (7, 0.5), BLOCK=64, num_warps=4)
        assert kernel.launches[-1] == kernel.launches[-2]
    with not_launching(), pytest.raises(AssertionError, match="not_launching"):
        again([x.data_ptr(), y.data_ptr()])


def test_the_same_launch_goes_straight_to_the_driver(kernel: Recorder) -> None:
    for grid in ((3,), (4, 5)):
        x = half()
        y = half()
        launch(kernel, grid, (x, y), (7, 0.5), BLOCK=64, num_warps=4)
    assert kernel.num_jit_calls == 1
    assert kernel.launches == [
        (4, 5, 1, STREAM, "f", "m", None, None, None, x.data_ptr(), y.data_ptr(), 7, 0.5, 64),
    ]


CHANGES: dict[str, dict[str, Any]] = {
    "dtype": {"pointers": (half(), half().float())},
    "alignment": {"pointers": (half()[1:], half())},
    "alignment of another": {"pointers": (half(), half()[1:])},
    "no pointer": {"pointers": (half(), None)},
    "descriptor": {
        "pointers": (half(), TensorDescriptor.from_tensor(half(512).view(16, 32), [16, 16]))
    },
    "number": {"numbers": (8, 0.5)},
    "constant": {"BLOCK": 32},
    "option": {"num_warps": 8},
    "more options": {"launch_pdl": True},
    "options by other names": {"num_warps": 64, "BLOCK": 4},
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_launches_are_not_taken_for_the_same(kernel: Recorder, change: str) -> None:
    usual: dict[str, Any] = {
        "pointers": (half(), half()),
        "numbers": (7, 0.5),
        "BLOCK": 64,
        "num_warps": 4,
    }
    changed = usual | CHANGES[change]
    if change == "options by other names":
        changed = {"pointers": usual["pointers"], "numbers": usual["numbers"], **CHANGES[change]}
    for arguments in (usual, changed, changed, usual):
        launch(kernel, (1,), **arguments)
    assert kernel.num_jit_calls == 2
    assert len(kernel.launches) == 2


def test_a_descriptor_reaches_triton_whole_and_block_shapes_differ(kernel: Recorder) -> None:
    matrix = half(512).view(16, 32)
    shapes = ([16, 16], [16, 32])
    for shape in (*shapes, *shapes):
        launch(
            kernel, (1,), (half(), TensorDescriptor.from_tensor(matrix, shape)), (7, 0.5), BLOCK=64
        )
    assert kernel.num_jit_calls == 2
    assert [call[10].block_shape for call in kernel.launches] == list(shapes)


def test_kept_kernels_are_bounded(kernel: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "MAX_KEPT", 10)
    for number in range(35):
        launch(kernel, (1,), (half(), half()), (number, 0.5), BLOCK=64)
        assert len(launch_module._kept) <= 10


@triton.jit
def scaled_sum_kernel(  # type: ignore[no-untyped-def]  # Triton compiles annotations too
    x_ptr, y_ptr, out_ptr, num, number, scale, OFFSET: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num
    value = tl.load(x_ptr + at, mask=mask).to(tl.float32) * scale + number + OFFSET
    if y_ptr is not None:
        value += tl.load(y_ptr + at, mask=mask).to(tl.float32)
    tl.store(out_ptr + at, value, mask=mask)


def check_scaled_sum(x: Tensor, y: Tensor | None, number: int, scale: float, offset: int) -> None:
    """Twice, from other tensors: what is kept must not hold on to the first call's."""
    for _ in range(2):
        x, out = x.clone() if x.data_ptr() % 16 == 0 else x, torch.empty(len(x), device=DEVICE)
        launch(
            scaled_sum_kernel,
            (cdiv(len(x), 32),),
            (x, y, out),
            (len(x), number, scale),
            OFFSET=offset,
            BLOCK=32,
        )
        expected = x.double() * scale + number + offset + (0 if y is None else y.double())
        torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("number", [0, 1, 15, 16, 2**31, -(2**40)])
def test_numbers_of_every_kind(number: int) -> None:
    check_scaled_sum(torch.randn(100, device=DEVICE), None, number, 2.5, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shift", [0, 1, 16])
def test_pointers_of_every_kind(shift: int, dtype: torch.dtype) -> None:
    x, y = (torch.randn(100, device=DEVICE).to(dtype) for _ in range(2))
    for scale, offset in ((1.0, 0), (-0.5, 1)):
        check_scaled_sum(x[shift:], y[shift:], 5, scale, offset)
        check_scaled_sum(x[shift:], y[: 100 - shift], 5, scale, offset)
        check_scaled_sum(x[shift:], None, 5, scale, offset)


def test_grid_sizes() -> None:
    assert [cdiv(x, 4) for x in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [next_power_of_2(x) for x in (1, 2, 3, 4, 5, 1000)] == [1, 2, 4, 4, 8, 1024]


@pytest.mark.gpu
def test_kept_launches_are_captured() -> None:
    x = torch.randn(100, device=DEVICE)
    out = torch.empty(100, device=DEVICE)
    arguments: dict[str, Any] = {"OFFSET": 1, "BLOCK": 32}
    launch(scaled_sum_kernel, (4,), (x, None, out), (100, 2, 1.0), **arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(scaled_sum_kernel, (4,), (x, None, out), (100, 2, 1.0), **arguments)
    x.copy_(torch.randn(100))
    out.zero_()
    graph.replay()
    torch.testing.assert_close(out, x + 3)
