"""LinearOps of matrices of int4 on a GPU whose activations may be rounded to e4m3.

Few rows have int4's own products, which are bound by the bytes of the weights. For many rows, the
matrix is written in e4m3 to a scratch tensor that all matrices share, and multiplied as fp8 weights
are. schemes/int4_fp8.py says what is rounded.
"""

from torch import Tensor

from pdserve.kernels.collective.ops import Stream, Unsummed
from pdserve.kernels.linear.fp8 import triton_ops as fp8_ops
from pdserve.kernels.linear.int4 import products
from pdserve.kernels.linear.int4 import triton_ops as int4_ops
from pdserve.kernels.linear.int4.dense import rounded_into_scratch
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.ops import Hidden, Ungated
from pdserve.kernels.norm import triton_ops as norms
from pdserve.kernels.norm.ops import Activation, Norm

# Up to so many rows, activations keep their 16 bits. A product with int4 reads 0.56 bytes for each
# weight; one that writes the matrix in e4m3 first moves 2.56. But above 64 rows, int4's products
# take more than twice as long as their bytes.
FEW_ROWS = products.FEW_ROWS

linear_into = None


def linear(x: Hidden, m: Matrix) -> Tensor:
    if len(x) > FEW_ROWS:
        return fp8_ops.linear(x, rounded_into_scratch(m))
    return int4_ops.linear(_gated(x), m)


def norm_linear(stream: Stream, norm: Norm, m: Matrix) -> tuple[Tensor, Tensor]:
    if _num_rows(stream) > FEW_ROWS:
        return fp8_ops.norm_linear(stream, norm, rounded_into_scratch(m))
    return int4_ops.norm_linear(stream, norm, m)


def norm_gated(
    stream: Stream,
    norm: Norm,
    m: Matrix,
    activation: Activation,
    may_leave_gate: bool = False,
) -> tuple[Hidden, Tensor]:
    if _num_rows(stream) > FEW_ROWS:
        matrix = rounded_into_scratch(m)
        return fp8_ops.norm_gated(stream, norm, matrix, activation, may_leave_gate)
    return int4_ops.norm_gated(stream, norm, m, activation)


def add_linear(stream: Tensor, x: Hidden, m: Matrix, post_norm: Norm | None = None) -> Tensor:
    """Adds the product to the stream in place."""
    if len(x) > FEW_ROWS:
        return fp8_ops.add_linear(stream, x, rounded_into_scratch(m), post_norm)
    return int4_ops.add_linear(stream, _gated(x), m, post_norm)


def _num_rows(stream: Stream) -> int:
    return len(stream.stream if isinstance(stream, Unsummed) else stream)


def _gated(x: Hidden) -> Tensor:
    """Returns rows with their gate. Few rows are without it where ranks send a long product piece
    by piece, and few are left for the last piece."""
    return norms.gate(x.product, x.activation) if isinstance(x, Ungated) else x
