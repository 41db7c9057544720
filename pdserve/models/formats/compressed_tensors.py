"""The format compressed-tensors, as llm-compressor writes it: fp8 ("float-quantized") and int4
("pack-quantized"). Each group of modules may be stored in its own way.

fp8, for a matrix [out, in]:

- `weight`: e4m3.
- `weight_scale`: [1], [out, 1] or one scale per block.
- `input_scale`: only with static activations.

int4, with activations in 16 bits or in fp8, where w = (q - z) * scale, so the 8s below cancel:

- `weight_packed`: int32 [out, in/8]. A word holds eight inputs, the first in the lowest four bits,
  each as q + 8.
- `weight_scale`: [out, in/g].
- `weight_shape`: [2].
- `weight_zero_point`: int32 [out/8, in/g], only without symmetry. A word holds eight outputs, each
  as z + 8.
"""

from pdserve.models.formats.config_keys import Keys
from pdserve.models.formats.fp8 import with_input_scale
from pdserve.models.formats.method import Method, group_of
from pdserve.models.formats.rules import Rule, listed
from pdserve.models.formats.source_format import (
    BLOCK,
    PER_WORD,
    SCALE_DTYPES,
    SourceFormat,
    TensorLayout,
)

FP8_FORMATS = ("float-quantized", "naive-quantized")
INT4_FORMATS = ("pack-quantized",)
MIXED = "mixed-precision"  # each group names its own format
LINEAR = "Linear"


def read_compressed_tensors(keys: Keys) -> Method:
    """Reads the configuration. Over all groups, names and expressions take precedence over the
    class "Linear". Other classes have no matrices here."""
    keys.only("quantization_status", ("compressed",), "compressed")
    top = str(keys.only("format", (*FP8_FORMATS, *INT4_FORMATS, MIXED), MIXED))
    sparsity = keys.below("sparsity_config")
    if sparsity is not None and sparsity.values:
        sparsity.only("format", ("dense",), "dense")
    if keys.values.get("transform_config"):
        raise keys.refuse("transform_config", "is not supported")
    _check_kv_cache(keys)
    groups = keys.below("config_groups")
    if groups is None or not groups.values:
        raise keys.refuse("config_groups", "is missing", "restore the file from the model's source")
    named: list[Rule] = []
    classes: list[Rule] = []
    for name in groups.values:
        group = groups.below(name)
        assert group is not None or groups.values[name] is None
        if group is None:
            raise groups.refuse(name, "is empty", "restore the file from the model's source")
        format = _format(group, top)
        for target in listed(group, "targets", "name", format):
            if target.how == "name" and target.text == LINEAR:
                classes.append(Rule(how="all", format=format))
            else:
                named.append(target)
    ignored = listed(keys, "ignore", "name")
    return Method(keys, (*ignored, *named, *classes), is_complete=True)


def _check_kv_cache(keys: Keys) -> None:
    """Checks kv_cache_scheme. The engine chooses the KV cache's dtype itself; fp8 scales have known
    names, other scales do not."""
    scheme = keys.below("kv_cache_scheme")
    if scheme is not None:
        scheme.only("type", ("float",), "float")
        scheme.only("num_bits", (8,), 8)


def _format(group: Keys, top: str) -> SourceFormat:
    form = str(group.only("format", (*FP8_FORMATS, *INT4_FORMATS), None if top == MIXED else top))
    if top != MIXED and form != top:
        raise group.refuse("format", f"is not the format of the whole, {top!r}", "correct the file")
    weights = group.below("weights")
    if weights is None:
        raise group.refuse("weights", "is missing: quantised activations alone are not supported")
    if group.values.get("output_activations"):
        raise group.refuse("output_activations", "is not supported")
    if weights.boolean("dynamic", False):
        raise weights.refuse("dynamic", "is not supported for weights")
    return _fp8(group, weights) if form in FP8_FORMATS else _int4(group, weights)


def _fp8(group: Keys, weights: Keys) -> SourceFormat:
    weights.only("type", ("float",), "int")
    weights.only("num_bits", (8,), None)
    if not weights.boolean("symmetric", True):
        raise weights.refuse("symmetric", "is not supported for fp8, only true is")
    strategy = weights.only("strategy", ("tensor", "channel", "block"), None)
    names = ("weight", "weight_scale")
    if strategy == "block":
        weights.only("block_structure", ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"), None)
        format = SourceFormat(kind="fp8_block", group=(BLOCK, BLOCK), tensors=names)
    else:
        rows = 1 if strategy == "channel" else 0
        format = SourceFormat(kind="fp8", group=(rows, 0), tensors=names)
    activations = group.below("input_activations")
    if activations is None:
        raise group.refuse(
            "input_activations", "is missing: fp8 weights with 16-bit activations are not supported"
        )
    _check_activations(activations)
    is_dynamic = activations.only("dynamic", (True, False), False)
    return format if is_dynamic else with_input_scale(format)


def _check_activations(activations: Keys) -> None:
    activations.only("type", ("float",), "int")
    activations.only("num_bits", (8,), None)
    if not activations.boolean("symmetric", True):
        raise activations.refuse("symmetric", "is not supported, only true is")


def _int4(group: Keys, weights: Keys) -> SourceFormat:
    activations = group.below("input_activations")
    if activations is not None:
        _check_activations(activations)
        activations.only("dynamic", (True,), False)
    weights.only("type", ("int",), "int")
    weights.only("num_bits", (4,), None)
    if weights.values.get("actorder") not in (None, False, "weight", "static"):
        raise weights.refuse(
            "actorder",
            "is not supported: columns of a group are not neighbours",
            "quantise the model again with actorder 'weight'",
        )
    strategy = weights.only("strategy", ("group", "channel"), None)
    is_symmetric = weights.boolean("symmetric", True)
    names = ("weight_packed", "weight_scale", "weight_shape")
    return SourceFormat(
        kind="int4" if activations is None else "int4_fp8",
        packing="compressed",
        group=group_of(weights, "group_size") if strategy == "group" else (1, 0),
        has_zeros=not is_symmetric,
        tensors=names if is_symmetric else (*names, "weight_zero_point"),
    )


def stored_compressed(format: SourceFormat, rows: int, columns: int) -> dict[str, TensorLayout]:
    groups = columns // (format.group[1] or columns)
    known = {
        "weight_packed": TensorLayout(((rows, columns // PER_WORD),), ("I32",)),
        "weight_scale": TensorLayout(((rows, groups),), SCALE_DTYPES),
        "weight_shape": TensorLayout(((2,),), ("I64", "I32")),
        "weight_zero_point": TensorLayout(((-(-rows // PER_WORD), groups),), ("I32",)),
    }
    return {name: known[name] for name in (*format.tensors, *format.optional)}
