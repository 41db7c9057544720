"""LinearOps of matrices in e4m3 on a GPU: rounds activations to e4m3 and multiplies them. Few rows
are multiplied in Triton. Many rows are multiplied by cuBLAS if it takes the scales, else in Triton.
"""

import torch
from torch import Tensor

from pdserve.kernels.collective.ops import Stream, normed
from pdserve.kernels.launching.checks import num_sms
from pdserve.kernels.linear.fp8.quantise import Rounded, launch_quantise
from pdserve.kernels.linear.fp8.small_products import MAX_ROWS, launch_small_product
from pdserve.kernels.linear.fp8.tiles import launch_tiles
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.ops import Hidden, Ungated
from pdserve.kernels.norm import triton_ops as norms
from pdserve.kernels.norm.ops import Activation, Norm

UNIT = 16  # torch._scaled_mm needs matrices whose rows and columns are multiples of this
SCALE_COLUMNS = 4  # cuBLAS reads the blocks' scales as if each row had a multiple of this

linear_into = None


def linear(x: Hidden, m: Matrix) -> Tensor:
    return _product(_rounded(x, m), m, x.dtype)


def norm_linear(stream: Stream, norm: Norm, m: Matrix) -> tuple[Tensor, Tensor]:
    x, finished = _normed(stream, norm, m)
    return _product(x, m, finished.dtype), finished


def norm_gated(
    stream: Stream,
    norm: Norm,
    m: Matrix,
    activation: Activation,
    may_leave_gate: bool = False,
) -> tuple[Hidden, Tensor]:
    """Leaves the gate, if it may, to the rounding before the next product: many rows are then read
    and written once less."""
    x, finished = _normed(stream, norm, m)
    if activation == "silu" and 0 < x.num_rows <= MAX_ROWS:
        return _few(x, m, finished.dtype, silu=True), finished
    product = _product(x, m, finished.dtype)
    if may_leave_gate:
        return Ungated(product, activation), finished
    return norms.gate(product, activation), finished


def add_linear(stream: Tensor, x: Hidden, m: Matrix, post_norm: Norm | None = None) -> Tensor:
    """Adds the product to the stream in place."""
    if stream.shape != (len(x), len(m.data)) or not stream.is_contiguous():
        raise ValueError(
            f"stream must be contiguous {(len(x), len(m.data))}, not {tuple(stream.shape)}"
        )
    if post_norm is not None:
        return stream.add_(norms.rms_norm(linear(x, m), post_norm))
    if 0 < len(x) <= MAX_ROWS:
        return _few(_rounded(x, m), m, x.dtype, stream=stream)
    return stream.add_(linear(x, m))


def _rounded(x: Hidden, m: Matrix) -> Rounded:
    if isinstance(x, Ungated):
        return launch_quantise(x.product, m.group[1], activation=x.activation)
    return launch_quantise(x if x.stride(-1) == 1 else x.contiguous(), m.group[1])


def _normed(stream: Stream, norm: Norm, m: Matrix) -> tuple[Rounded, Tensor]:
    """Returns the normed stream in e4m3, and the finished stream."""
    if isinstance(stream, Tensor) and stream.stride(-1) == 1:
        return launch_quantise(stream, m.group[1], norm), stream
    x, finished = normed(stream, norm, norms)
    return _rounded(x, m), finished


def _product(x: Rounded, m: Matrix, dtype: torch.dtype) -> Tensor:
    num_rows = x.num_rows
    if num_rows == 0:
        return torch.empty((0, m.shape[0]), dtype=dtype, device=m.data.device)
    if num_rows <= MAX_ROWS:
        return _few(x, m, dtype)
    if not _is_for_cublas(m, dtype):
        return launch_tiles(x, m, dtype)
    assert m.scales is not None
    scales = x.scales
    if m.group[1]:  # scales of one group of columns must be contiguous
        scales = scales.mT.contiguous().mT
    product = torch._scaled_mm(
        x.codes,
        m.data.mT,
        scales,
        m.scales.mT,
        bias=m.bias,
        out_dtype=dtype,
        # With one scale a row: 8 % faster, and off by 0.2 to 0.4 % where e4m3 is off by 4 %.
        use_fast_accum=not m.group[1],
    )
    return product[:num_rows]


def _is_for_cublas(m: Matrix, dtype: torch.dtype) -> bool:
    """True if torch._scaled_mm takes such a matrix. Its bias must have the dtype of the result. If
    scales are for blocks, there must be no bias, and the rows must be whole blocks. The columns
    must be whole groups of SCALE_COLUMNS blocks, else the product would be wrong, without an
    error."""
    rows, columns = m.group
    return (
        m.data.is_cuda
        and (rows == columns if columns else rows == 1)
        and m.shape[0] % (columns or UNIT) == 0
        and m.shape[1] % (SCALE_COLUMNS * columns or UNIT) == 0
        and dtype != torch.float32
        and (m.bias is None or (m.bias.dtype == dtype and not columns))
        and (dtype == torch.bfloat16 or not columns)
    )


def _few(
    x: Rounded, m: Matrix, dtype: torch.dtype, silu: bool = False, stream: Tensor | None = None
) -> Tensor:
    return launch_small_product(x, m, dtype, num_sms(m.data.device), silu, stream)
