"""A Hopper that is not here: Triton compiles for it and cannot launch."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


def use_absent_hopper(monkeypatch: pytest.MonkeyPatch, cache: Path) -> list[str]:
    """From now on Triton compiles for it, with `cache` as its cache, which is empty. Returns a list
    that gets the names of the kernels whose launchers are built."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    launchers: list[str] = []
    absent = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=lambda source, metadata: launchers.append(source.name),
    )
    monkeypatch.setattr(driver, "_active", absent)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", None)
    return launchers
