"""Writes tests/models/data: a small matrix as each library stores it, to compare our writers with.

    python -m tests.support.library_files compressed-tensors|autoawq|auto-gptq FOLDER

needs that library installed (versions: tests/models/data/README.md); tests need only the files. The
library is given the matrix, and scales and zeros where it takes them, and does the rounding and the
packing by itself. There is a file for each key of WAYS that the library has; it holds `matrix`, the
library's tensors, and `dequantised`, what the library itself makes of them.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from demo.storing import WAYS, Tensors, int4

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
    """Returns the matrix with a negative number in each group."""
    changed = matrix.clone()
    changed[:, ::GROUP] = -changed[:, ::GROUP].abs()
    return changed


def compressed_tensors() -> dict[str, Tensors]:
    """Its compressors for packed int4 and for fp8, with the settings that WAYS has."""
    base: Any = __import__("compressed_tensors.compressors.base", fromlist=["x"])
    quantization: Any = __import__("compressed_tensors.quantization", fromlist=["x"])
    found = {}
    for case, way in WAYS.items():
        if not case.startswith("ct-"):
            continue
        group = way.config["config_groups"]["group_0"]
        scheme = quantization.QuantizationScheme.model_validate(group)
        compressor = base.BaseCompressor.get_value_from_registry(way.config["format"])
        matrix = example()
        state = {"weight": matrix}
        if "int4" in case:
            size = group["weights"]["group_size"] or -1
            is_symmetric = group["weights"]["symmetric"]
            _, zeros, scales = int4(matrix, size, is_symmetric)
            state |= {"weight_scale": scales, "weight_zero_point": (zeros - 8).to(torch.int8)}
        else:
            state["weight_scale"] = way.store(matrix)["weight_scale"]
        stored = compressor.compress(state, scheme)
        stored = {name: tensor for name, tensor in stored.items() if tensor is not None}
        dense = compressor.decompress(dict(stored), scheme)["weight"]
        found[case] = {**stored, "dequantised": dense}
    return found


WRITERS: dict[str, Callable[[], dict[str, Tensors]]] = {
    "autoawq": autoawq,
    "compressed-tensors": compressed_tensors,
    "auto-gptq": auto_gptq,
}

if __name__ == "__main__":
    library, folder = sys.argv[1:]
    for case, stored in WRITERS[library]().items():
        tensors = {"matrix": example().half(), **stored}
        file = Path(folder) / f"{case}.safetensors"
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, file)
        file.chmod(0o644)
