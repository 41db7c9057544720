"""Writes tests/models/data: a small matrix as each library stores it, to compare our writers with.

    python -m tests.support.library_files compressed-tensors|autoawq|auto-gptq FOLDER

needs that library installed (versions: tests/models/data/README.md); tests need only the files. The
library is given the matrix, and scales and zeros where it takes them, and does the rounding and the
packing by itself. Each file has `matrix`, the library's tensors below a name for each case, and
`dequantised`, what the library itself makes of them.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.quantised import Tensors, int4

ROWS, COLUMNS, GROUP = 32, 64, 32


def example() -> Tensor:
    """Float32 [out, in] that float16 has exactly, with rows of unlike size; two rows are nowhere
    negative, so that some zero points are 0."""
    matrix = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(7))
    matrix *= torch.linspace(0.1, 3.0, ROWS)[:, None]
    matrix[[3, 9]] = matrix[[3, 9]].abs()
    return matrix.half().float()


def autoawq() -> dict[str, Tensors]:
    """AutoAWQ's own module for GEMM."""
    gemm: Any = __import__("awq.modules.linear.gemm", fromlist=["x"])
    packing: Any = __import__("awq.utils.packing_utils", fromlist=["x"])
    matrix = example()
    _, zeros, scales = int4(matrix, GROUP, is_symmetric=False)
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = matrix
    made = gemm.WQLinear_GEMM.from_linear(
        linear, 4, GROUP, scales=scales.t().contiguous().float(), zeros=zeros.t().contiguous()
    )
    stored = {name: getattr(made, name) for name in ("qweight", "qzeros", "scales")}
    dense = packing.dequantize_gemm(*stored.values(), 4, GROUP)
    return {"awq": {**stored, "dequantised": dense.t()}}


def auto_gptq() -> dict[str, Tensors]:
    """AutoGPTQ's module without kernels; zeros of 0 are left out, which it cannot store."""
    qlinear: Any = __import__("auto_gptq.nn_modules.qlinear.qlinear_cuda_old", fromlist=["x"])
    found = {}
    for name, is_symmetric in (("gptq", True), ("gptq-zeros", False)):
        _, zeros, scales = int4(signed(example()), GROUP, is_symmetric)
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        linear.weight.data = signed(example())
        made = qlinear.QuantLinear(4, GROUP, COLUMNS, ROWS, False)
        g_idx = torch.arange(COLUMNS, dtype=torch.int32) // GROUP
        made.pack(linear, scales.float(), zeros.float(), g_idx)
        stored = {n: getattr(made, n) for n in ("qweight", "qzeros", "scales", "g_idx")}
        dense = made.half()(torch.eye(COLUMNS, dtype=torch.float16))
        found[name] = {**stored, "dequantised": dense.t()}
    return found


def signed(matrix: Tensor) -> Tensor:
    """With a negative number in each group."""
    changed = matrix.clone()
    changed[:, ::GROUP] = -changed[:, ::GROUP].abs()
    return changed


WRITERS: dict[str, Callable[[], dict[str, Tensors]]] = {
    "autoawq": autoawq,
    "auto-gptq": auto_gptq,
}

if __name__ == "__main__":
    library, folder = sys.argv[1:]
    cases = WRITERS[library]()
    tensors = {f"{case}.{name}": t for case, stored in cases.items() for name, t in stored.items()}
    tensors["matrix"] = example().half()
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, Path(folder) / f"{library}.safetensors")
