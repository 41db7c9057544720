"""Times products with weights in e4m3 and int4 at Llama-3.1-8B shapes on one CUDA device, beside
those with 16 bits.

    python -m benchmarks.kernels.quantised --out benchmarks/results/quantised.jsonl
    python -m benchmarks.kernels.quantised --only int4

A call is a layer's four products in a CUDA graph: qkv, o, gate and up with the gate, and down. Each
is called as the model calls it, with the norms and the rounding of activations. There are as many
layers as do not fit the L2 cache. `alone` is a product without norms and rounding. Up to 256 rows
the rate counts the bytes of the weights, and beyond that operations. Ceilings are an H200's for 16
bits (kernel_timer.py); e4m3 may do twice as many operations. This module only knows the kernels.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.support.kernel_timer import Case, add_timer_arguments, replayed, time_all
from pdserve.kernels.linear.fp8.quantise import launch_quantise
from pdserve.kernels.linear.int4.dense import rounded_into_scratch
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.ops import LinearOps
from pdserve.kernels.linear.schemes.dense import Dense
from pdserve.kernels.linear.schemes.fp8 import Fp8, Fp8Block
from pdserve.kernels.linear.schemes.int4 import Int4
from pdserve.kernels.linear.schemes.int4_fp8 import Int4Fp8
from pdserve.kernels.linear.schemes.scheme import Cut, Scheme
from pdserve.kernels.norm.ops import Norm

HIDDEN = 4096
INTERMEDIATE = 14336
QKV = 6144
DTYPE = torch.bfloat16
LAYERS = 4  # 55 MB each in int4, which is together more than the L2 cache holds
ROWS = (1, 2, 8, 16, 32, 64, 65, 128, 256, 400, 512, 1024, 2048, 8192)
MEMORY_BOUND = 256
SCHEMES: dict[str, Scheme] = {
    "dense": Dense(),
    "fp8": Fp8(),
    "fp8_block": Fp8Block(),
    "int4 of 128": Int4(128),
    "int4 of 32": Int4(32),
    "int4 of 128, activations in fp8": Int4Fp8(128),
    "int4 of 32, activations in fp8": Int4Fp8(32),
}


@dataclass(frozen=True)
class Layer:
    """The matrices of a decoder layer."""

    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.qkv, self.o, self.gate_up, self.down


def matrix_of(scheme: Scheme, num_outputs: int, num_inputs: int) -> Matrix:
    device = torch.device("cuda")
    cut = Cut(slice(0, num_outputs), num_outputs, slice(0, num_inputs), num_inputs)
    m = scheme.allocate([cut], DTYPE, device)
    dense = torch.randn(num_outputs, num_inputs, device=device, dtype=DTYPE) * num_inputs**-0.5
    scheme.take(m, 0, scheme.quantise(dense))
    return m


def layer_of(scheme: Scheme) -> Layer:
    return Layer(
        matrix_of(scheme, QKV, HIDDEN),
        matrix_of(scheme, HIDDEN, HIDDEN),
        matrix_of(scheme, 2 * INTERMEDIATE, HIDDEN),
        matrix_of(scheme, HIDDEN, INTERMEDIATE),
    )


def bytes_of(m: Matrix) -> int:
    held = (m.data, m.scales, m.zeros, m.row_scales)
    return sum(each.nbytes for each in held if each is not None)


def layer_step(ops: LinearOps, layers: list[Layer], num_rows: int) -> Callable[[], object]:
    stream = torch.randn(num_rows, HIDDEN, device="cuda", dtype=DTYPE)
    attended = torch.randn(num_rows, HIDDEN, device="cuda", dtype=DTYPE)
    norm = Norm(torch.ones(HIDDEN, device="cuda", dtype=DTYPE), 1e-5)

    def step() -> None:
        now = stream
        for layer in layers:
            ops.norm_linear(now, norm, layer.qkv)
            now = ops.add_linear(now, attended, layer.o)
            hidden, now = ops.norm_gated(now, norm, layer.gate_up, "silu", may_leave_gate=True)
            now = ops.add_linear(now, hidden, layer.down)
            now.clamp_(-4, 4)

    return replayed(step)


def layer_cases() -> Iterator[Case]:
    for name, scheme in SCHEMES.items():
        layers = [layer_of(scheme) for _ in range(LAYERS)]
        ops = scheme.ops(torch.device("cuda"))
        held = sum(bytes_of(m) for m in layers[0].matrices)
        numbers = sum(m.shape[0] * m.shape[1] for m in layers[0].matrices)
        for num_rows in ROWS:
            is_bound = num_rows <= MEMORY_BOUND
            work = held if is_bound else 2 * num_rows * numbers
            unit = "TB/s" if is_bound else "TFLOP/s"
            step = layer_step(ops, layers, num_rows)
            yield Case(f"{name}: layer of {num_rows} rows", step, work, unit, LAYERS)
        del layers


def product_cases() -> Iterator[Case]:
    """Yields cases of single products, and of the rounding before them."""
    for name, scheme in SCHEMES.items():
        ops = scheme.ops(torch.device("cuda"))
        for num_outputs, num_inputs in ((QKV, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, 14336)):
            matrices = [matrix_of(scheme, num_outputs, num_inputs) for _ in range(LAYERS)]
            held = bytes_of(matrices[0])
            if isinstance(scheme, Int4Fp8):
                label = f"alone, {name}: {num_outputs} x {num_inputs} written in e4m3"
                work = held + num_outputs * num_inputs
                yield Case(label, written(matrices), work, "TB/s", LAYERS)
            for num_rows in (1, 64, 8192):
                x = torch.randn(num_rows, num_inputs, device="cuda", dtype=DTYPE)
                work = held if num_rows <= MEMORY_BOUND else 2 * num_rows * num_outputs * num_inputs
                unit = "TB/s" if num_rows <= MEMORY_BOUND else "TFLOP/s"
                label = f"alone, {name}: {num_rows} x {num_inputs} -> {num_outputs}"
                yield Case(label, calls(ops.linear, x, matrices), work, unit, LAYERS)
                if name == "fp8" and num_rows > MEMORY_BOUND:
                    exact, fast = ops.linear(x, matrices[0]), fast_product(x, matrices[0])
                    gap = ((fast - exact).float().norm() / exact.float().norm()).item()
                    label = f"alone, fp8 with fast sums, off by {gap:.1e}: {num_outputs}"
                    yield Case(label, calls(fast_product, x, matrices), work, unit, LAYERS)
                if name == "fp8":
                    label = f"alone, rounding of {num_rows} x {num_inputs}"
                    work, unit = x.nbytes + x.numel(), "TB/s"
                    yield Case(label, calls(rounded_rows, x, matrices), work, unit, LAYERS)
            del matrices


def calls(
    product: Callable[[Tensor, Matrix], object], x: Tensor, matrices: list[Matrix]
) -> Callable[[], object]:
    def step() -> None:
        for m in matrices:
            product(x, m)

    return replayed(step)


def written(matrices: list[Matrix]) -> Callable[[], object]:
    def step() -> None:
        for m in matrices:
            rounded_into_scratch(m)

    return replayed(step)


def fast_product(x: Tensor, m: Matrix) -> Tensor:
    """Computes `fp8.triton_ops.linear` of many rows, with sums in the tensor cores' own
    precision."""
    rounded = launch_quantise(x, 0)
    assert m.scales is not None
    return torch._scaled_mm(
        rounded.codes,
        m.data.mT,
        rounded.scales,
        m.scales.mT,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )


def rounded_rows(x: Tensor, m: Matrix) -> object:
    return launch_quantise(x, m.group[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_timer_arguments(parser)
    options = parser.parse_args()
    time_all(layer_cases(), options)
    if options.sweep:
        time_all(product_cases(), options)


if __name__ == "__main__":
    main()
