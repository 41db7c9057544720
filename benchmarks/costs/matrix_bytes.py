"""How many bytes the device holds of a weight matrix, and which matrices of a model are quantised.

Follows the table of schemes in docs/design/quantisation.md, and counts scales and zero points too.
Knows shapes and formats only, and needs no torch. Used by `benchmarks.engine.step_floor` and
`step_profile`.
"""

from collections.abc import Mapping

from pdserve.models.config import ModelSpec
from pdserve.models.formats.source_format import BLOCK, DENSE, Kind, SourceFormat

SCALE_BYTES = 4  # float32
ZEROS_BYTES = 4  # of a row's zero points for 128 columns, whatever the group is
WORDS = 128  # columns of int4 that are packed together
FEW_ROWS = 64  # up to so many are not rounded for a product with int4 (int4/products.py)

# Modules of a layer by the part of a step that multiplies with them. Families have other names.
MODULES = {
    "qkv": ("self_attn.q_proj", "self_attn.qkv_proj", "self_attn.q_a_proj"),
    "o": ("self_attn.o_proj",),
    "gate-up": ("mlp.gate_proj", "mlp.gate_up_proj", "mlp.shared_expert.gate_proj"),
    "down": ("mlp.down_proj", "mlp.shared_expert.down_proj"),
    "experts": ("mlp.experts.0.gate_proj", "block_sparse_moe.experts.0.w1"),
}
ONLINE: dict[str, SourceFormat] = {"fp8": SourceFormat(kind="fp8")}


def matrix_bytes(format: SourceFormat, num_in: int, num_out: int, itemsize: int) -> float:
    """Returns the bytes of a matrix `[num_out, num_in]`.

    `itemsize` is the bytes of a number that is not quantised.
    """
    numbers = num_in * num_out
    if format.kind == "dense":
        return numbers * itemsize
    if format.kind == "fp8":
        return numbers + num_out * SCALE_BYTES
    if format.kind == "fp8_block":
        return numbers + -(-num_out // BLOCK) * -(-num_in // BLOCK) * SCALE_BYTES
    words = -(-num_in // WORDS)
    scales = num_in // format.group[1] if format.group[1] else 1
    scales += format.kind == "int4_fp8"  # one for the row
    return num_out * (words * WORDS / 2 + scales * SCALE_BYTES + words * ZEROS_BYTES)


def formats_of(spec: ModelSpec) -> dict[str, SourceFormat]:
    """Returns the formats of the quantised parts, each as in the first layer where it is quantised.

    Layers of one model are nearly always alike.
    """
    if spec.online_quantization is not None:
        return dict.fromkeys(MODULES, ONLINE[spec.online_quantization])
    found: dict[str, SourceFormat] = {}
    for part, modules in MODULES.items() if spec.formats is not None else ():
        for layer in range(spec.num_layers):
            formats = (_format(spec, layer, module) for module in modules)
            quantised = next((format for format in formats if format.kind != "dense"), None)
            if quantised is not None:
                found[part] = quantised
                break
    return found


def _format(spec: ModelSpec, layer: int, module: str) -> SourceFormat:
    assert spec.formats is not None
    return spec.formats.of(f"model.layers.{layer}.{module}")


def format_of(formats: Mapping[str, SourceFormat], part: str) -> SourceFormat:
    return formats.get(part, DENSE)


def is_rounded(kind: Kind, num_rows: float) -> bool:
    """True if so many rows are rounded to 8 bits for a product with such weights."""
    return kind in ("fp8", "fp8_block") or (kind == "int4_fp8" and num_rows > FEW_ROWS)
