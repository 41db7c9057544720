"""Kernel tests: on a machine without CUDA the Triton kernels run in Triton's interpreter, which
must be chosen before triton is first imported. Fresh memory is poisoned, so that an output row
which a kernel forgets to write is NaN.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        raise RuntimeError(
            "triton was imported before tests/kernels chose the interpreter: set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"

from kernels.interpreter import undo_patches_of_helpers

undo_patches_of_helpers()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Makes torch.empty give NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def fresh_random_inputs() -> None:
    print(f"seed {torch.seed()}")
