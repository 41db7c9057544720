"""Kernels are compiled before the work that launches them, several at a time, and nothing is
launched meanwhile. Real compilations, for a Hopper that is not here.
"""

import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernels.absent_hopper import use_absent_hopper

from pdserve.kernels.launching import launch as launch_module
from pdserve.kernels.launching.ahead import compile_ahead
from pdserve.kernels.launching.compilers import compile_in_threads
from pdserve.kernels.launching.late_compiles import LateCompiles
from pdserve.kernels.launching.launch import launch

pytestmark = pytest.mark.processes  # Triton's assembler is one


def copies(source_ptr, target_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton compiles annotations too
    at = tl.arange(0, BLOCK)
    tl.store(target_ptr + at, tl.load(source_ptr + at))


@pytest.fixture(autouse=True)
def launchers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Kernels whose launchers were built, as Triton 3.6 does."""
    monkeypatch.setattr(launch_module, "_kept", {})
    return use_absent_hopper(monkeypatch, tmp_path)


def copy(kernel: "triton.JITFunction[Any]", block: int) -> torch.Tensor:
    """Launches a copy of `block` ones; what it returns is written by no kernel here."""
    target = torch.empty(block)
    launch(kernel, (1,), (torch.ones(block), target), (), BLOCK=block)
    return target


def discard(kernel: "triton.JITFunction[Any]", block: int) -> None:
    copy(kernel, block)


def test_kernels_are_compiled_and_not_launched(launchers: list[str]) -> None:
    kernel = triton.JITFunction(copies)
    written: list[torch.Tensor] = []
    compile_in_threads(lambda: written.extend(copy(kernel, block) for block in (16, 32, 16)))
    assert launchers == ["copies"] * 2
    assert [target.tolist() for target in written] == [[0.0] * block for block in (16, 32, 16)]
    late = LateCompiles()
    late.watch()
    for block in (16, 32):
        kernel.warmup(torch.ones(block), torch.ones(block), BLOCK=block, grid=(1,))
    assert late.count == 0
    kernel.warmup(torch.ones(64), torch.ones(64), BLOCK=64, grid=(1,))
    assert late.count == 1


def test_they_are_compiled_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3)

    def compiles(source: Any, **options: Any) -> SimpleNamespace:
        together.wait(timeout=30)
        return SimpleNamespace(src=SimpleNamespace(name="copies"), metadata=None)

    monkeypatch.setattr("triton.compiler.compile", compiles)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(3))
    kernel = triton.JITFunction(copies)

    def work() -> None:
        for block in (16, 32, 64):
            copy(kernel, block)

    compile_in_threads(work)
    assert not together.broken


def test_a_kernel_that_was_launched_before_is_not_launched_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = triton.JITFunction(copies)
    launched: list[object] = []
    kept = SimpleNamespace(
        run=lambda *arguments: launched.append(arguments), function=0, packed_metadata=()
    )
    with monkeypatch.context() as patch:
        patch.setattr(triton.JITFunction, "run", lambda *arguments, **options: kept)
        copy(kernel, 16)
    copy(kernel, 16)
    assert len(launched) == 1
    compile_in_threads(partial(discard, kernel, 16))
    assert len(launched) == 1
    copy(kernel, 16)
    assert len(launched) == 2


@pytest.mark.parametrize("is_compiler", [True, False], ids=["compiler", "work"])
def test_after_an_error_kernels_are_launched_again(
    is_compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the compiler, or of the work itself, is raised."""

    def fails(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no such instruction")

    kernel = triton.JITFunction(copies)
    monkeypatch.setattr("triton.compiler.compile", fails)
    work = partial(discard, kernel, 16) if is_compiler else fails
    with pytest.raises(RuntimeError, match="no such instruction"):
        compile_ahead(torch.device("cuda"), work)
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(
        triton.JITFunction, "run", lambda *arguments, **options: launched.append(options)
    )
    monkeypatch.setattr(launch_module, "_keep", lambda *arguments: None)
    copy(kernel, 32)
    assert [options["warmup"] for options in launched] == [False]
    compile_ahead(torch.device("cuda"), partial(discard, kernel, 64))
    assert [options["warmup"] for options in launched] == [False, True]


def test_tensors_that_torch_leaves_unwritten_are_zeros() -> None:
    like = torch.ones(2, 3)

    def make() -> list[torch.Tensor]:
        made = [torch.empty(2, 3), torch.empty_like(like), like.new_empty(2, 3)]
        made += [torch.empty_strided((2, 3), (3, 1)), like.new_empty_strided((2, 3), (3, 1))]
        return made

    made: list[torch.Tensor] = []
    used = [torch.full((2, 3), 7.0) for _ in range(64)]
    del used  # torch would give their memory to the next
    compile_in_threads(lambda: made.extend(make()))
    assert all(not tensor.any() for tensor in made) and len(made) == 5
    assert like.all(), "a tensor that was there is left as it is"


def test_on_a_cpu_nothing_is_done() -> None:
    compile_ahead(torch.device("cpu"), lambda: pytest.fail("nothing is compiled for a CPU"))
