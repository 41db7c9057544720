"""Reads from the headers of a checkpoint's files how each module is stored, and checks whether the
configuration says the same.

It knows the tensors of every way of storing a matrix (`tensor_layouts`), and no configuration:
errors name the place that the caller gives.
"""

from collections.abc import Callable, Iterable, Mapping
from math import prod

from pdserve.models.checkpoint import TensorEntry
from pdserve.models.formats.awq import stored_awq
from pdserve.models.formats.compressed_tensors import stored_compressed
from pdserve.models.formats.fp8 import stored_fp8
from pdserve.models.formats.gptq import stored_gptq
from pdserve.models.formats.source_format import (
    INT4_KINDS,
    PER_WORD,
    Packing,
    SourceFormat,
    TensorLayout,
)
from pdserve.models.kv_scales import scaled_planes

Tensors = Mapping[str, TensorEntry]
"""A module's tensors, by their names after the module's."""

AGAIN = "download the file again, or quantise the model again"
UNQUANTISED_DTYPES = ("F64", "F32", "F16", "BF16")
BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
}
# Tensors that only quantised matrices have, including those of methods that are not supported.
TRACES = frozenset(
    (
        *("qweight", "qzeros", "g_idx"),
        *("weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"),
        *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"),
        *("input_scale", "SCB", "absmax", "quant_map"),
    )
)

LAYOUTS: dict[Packing, Callable[[SourceFormat, int, int], dict[str, TensorLayout]]] = {
    "plain": stored_fp8,
    "awq": stored_awq,
    "gptq": stored_gptq,
    "gptq_v2": stored_gptq,
    "compressed": stored_compressed,
}
# The tensor that shows a matrix's size; how many rows and columns one of its numbers covers;
# whether columns are its first dimension.
MAIN: dict[Packing, tuple[str, int, int, bool]] = {
    "plain": ("weight", 1, 1, False),
    "awq": ("qweight", PER_WORD, 1, True),
    "gptq": ("qweight", 1, PER_WORD, True),
    "gptq_v2": ("qweight", 1, PER_WORD, True),
    "compressed": ("weight_packed", 1, PER_WORD, False),
}


def is_kv_scale(name: str) -> bool:
    """True if a tensor of this name scales the KV cache or attention, and not a matrix."""
    return scaled_planes(name) is not None


def by_module(entries: Iterable[TensorEntry], skipped: tuple[str, ...]) -> Mapping[str, Tensors]:
    """Groups tensors by module, without those below the prefixes `skipped` and the scales of the KV
    cache. Raises ValueError if a name occurs twice, or if a tensor's bytes do not fit its shape."""
    modules: dict[str, dict[str, TensorEntry]] = {}
    for entry in entries:
        if entry.name.startswith(skipped) or is_kv_scale(entry.name):
            continue
        module, _, name = entry.name.rpartition(".")
        tensors = modules.setdefault(module, {})
        if name in tensors:
            raise ValueError(
                f"tensor {entry.name} is in {tensors[name].file} and again in {entry.file}: remove "
                "the file that does not belong to this checkpoint"
            )
        bits = BITS.get(entry.dtype)
        num_bytes = entry.end - entry.start
        if bits is not None and num_bytes * 8 != prod(entry.shape) * bits:
            raise ValueError(
                f"{entry.file}: tensor {entry.name} has {num_bytes} bytes, which is not "
                f"{list(entry.shape)} of {entry.dtype}: download the file again"
            )
        tensors[name] = entry
    return modules


def is_quantised(tensors: Tensors) -> bool:
    """True if the module has tensors that no 16-bit module has."""
    weight = tensors.get("weight")
    return not TRACES.isdisjoint(tensors) or (
        weight is not None and weight.dtype not in UNQUANTISED_DTYPES
    )


def is_matrix(tensors: Tensors) -> bool:
    """True if a module in 16 bits could be quantised."""
    return "weight" in tensors and len(tensors["weight"].shape) == 2


def tensor_layouts(format: SourceFormat, rows: int, columns: int) -> dict[str, TensorLayout]:
    """Returns the tensors of a matrix [rows, columns] in this format, by their names after the
    module's."""
    if format.kind == "dense":
        return {"weight": TensorLayout(((rows, columns),), UNQUANTISED_DTYPES)}
    return LAYOUTS[format.packing](format, rows, columns)


def check_tensors(module: str, tensors: Tensors, format: SourceFormat, place: str) -> None:
    """Raises ValueError unless these are the tensors of a matrix in this format. The configuration
    at `place` says that the module has this format."""
    file = next(iter(tensors.values())).file
    said = f"{place} says that {module} is stored as {format}"
    for name in format.tensors:
        if name not in tensors:
            raise ValueError(
                f"{file}: tensor {module}.{name} is missing among {', '.join(sorted(tensors))}; "
                f"{said}: correct that, or {AGAIN}"
            )
    rows, columns = _size(module, tensors, format, said)
    stored = tensor_layouts(format, rows, columns)
    for name, entry in tensors.items():
        if name == "bias":
            continue
        if name not in stored:
            raise ValueError(
                f"{entry.file}: tensor {entry.name} does not belong to this format; {said}: "
                f"correct that, or {AGAIN}"
            )
        _check_one(entry, stored[name], f"{said}: correct that, or {AGAIN}")


def _check_one(entry: TensorEntry, stored: TensorLayout, said: str) -> None:
    if entry.dtype not in stored.dtypes:
        raise ValueError(
            f"{entry.file}: tensor {entry.name} is {entry.dtype}, not "
            f"{' or '.join(stored.dtypes)}; {said}"
        )
    if entry.shape not in stored.shapes:
        shapes = " or ".join(str(list(shape)) for shape in stored.shapes)
        raise ValueError(
            f"{entry.file}: tensor {entry.name} has shape {list(entry.shape)}, not {shapes}; {said}"
        )


def _size(module: str, tensors: Tensors, format: SourceFormat, said: str) -> tuple[int, int]:
    """Returns rows and columns of the matrix, which groups and words of the format must divide."""
    name, row_step, column_step, is_turned = MAIN[format.packing]
    entry = tensors[name]
    if len(entry.shape) != 2 or not all(entry.shape):
        raise ValueError(
            f"{entry.file}: tensor {entry.name} has shape {list(entry.shape)}, which is not a "
            f"matrix; {said}: {AGAIN}"
        )
    first, second = entry.shape[::-1] if is_turned else entry.shape
    rows, columns = first * row_step, second * column_step
    if format.kind not in INT4_KINDS:
        return rows, columns
    if columns % (format.group[1] or columns):
        raise ValueError(
            f"{entry.file}: tensor {entry.name} has {columns} inputs, which are not whole groups "
            f"of {format.group[1]}; {said}: quantise the model again with groups that divide them"
        )
    if rows % PER_WORD and format.packing != "compressed":
        raise ValueError(
            f"{entry.file}: tensor {entry.name} has {rows} outputs, which is not a multiple of "
            f"{PER_WORD}; {said}: leave {module} in 16 bits"
        )
    return rows, columns
