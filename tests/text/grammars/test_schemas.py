"""JSON schemas: what their grammars let through, measured with JSON-Schema-Test-Suite and with
schemas drawn at random, whose instances the jsonschema package judges."""

import json
import lzma
import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from text.grammars.drawing import Draw, is_valid, judge, read
from text.grammars.support import accepts

from pdserve.text.grammars.json_schemas.schemas import can_end
from pdserve.text.grammars.probe import Make, answer
from pdserve.text.grammars.structured import StructuredRequest

SUITE = Path(__file__).parent / "data" / "draft2020-12.json.xz"

Excuses = dict[tuple[str, str], str]  # (file, part of the group's or the test's description): why

# valid instances that are not let through
NOT_ACCEPTED: Excuses = {
    ("const", "float"): "numbers without a fraction are written without one",
    ("const", "different property order"): "properties come in the schema's order",
    ("enum", "float zero"): "numbers without a fraction are written without one",
    ("enum", "float one"): "numbers without a fraction are written without one",
    ("enum", "[0.0]"): "numbers without a fraction are written without one",
    ("enum", "[1.0]"): "numbers without a fraction are written without one",
    ("type", "zero fractional part"): "numbers without a fraction are written without one",
    ("allOf", "allOf"): "properties come in the order in which the schema names them",
    ("unevaluatedProperties", "with $ref"): "properties come in the order of $ref, properties",
    ("format", "only an annotation"): "formats that are known are enforced",
    ("optional/format/ipv6", "mixed format with"): "an IPv4 address ends an IPv6 address seldom",
    ("optional/format/ipv6", "a long valid ipv6"): "an IPv4 address ends an IPv6 address seldom",
    ("optional/format/email", "a quoted string with"): "nothing is quoted",
    ("optional/format/email", "an IPv6-address-literal"): "no IPv6 address stands after the @",
    ("optional/float-overflow", "overflow"): "integers have no exponent",
    ("optional/ecmascript-regex", "Line tabulation matches"): "U+000B cannot be written",
    ("optional/ecmascript-regex", "Non-whitespace control"): "U+0001 cannot be written",
}
# invalid instances that are let through, though no keyword is reported as not enforced
ACCEPTED: Excuses = {
    ("optional/format/date-time", "leap second"): "leap seconds may stand in any minute",
    ("optional/format/time", "leap second"): "leap seconds may stand in any minute",
    ("optional/format/date", "29 days in February"): "February has 29 days",
    ("optional/format/date", "leap year"): "February has 29 days",
}
# groups that are refused (400) though something would be valid: a part of the error
REFUSED: Excuses = {
    ("const", "nul characters"): "control character cannot be written",
    ("enum", "nul characters"): "control character cannot be written",
    ("dynamicRef", ""): "not present in a registry",
    ("refRemote", ""): "not present in a registry",
    ("vocabulary", ""): "not present in a registry",
    ("optional/cross-draft", ""): "not present in a registry",
    ("optional/format-assertion", ""): "not present in a registry",
    ("optional/bignum", "maximum integer comparison"): "10**18 or more",
    ("optional/bignum", "minimum integer comparison"): "10**18 or more",
    ("optional/ecmascript-regex", r"escapes control codes with \c"): "nothing can match it",
    ("patternProperties", "multiple simultaneous"): "not disjoint",
    ("patternProperties", "not anchored by default"): "not disjoint",
    ("patternProperties", "with boolean schemas"): "not disjoint",
}


@cache
def suite() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads(lzma.decompress(SUITE.read_bytes()))
    assert len(found) > 60
    return found


def names() -> list[str]:
    return sorted(suite())


@dataclass(frozen=True)
class Difference:
    """An instance, or a whole group, on which the grammar and the suite differ."""

    table: str
    file: str
    descriptions: tuple[str, ...]
    error: str = ""

    def is_excused_by(self, excuse: tuple[str, str], why: str) -> bool:
        file, part = excuse
        is_about_it = file == self.file and any(part in text for text in self.descriptions)
        return is_about_it and (not self.error or why in self.error)


TABLES = {"not accepted": NOT_ACCEPTED, "accepted": ACCEPTED, "refused": REFUSED}


@cache
def differences(name: str) -> tuple[list[Difference], int]:
    """The differences in a file of the suite, and how many instances were compared."""
    found: list[Difference] = []
    num_tests = 0
    for group in suite()[name]:
        schema, about = group["schema"], group["description"]
        if isinstance(schema, bool):
            continue
        finding = answer(Make(StructuredRequest("json", schema, "response_format")))
        if finding.error:
            if any(test["valid"] for test in group["tests"]):
                found.append(Difference("refused", name, (about,), finding.error))
            continue
        for test in group["tests"]:
            try:
                text = json.dumps(test["data"], ensure_ascii=False)
                text.encode()
            except UnicodeEncodeError:
                continue  # half a surrogate pair is no text
            num_tests += 1
            is_accepted = accepts(finding.text, text)
            if is_accepted != test["valid"] and not (is_accepted and finding.unenforced):
                table = "accepted" if is_accepted else "not accepted"
                found.append(Difference(table, name, (about, test["description"])))
    return found, num_tests


@pytest.mark.parametrize("name", names())
def test_the_suite_of_draft_2020_12(name: str) -> None:
    found, num_tests = differences(name)
    for difference in found:
        excuses = TABLES[difference.table].items()
        assert any(difference.is_excused_by(*excuse) for excuse in excuses), difference
    assert num_tests or name.startswith(("refRemote", "optional/", "vocabulary", "boolean_schema"))


@pytest.mark.parametrize("table", TABLES)
def test_no_excuse_is_stale(table: str) -> None:
    found = [d for name in names() for d in differences(name)[0] if d.table == table]
    excuses = TABLES[table].items()
    assert [key for key, why in excuses if not any(d.is_excused_by(key, why) for d in found)] == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(200))
def test_schemas_drawn_at_random(seed: int) -> None:
    draw = Draw(seed)
    schema = draw.root()
    finding = answer(Make(StructuredRequest("json", schema, "response_format")))
    assert set(finding.unenforced) <= {"minProperties"}
    whole, enforced = judge(schema), judge(schema, finding.unenforced)
    values = [draw.value(schema, schema) for _ in range(40)]
    if finding.error:
        assert not any(is_valid(whole, value) for value in values), finding.error
        return
    for value in values:
        for text in (
            json.dumps(value, ensure_ascii=False),
            json.dumps(value, ensure_ascii=False, separators=(",", ":")),
            json.dumps(value, ensure_ascii=False, indent=2),
        ):
            text = text.replace("1e+20", "100000000000000000000")
            is_accepted = accepts(finding.text, text)
            if is_valid(enforced if is_accepted else whole, read(text)) != is_accepted:
                pytest.fail(f"{'accepted' if is_accepted else 'refused'}: {text} of {schema}")


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        ({"$ref": "#"}, False),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, True),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, False),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, True),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, True),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/a"}}}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"const": 1}}}, True),
        ({"$ref": "http://elsewhere/x"}, True),
    ],
)
def test_schemas_without_finite_values(schema: dict[str, Any], ends: bool) -> None:
    assert can_end(schema) is ends


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize(
    ("schema", "fits", "other"),
    [
        (CITY, '{"city":"Rome","x":3}', '{"city":"Rome","\\u0063ity":3}'),
        (CITY, '{"city":"Rome","x\\n\\"":3}', '{"city":"Rome","city":3}'),
        ({"properties": {'a"b': {"type": "null"}}}, '{"a\\"b":null}', '{"a\\u0022b":1}'),
        ({"properties": {"a": False}}, '{"b":1}', '{"\\u0061":1}'),
        ({"patternProperties": {"^a": {"type": "null"}}}, '{"ab":null}', '{"\\u0061b":1}'),
        ({"patternProperties": {'^[^"]*$': {"type": "null"}}}, '{"a\\"":1}', '{"a":1}'),
        (
            {"additionalProperties": False, "anyOf": [{}], "patternProperties": {"^a": {}}},
            '{"ab":1}',
            '{"b":1}',
        ),
        ({"prefixItems": [{"const": 1}], "additionalItems": False}, "[1,2]", "[2]"),
        ({"items": [{"const": 1}], "additionalItems": False}, "[1]", "[1,2]"),
        ({"$ref": "#/x/y", "x": {"y": {"pattern": '^[^"]*$'}}}, '"a"', '"\\""'),
        ({"maximum": 9223372036854775807, "type": "integer"}, "9223372036854775807", "1e30"),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "0.1", "0"),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "0.0000001", "0.0"),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, "-1.1", "-1"),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, "-0.5", "-0"),
        ({"allOf": [{"exclusiveMinimum": 2}, {"maximum": 2.5}]}, "2.5", "2"),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, "0.1", "0"),
        ({"const": 9223372036854775807}, "9223372036854775807", "9223372036854775806"),
        ({"const": 100000000000000000000}, "100000000000000000000", "100000000000000000001"),
    ],
)
def test_what_could_be_got_round(schema: Any, fits: str, other: str) -> None:
    found = answer(Make(StructuredRequest("json", schema, "f")))
    assert accepts(found.text, fits) and not accepts(found.text, other)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": 9007199254740993}, "const holds 9007199254740993, which is too large"),
        ({"enum": [{"a": [18446744073709551615]}]}, "enum holds 18446744073709551615"),
        ({"minimum": 9007199254740993}, "minimum 9007199254740993 is too large"),
        ({"exclusiveMinimum": 2**53}, "exclusiveMinimum 9007199254740992 is too large"),
        ({"items": {"exclusiveMaximum": 1e17}}, r"exclusiveMaximum 1e\+17 is too large"),
        ({"patternProperties": {r"^\d": {}, "^[0-9]": {}}}, "patternProperties holds patterns"),
        ({"maximum": 10**400}, "maximum 1000.* is too large"),
        ({"maximum": 0.41000000000000003}, "maximum 0.41000000000000003 has too many digits"),
        ({"multipleOf": math.inf, "allOf": []}, "multipleOf inf has too many digits"),
        ({"enum": [[1.0899999999999999]]}, "enum 1.0899999999999999 has too many digits"),
        ({"enum": ["a", "\x1b"]}, r"enum holds '\\x1b', and its control character"),
    ],
)
def test_values_that_llguidance_cannot_hold_are_refused(schema: Any, message: str) -> None:
    found = answer(Make(StructuredRequest("json", schema, "f")))
    assert re.match(f"f cannot be enforced: {message}", found.error), found.error


def test_bounds_that_llguidance_cannot_write_are_refused() -> None:
    for schema in ({"type": "number", "maximum": 1e19}, {"type": "integer", "minimum": 10**18}):
        error = answer(Make(StructuredRequest("json", schema, "f"))).error
        assert "it has a minimum or maximum of 10**18 or more; send one nearer to 0" in error


def test_multiples_that_llguidance_cannot_join_are_reported() -> None:
    for steps, names in (((65536, 65537), ("multipleOf",)), ((6, 0.35), ())):
        schema = {"type": "integer", "allOf": [{"multipleOf": step} for step in steps]}
        assert answer(Make(StructuredRequest("json", schema, "f"))).unenforced == names


def test_data_that_looks_like_a_schema_stays_as_it_is() -> None:
    data = {"pattern": '[^"]', "minProperties": 2, "$ref": "#/x", "additionalItems": 1}
    for schema in ({"const": data}, {"properties": {"const": {"enum": [data]}}}):
        found = answer(Make(StructuredRequest("json", schema, "f")))
        text = json.dumps(data if "const" in schema else {"const": data})
        assert accepts(found.text, text) and not found.unenforced
