"""Makes a Formats value from a model's configuration and the headers of its files.

Headers show how a module is stored, and the configuration must say the same. Where they differ, the
error names both. Without headers (load_format "dummy") the configuration's rules alone count.
models/config.py calls it.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pdserve.models.checkpoint import TensorEntry
from pdserve.models.formats.awq import read_awq
from pdserve.models.formats.compressed_tensors import read_compressed_tensors
from pdserve.models.formats.config_keys import USE_16_BITS, Keys, find_keys
from pdserve.models.formats.formats import Formats, formats_of_modules
from pdserve.models.formats.fp8 import read_fp8
from pdserve.models.formats.gptq import read_gptq
from pdserve.models.formats.headers import (
    AGAIN,
    TRACES,
    Tensors,
    by_module,
    check_tensors,
    is_matrix,
    is_quantised,
)
from pdserve.models.formats.method import Method
from pdserve.models.formats.rules import apply_rules, is_always_dense
from pdserve.models.formats.source_format import DENSE, SourceFormat

# quant_method -> the function that reads its configuration
METHODS: dict[str, Callable[[Keys], Method]] = {
    "fp8": read_fp8,
    "fbgemm_fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "awq": read_awq,
    "gptq": read_gptq,
}


MXFP4_CURE = (
    "load the model with transformers' Mxfp4Config(dequantize=True), save it with save_pretrained, "
    "and serve that folder, which has the same numbers in bfloat16"
)


def read_formats(
    folder: Path,
    config: Mapping[str, Any],
    entries: Iterable[TensorEntry] | None,
    skipped: tuple[str, ...] = (),
) -> Formats | None:
    """Returns how the modules of the model in `folder`, with this config.json and these tensors,
    are stored; None if the model is not quantised.

    entries: None if there are no weights.
    skipped: prefixes of tensors that nobody loads.
    Raises ValueError if the model is quantised in a way that is not supported, or if its files
    contradict each other. The error names the file, the key or tensor, and the cure.
    """
    places = find_keys(folder, config)
    if not places:
        _refuse_traces(folder, entries or ())
        return None
    methods = [_read(keys) for keys in places]
    method = methods[0]
    for other in methods[1:]:
        _compare(method, other)
    if entries is None:
        return Formats(place=method.keys.place, rules=method.rules)
    modules = by_module(entries, skipped)
    found = {
        module: _find(method, module, tensors)
        for module, tensors in modules.items()
        if is_quantised(tensors) or is_matrix(tensors)
    }
    if all(format == DENSE for format in found.values()):
        raise ValueError(
            f"{method.keys.file}: {method.keys.path or 'the file'} says that the model is "
            f"quantised, but no tensor of {folder} is: remove that, or {AGAIN}"
        )
    return formats_of_modules(method.keys.place, found)


def _read(keys: Keys) -> Method:
    name = keys.values.get("quant_method")
    if name not in METHODS:
        known = ", ".join(METHODS)
        if name == "mxfp4":
            raise keys.refuse("quant_method", f"is not supported (supported: {known})", MXFP4_CURE)
        raise keys.refuse("quant_method", f"is not supported (supported: {known})")
    return METHODS[name](keys)


def _compare(method: Method, other: Method) -> None:
    """Checks that two files agree on how the model is quantised, if not on exceptions."""
    one, two = ({rule.format for rule in m.rules if rule.format != DENSE} for m in (method, other))
    if one != two:
        first, second = (" and ".join(sorted(map(str, formats))) for formats in (one, two))
        raise ValueError(
            f"{method.keys.file}: {method.keys.path} says that the model is stored as {first}, but "
            f"{other.keys.file} says {second}: remove the one that does not belong to this "
            "checkpoint"
        )


def _find(method: Method, module: str, tensors: Tensors) -> SourceFormat:
    """Returns the module's format by its tensors. Raises ValueError if the configuration says
    another."""
    first = next(iter(tensors.values()))
    place = f"{method.keys.file}: {method.keys.path or 'the file'}"
    said = apply_rules(method.rules, module)
    if not is_quantised(tensors):
        if said != DENSE and method.is_complete:
            raise ValueError(
                f"{first.file}: tensor {module}.weight is {tensors['weight'].dtype}, but {place} "
                f"says that {module} is stored as {said}: list {module} among the modules that are "
                f"not converted, or {AGAIN}"
            )
        return DENSE
    trace = tensors[min(TRACES & tensors.keys(), default="weight")]
    if is_always_dense(module):
        raise ValueError(
            f"{trace.file}: tensor {trace.name} ({trace.dtype}) shows that {module} is quantised, "
            f"which is not supported: quantise the model again without it, or {USE_16_BITS}"
        )
    if said == DENSE:
        raise ValueError(
            f"{trace.file}: tensor {trace.name} ({trace.dtype}) shows that {module} is quantised, "
            f"but {place} says that it is not: correct that, or {AGAIN}"
        )
    format = method.resolve(said, tensors)
    check_tensors(module, tensors, format, place)
    return format


def _refuse_traces(folder: Path, entries: Iterable[TensorEntry]) -> None:
    """Raises ValueError if a model whose configuration has no quantisation has tensors of a
    quantised one."""
    for entry in entries:
        if entry.name.rpartition(".")[2] in TRACES:
            raise ValueError(
                f"{entry.file}: tensor {entry.name} ({entry.dtype}) belongs to a quantised model, "
                f"but {folder / 'config.json'} has no quantization_config: restore it from the "
                "model's source"
            )
