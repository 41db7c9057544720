"""The format gptq: int4 as AutoGPTQ and GPTQModel store it.

Tensors of a matrix [out, in] with groups of g inputs:

- `qweight`: int32 [in/8, out]. A word holds eight inputs, the first in the lowest four bits.
- `qzeros`: int32 [in/g, out/8]. A word holds eight outputs in order.
- `scales`: [in/g, out].
- `g_idx`: int32 [in], the group of each input, which must be input // g.

The weight is w = (q - z) * scale. The format "gptq_v2" stores z. The older "gptq" stores z - 1,
subtracted from whole words (word - 0x11111111, GPTQModel). So a reader must add to whole words,
modulo 2**32. Adding to each four bits alone gives the same for zeros of 1 to 15. Only for a zero of
0 it reads 16, and the next zero is one too small. (AutoGPTQ lost the neighbours when it wrote a
zero of 0; nothing restores those.)
"""

from pdserve.models.formats.config_keys import Keys
from pdserve.models.formats.method import Method, group_of
from pdserve.models.formats.rules import Rule
from pdserve.models.formats.source_format import (
    DENSE,
    PER_WORD,
    Packing,
    SourceFormat,
    TensorLayout,
)

ORDERED = "quantise the model again with desc_act=False, or use its AWQ checkpoint"


def read_gptq(keys: Keys) -> Method:
    """Reads the configuration. Under `dynamic`, expressions with "-:" exclude modules; those with
    "+:" or no prefix change group sizes. modules_in_block_to_quantize lists the ends of all names
    that are quantised."""
    form = keys.key_of("checkpoint_format", "format")
    packing: Packing = "gptq"
    if keys.only(form, ("gptq", "gptq_v2"), "gptq") == "gptq_v2":
        packing = "gptq_v2"
    keys.only("pack_dtype", ("int32", "torch.int32"), "int32")
    if keys.boolean("is_marlin_format", False):
        raise keys.refuse("is_marlin_format", "is not supported")
    if keys.boolean("lm_head", False):
        raise keys.refuse("lm_head", "is not supported: lm_head stays in 16 bits")
    for key in ("rotation", "adapter"):
        if keys.values.get(key):
            raise keys.refuse(key, "is not supported")
    format = _format(keys, packing)
    rules = [*_dynamic(keys, packing), *_in_blocks(keys, format)]
    if not keys.has("modules_in_block_to_quantize"):
        rules.append(Rule(how="all", format=format))
    return Method(keys, tuple(rules), is_complete=False)


def _format(keys: Keys, packing: Packing) -> SourceFormat:
    if keys.integer("bits") != 4:
        raise keys.refuse("bits", "is not supported, only 4 is")
    group = group_of(keys, "group_size")
    if keys.boolean("desc_act", False) and group[1]:
        raise keys.refuse("desc_act", "is not supported with groups", ORDERED)
    return SourceFormat(
        kind="int4",
        packing=packing,
        group=group,
        has_zeros=True,
        tensors=("qweight", "qzeros", "scales"),
        optional=("g_idx",),
    )


def _dynamic(keys: Keys, packing: Packing) -> list[Rule]:
    given = keys.below("dynamic")
    rules = []
    for text in () if given is None else given.values:
        assert given is not None
        pattern = given.pattern(text, text.removeprefix("-:").removeprefix("+:"))
        if text.startswith("-:"):
            rules.append(Rule(how="match", text=pattern, format=DENSE))
            continue
        changed = given.below(text)
        values = {} if changed is None else changed.values
        merged = Keys(keys.file, f"{given.path}[{text!r}]", {**keys.values, **values})
        rules.append(Rule(how="match", text=pattern, format=_format(merged, packing)))
    return rules


def _in_blocks(keys: Keys, format: SourceFormat) -> list[Rule]:
    key = "modules_in_block_to_quantize"
    given = keys.values.get(key) or ()
    names: list[object] = []
    for each in given if isinstance(given, list | tuple) else [None]:
        names += each if isinstance(each, list) else [each]
    rules = []
    for name in names:
        if not isinstance(name, str):
            raise keys.refuse(key, "must be lists of names", "correct the file")
        rules.append(Rule(how="components", text=name, format=format))
    return rules


def stored_gptq(format: SourceFormat, rows: int, columns: int) -> dict[str, TensorLayout]:
    groups = columns // (format.group[1] or columns)
    known = {
        "qweight": TensorLayout(((columns // PER_WORD, rows),), ("I32",)),
        "qzeros": TensorLayout(((groups, rows // PER_WORD),), ("I32",)),
        "scales": TensorLayout(((groups, rows),), ("F16", "BF16", "F32")),
        "g_idx": TensorLayout(((columns,),), ("I32",)),
    }
    return {name: known[name] for name in (*format.tensors, *format.optional)}
