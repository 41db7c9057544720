"""The format awq: int4 as AutoAWQ's GEMM version stores it.

Tensors of a matrix [out, in] with groups of g inputs:

- `qweight`: int32 [in, out/8].
- `qzeros`: int32 [in/g, out/8].
- `scales`: [in/g, out].

A word holds eight outputs, from the lowest four bits in the order 0, 2, 4, 6, 1, 3, 5, 7. The
weight is w = (q - z) * scale.
"""

from pdserve.models.formats.config_keys import Keys
from pdserve.models.formats.method import Method, group_of
from pdserve.models.formats.rules import Rule, listed
from pdserve.models.formats.source_format import PER_WORD, SourceFormat, TensorLayout


def read_awq(keys: Keys) -> Method:
    """Reads the configuration. A name in modules_to_not_convert counts wherever it is a part of a
    module's name, as in AutoAWQ."""
    bits, size = keys.key_of("bits", "w_bit"), keys.key_of("group_size", "q_group_size")
    if keys.integer(bits) != 4:
        raise keys.refuse(bits, "is not supported, only 4 is")
    if keys.word("version", "gemm").lower() != "gemm":
        raise keys.refuse("version", 'is not supported, only "gemm" is')
    keys.only("backend", ("autoawq", "auto"), "autoawq")
    if not keys.boolean("zero_point", True):
        raise keys.refuse("zero_point", "is not supported, only true is")
    format = SourceFormat(
        kind="int4",
        packing="awq",
        group=group_of(keys, size),
        has_zeros=True,
        tensors=("qweight", "qzeros", "scales"),
    )
    ignored = listed(keys, "modules_to_not_convert", "part")
    return Method(keys, (*ignored, Rule(how="all", format=format)), is_complete=False)


def stored_awq(format: SourceFormat, rows: int, columns: int) -> dict[str, TensorLayout]:
    groups = columns // (format.group[1] or columns)
    return {
        "qweight": TensorLayout(((columns, rows // PER_WORD),), ("I32",)),
        "qzeros": TensorLayout(((groups, rows // PER_WORD),), ("I32",)),
        "scales": TensorLayout(((groups, rows),), ("F16", "BF16", "F32")),
    }
