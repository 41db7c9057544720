"""Counts kernels that Triton compiles, or loads from its cache, after the engine said that it is
warm.

Each costs the request that meets it tens of milliseconds to seconds, so there should be none: every
one is logged with its name, once, and counted. Uses Triton's post-compile hook, of which a process
has one. Called by the engine on CUDA.
"""

import logging
from typing import Any

logger = logging.getLogger(__name__)


class LateCompiles:
    """Counts from its creation on."""

    def __init__(self) -> None:
        import triton  # not on machines without a GPU's stack

        self.count = 0
        triton.knobs.runtime.jit_post_compile_hook = self._compiled

    def _compiled(self, **what: Any) -> None:
        self.count += 1
        logger.warning(
            "a kernel was compiled while serving: %s", what.get("repr", "of an unknown name")
        )
