"""The format fp8: quant_method "fp8" (AutoFP8, DeepSeek, Qwen3) and "fbgemm_fp8".

Tensors of a matrix [out, in]:

- `weight`: e4m3 [out, in].
- `weight_scale`: one for the tensor ([] or [1]) or one per row ([out, 1]).
- `weight_scale_inv`: [out/128, in/128], both rounded up, instead of `weight_scale`. Despite its
  name, weights are multiplied by it, as by the others.
- `input_scale`: only with static activations.

Activations are scaled per row here, so a static scale is checked and not used. FBGEMM's upper bound
of scales is not applied either.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.models.checkpoint import TensorEntry
from pdserve.models.formats.config_keys import Keys
from pdserve.models.formats.method import Method
from pdserve.models.formats.rules import Rule, listed
from pdserve.models.formats.source_format import (
    BLOCK,
    SCALE_DTYPES,
    SourceFormat,
    TensorLayout,
)

PER_TENSOR = SourceFormat(kind="fp8", group=(0, 0), tensors=("weight", "weight_scale"))
PER_ROW = SourceFormat(kind="fp8", group=(1, 0), tensors=("weight", "weight_scale"))
IGNORED = ("ignored_layers", "modules_to_not_convert")


@dataclass(frozen=True)
class Fp8(Method):
    def resolve(self, said: SourceFormat, tensors: Mapping[str, TensorEntry]) -> SourceFormat:
        """Finds in the headers whether scales are per tensor or per row, which the configuration
        does not say."""
        scale, weight = tensors.get("weight_scale"), tensors.get("weight")
        if scale is not None and weight is not None and said.kind == "fp8":
            is_per_row = scale.shape in per_row_shapes(weight.shape[0] if weight.shape else 0)
            said = said.model_copy(update={"group": (1, 0) if is_per_row else (0, 0)})
        return super().resolve(said, tensors)


def read_fp8(keys: Keys) -> Method:
    keys.only("fmt", ("e4m3",), "e4m3")
    keys.only("scale_fmt", ("ue8m0", "float"), "float")
    if keys.boolean("dequantize", False):
        raise keys.refuse("dequantize", "is not supported", "set it to false")
    format = PER_TENSOR
    if keys.values.get("quant_method") == "fbgemm_fp8":
        format = PER_ROW
    elif keys.has("weight_block_size"):
        keys.only("weight_block_size", ([BLOCK, BLOCK],), None)
        format = SourceFormat(
            kind="fp8_block", group=(BLOCK, BLOCK), tensors=("weight", "weight_scale_inv")
        )
    if keys.only("activation_scheme", ("dynamic", "static"), "dynamic") == "static":
        format = with_input_scale(format)
    ignored = [rule for key in IGNORED for rule in listed(keys, key, "components")]
    return Fp8(keys, (*ignored, Rule(how="all", format=format)), is_complete=True)


def with_input_scale(format: SourceFormat) -> SourceFormat:
    return format.model_copy(update={"tensors": (*format.tensors, "input_scale")})


def per_row_shapes(rows: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of scales per row. With one row there are none, because a scale per tensor
    is the same."""
    return ((rows, 1), (rows,)) if rows > 1 else ()


def stored_fp8(format: SourceFormat, rows: int, columns: int) -> dict[str, TensorLayout]:
    """Returns the tensors of a matrix [rows, columns], by their names after the module's."""
    one: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))
    shapes = one
    dtypes: tuple[str, ...] = SCALE_DTYPES
    if format.kind == "fp8_block":
        shapes = ((-(-rows // format.group[0]), -(-columns // format.group[1])),)
        dtypes = (*SCALE_DTYPES, "F8_E8M0")
    elif format.group[0]:
        shapes = ((rows, 1), (rows,))
    known = {
        "weight": TensorLayout(((rows, columns),), ("F8_E4M3",)),
        "weight_scale": TensorLayout(shapes, dtypes),
        "weight_scale_inv": TensorLayout(shapes, dtypes),
        "input_scale": TensorLayout(one, SCALE_DTYPES),
    }
    return {name: known[name] for name in (*format.tensors, *format.optional)}
