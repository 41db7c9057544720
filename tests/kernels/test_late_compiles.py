"""Late compiles are counted and named: real compilations, for a Hopper that is not here."""

import logging
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from kernels.absent_hopper import use_absent_hopper
from triton.runtime.interpreter import InterpretedFunction

from pdserve.kernels.launching.late_compiles import LateCompiles

pytestmark = pytest.mark.processes  # Triton's assembler is one


def copies_one(source_ptr, target_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton compiles annotations too
    at = tl.arange(0, BLOCK)
    tl.store(target_ptr + at, tl.load(source_ptr + at))


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process's hook is as it was, afterwards."""
    use_absent_hopper(monkeypatch, tmp_path)


def watching() -> LateCompiles:
    late = LateCompiles()
    late.watch()
    return late


def compile_for(kernel: "triton.JITFunction", block: int) -> None:
    kernel.warmup(torch.float32, torch.float32, BLOCK=block, grid=(1,))


def test_a_compile_is_counted_once_and_named(caplog: pytest.LogCaptureFixture) -> None:
    kernel = triton.JITFunction(copies_one)
    compile_for(kernel, 16)
    with caplog.at_level(logging.WARNING, "pdserve.kernels.launching.late_compiles"):
        late = watching()
        compile_for(kernel, 16)
        assert late.count == 0 and not caplog.messages, (
            "what was compiled before it was ready is not late"
        )
        compile_for(kernel, 32)
        compile_for(kernel, 32)
        assert late.count == 1
        compile_for(kernel, 64)
    assert late.count == len(caplog.messages) == 2
    assert all("compiled while serving: copies_one[" in message for message in caplog.messages)


def test_what_triton_keeps_on_disk_is_late_too() -> None:
    """A new JITFunction knows nothing of the last one's kernels: it loads them from Triton's
    cache."""
    compile_for(triton.JITFunction(copies_one), 16)
    late = watching()
    compile_for(triton.JITFunction(copies_one), 16)
    assert late.count == 1


def adds_up(source_ptr, target_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton compiles annotations too
    tl.store(target_ptr, tl.sum(tl.load(source_ptr + tl.arange(0, BLOCK)), 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is interpreted")
def test_a_kernel_in_the_interpreter_spoils_no_compile() -> None:
    """The helper tl.sum makes the interpreter patch the language once more when it is called."""
    total = torch.zeros(1)
    InterpretedFunction(adds_up)[(1,)](torch.ones(16), total, BLOCK=16)
    assert total.item() == 16
    late = watching()
    compile_for(triton.JITFunction(copies_one), 16)
    assert late.count == 1
