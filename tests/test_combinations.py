"""docs/use/combinations.md is what tests/combinations.py writes, which tries every scheme and every
source of weights."""

from pathlib import Path

import pytest
from combinations import (
    CACHES,
    COLUMNS,
    FAMILIES,
    WEIGHTS,
    exceptions,
    family_rows,
    page_of,
    try_all,
)
from support.tiny_models import make_tiny

from demo.storing import WAYS, write_quantised
from pdserve.models.config import read_spec
from pdserve.models.sources.storage import SCHEMES, SOURCES

PAGE = (Path(__file__).parent.parent / "docs" / "use" / "combinations.md").read_text()
UP = "model.layers.1.mlp.up_proj"


def test_the_page_has_all_kinds_and_families() -> None:
    rows = [
        line
        for line in PAGE.splitlines()
        if any(line.startswith(f"| {name} |") for name in FAMILIES)
    ]
    assert len(rows) == len(FAMILIES)
    assert page_of(rows) == PAGE, "write the page again: python tests/combinations.py --out ..."


def test_every_source_and_scheme_is_tried(tmp_path: Path) -> None:
    plain = make_tiny("llama3", tmp_path / "plain", intermediate_size=256)
    formats = []
    for way in filter(None, WEIGHTS.values()):
        spec = read_spec(str(write_quantised(plain, tmp_path / way, WAYS[way])))
        assert spec.formats is not None
        formats.append(spec.formats.of(UP))
    assert {format.kind for format in formats} == SCHEMES.keys()
    assert {SOURCES[format.packing] for format in formats} == set(SOURCES.values())


def test_exceptions_that_are_alike_are_said_once() -> None:
    rows = {(kv, weights): ["yes"] * len(COLUMNS) for kv in CACHES for weights in WEIGHTS}
    assert exceptions(rows) == "nothing: all work"
    for weights in WEIGHTS:
        rows["fp8", weights] = ["refused with `a`"] * len(COLUMNS)
        for kv in ("16 bits", "16 bits at P and fp8 at D"):
            rows[kv, weights][2:4] = ["refused with `b`"] * 2
    rows["16 bits", "AWQ int4"][1] = "other tokens"
    for weights in list(WEIGHTS)[1:]:
        rows["16 bits", weights][0] = "refused with `c`"
    assert exceptions(rows).split("<br>") == [
        "EP2, DP2, with all weights and KV cache in 16 bits or 16 bits at P and fp8 at D: refused "
        "with `b`",
        "one engine, with all weights but 16 bits and KV cache in 16 bits: refused with `c`",
        "TP2, with AWQ int4 and KV cache in 16 bits: other tokens",
        "all ways, with all weights and KV cache in fp8: refused with `a`",
    ]


@pytest.mark.slow
@pytest.mark.processes
def test_the_page_is_what_happens(tmp_path: Path) -> None:
    assert page_of(family_rows(try_all(tmp_path))) == PAGE
