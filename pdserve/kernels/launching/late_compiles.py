"""Counts kernels that Triton compiles, or loads from its cache, after the engine reported that it
is warm.

Each of them costs the request that meets it tens of milliseconds to seconds, so there should be
none. Every one is counted, and logged once with its name. The counter uses Triton's post-compile
hook; a process has only one. The engine watches on CUDA.
"""

import logging
from typing import Any

logger = logging.getLogger(__name__)


class LateCompiles:
    """A counter that counts from `watch` on."""

    def __init__(self) -> None:
        self.count = 0

    def watch(self) -> None:
        import triton  # missing on machines without a GPU's software

        triton.knobs.runtime.jit_post_compile_hook = self._compiled

    def _compiled(self, **what: Any) -> None:
        self.count += 1
        logger.warning(
            "a kernel was compiled while serving: %s", what.get("repr", "of an unknown name")
        )
