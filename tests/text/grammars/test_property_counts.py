"""Numbers of properties: compares all objects over a few keys with what the keywords demand."""

import itertools
import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from text.grammars.support import accepts

from pdserve.text.grammars.json_schemas.property_counts import MAX_BRANCHES, counted
from pdserve.text.grammars.probe import Make, answer
from pdserve.text.grammars.structured import StructuredRequest

OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}}
CLOSED = OPEN | {"additionalProperties": False}
KEYS = ("a", "b", "c", "y", "z")


def made(schema: Any, strict: bool = False) -> Any:
    return answer(Make(StructuredRequest("json", schema, "f", strict)))


def objects(schema: dict[str, Any]) -> list[dict[str, int]]:
    """All objects over KEYS, with their keys in the schema's order."""
    order = [*schema.get("properties", {}), *schema["required"], *KEYS]
    return [
        dict.fromkeys(keys, 1)
        for count in range(len(KEYS) + 1)
        for keys in itertools.combinations(dict.fromkeys(order), count)
    ]


@pytest.mark.parametrize("schema", [OPEN, CLOSED, {"type": "object"}, {"type": ["object", "null"]}])
@pytest.mark.parametrize("required", [[], ["b"], ["c", "z"]])
@pytest.mark.parametrize("least", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("most", [None, 0, 1, 2, 4])
def test_all_objects(
    schema: dict[str, Any], required: list[str], least: int | None, most: int | None
) -> None:
    bounds = {"minProperties": least, "maxProperties": most}
    schema = schema | {"required": required}
    schema |= {name: bound for name, bound in bounds.items() if bound is not None}
    found = made(schema)
    expected = Draft202012Validator(schema)
    if found.error:
        assert not any(expected.is_valid(value) for value in objects(schema))
        return
    assert set(found.unenforced) <= {"minProperties"}
    for value in objects(schema):
        assert accepts(found.text, json.dumps(value)) == expected.is_valid(value), value
    if not found.unenforced:
        repeated = '{"y": 1, "y": 2}'
        assert expected.is_valid(json.loads(repeated)) or not accepts(found.text, repeated)


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"minProperties": 1}, ()),
        ({"minProperties": 2}, ("minProperties",)),
        (OPEN | {"minProperties": 2}, ("minProperties",)),
        (OPEN | {"minProperties": 2, "required": ["a"]}, ()),
        (CLOSED | {"minProperties": 3}, ()),
        (OPEN | {"maxProperties": 2}, ()),
        ({"allOf": [OPEN], "minProperties": 1}, ("minProperties",)),
        ({"allOf": [OPEN, {"minProperties": 1}]}, ("minProperties",)),
        ({"$ref": "#/$defs/x", "maxProperties": 1, "$defs": {"x": OPEN}}, ("maxProperties",)),
        (
            {
                "properties": {f"p{i}": {} for i in range(40)},
                "maxProperties": 3,
                "minProperties": 1,
            },
            ("maxProperties", "minProperties"),
        ),
    ],
)
def test_what_cannot_be_counted_is_reported(schema: Any, names: tuple[str, ...]) -> None:
    assert made(schema).unenforced == names
    refusal = made(schema, strict=True).error
    assert bool(refusal) == bool(names)
    assert all(name in refusal or "min/maxProperties" in refusal for name in names)


def test_names_that_are_too_many_take_no_time() -> None:
    properties: dict[str, Any] = {f"p{i}": {} for i in range(4000)}
    for bounds in ({"minProperties": 1}, {"maxProperties": 3999}, {"minProperties": 3999}):
        _, names = counted({"properties": properties, "additionalProperties": False} | bounds)
        assert names == set(bounds)
    few: dict[str, Any] = {f"p{i}": {} for i in range(MAX_BRANCHES)}
    schema, names = counted({"properties": few, "additionalProperties": False, "minProperties": 1})
    assert not names and len(schema["anyOf"]) == MAX_BRANCHES


def test_an_error_names_the_keyword() -> None:
    assert "minProperties" in made(CLOSED | {"minProperties": 4}).error
    joined = {"allOf": [CLOSED, {"minProperties": 2}]}
    assert "name that many in required" in made(joined).error
