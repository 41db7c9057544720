"""Tests the form that requests ask for: fields, errors that name them, and what the grammars
allow."""

import json
from typing import Any

import pytest
from text.grammars.support import accepts

from pdserve.text.grammars.checker import checked_grammar
from pdserve.text.grammars.grammar_of import grammar_of
from pdserve.text.grammars.structured import structured_of, structured_outputs

pytestmark = pytest.mark.processes

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TAG = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": CITY, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "integer"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
TRIGGERED: dict[str, Any] = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [
        {"begin": "<f=b>", "content": {"type": "json_schema", "json_schema": CITY}, "end": "</f>"}
    ],
}
GBNF = r"""
# a sum
root ::= Term ("+" Term)*   # as often as you like
  | "nothing"
Term ::= [0-9]{1,3} | "(" root ")" | "é\x21"
"""
YES = ["", "3", "x"]


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def tags_format(**change: Any) -> dict[str, Any]:
    return {"structured_outputs": {"structural_tag": {"format": TRIGGERED | change}}}


@pytest.mark.parametrize(
    ("fields", "fits", "others"),
    [
        ({"response_format": {"type": "json_object"}}, ['{"a": [1]}', "{}"], ["[1]", "1", "{"]),
        (
            {"response_format": {"type": "json_object", "schema": CITY}},
            ['{"city": "x", "a": 1}'],
            ["{}", '{"city": 1}', "[]"],
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"minProperties": 1}}},
            ['{"a": 1}'],
            ["{}", "1"],
        ),
        ({"response_format": schema_format(CITY)}, ['{"city": "x", "a": 1}'], ['{"a": 1}', "{}"]),
        ({"response_format": schema_format(json.dumps(CITY))}, ['{"city": ""}'], ["{}"]),
        ({"structured_outputs": {"json": {"type": "integer"}}}, ["12"], ["1.5", '"1"']),
        ({"structured_outputs": {"json_object": True}}, ["{}"], ["1"]),
        ({"structured_outputs": {"regex": r"\d{2}/[a-z]"}}, ["12/a"], ["1/a", "12/ab", "x12/a"]),
        ({"guided_regex": "^a\nb$"}, ["a\nb"], ["ab"]),
        ({"guided_regex": r"price\$"}, ["price$"], ["price", "price\\"]),
        ({"guided_regex": r"price\\$"}, ["price\\"], ["price$", "price\\$"]),
        ({"guided_regex": r"^\^\\\$$"}, [r"^\$"], [r"\$", "^\\"]),
        ({"guided_regex": "^$"}, [""], ["$", "^"]),
        ({"structured_outputs": {"choice": ["yes", 'n"o\n', "yes, é"]}}, ["yes", 'n"o\n'], YES),
        ({"guided_choice": ["", "x"]}, ["", "x"], ["y"]),
        ({"guided_json": CITY}, ['{"city":"x"}'], ["{}"]),
        ({"guided_grammar": 'start: A+\nA: "a" | /[0-9]/'}, ["a1a"], ["", "b"]),
        ({"guided_grammar": '?start: pair\n!pair: "a" "b"'}, ["ab"], ["a"]),
        ({"guided_grammar": '!start: "a"'}, ["a"], ["b"]),
        ({"structured_outputs": {"grammar": GBNF}}, ["1+(2+333)", "nothing", "é!"], ["1+", "é"]),
        ({"guided_grammar": r'root ::= "\u0041" [\u00e9-\u00eb\]/^-]'}, ["Aê", "A]", "A/"], ["Ax"]),
        ({"response_format": TAG}, ["text", "<f=b>1</f> and <f=b>2</f>."], ["<f=c>", "<f=b>x</f>"]),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, ["<f=b>1</f>"], ["<f=b>"]),
        (
            {"structured_outputs": {"structural_tag": {"format": TRIGGERED}}},
            ["", 'a <f=b>{"city": "x"}</f> b'],
            ["<f=b>{}</f>"],
        ),
        (
            tags_format(excludes=[], at_least_one=False, stop_after_first=None),
            ["", 'a <f=b>{"city": "x"}</f> b'],
            ["<f=b>{}</f>"],
        ),
        (
            tags_format(at_least_one=True),
            ['<f=b>{"city": ""}</f>', 'a <f=b>{"city": ""}</f> b'],
            ["", "a"],
        ),
        (
            tags_format(at_least_one=True, stop_after_first=True),
            ['a <f=b>{"city": ""}</f>'],
            ["", 'a <f=b>{"city": ""}</f> b'],
        ),
        (
            tags_format(stop_after_first=True),
            ["", 'a <f=b>{"city": ""}</f>'],
            ['a <f=b>{"city": ""}</f> b'],
        ),
    ],
)
def test_forms(fields: dict[str, Any], fits: list[str], others: list[str]) -> None:
    asked = structured_of(fields)
    assert asked is not None
    grammar = checked_grammar(asked).text
    assert [text for text in fits if not accepts(grammar, text)] == []
    assert [text for text in others if accepts(grammar, text)] == []


def test_whitespace_is_bounded_unless_a_pattern_says_otherwise() -> None:
    def grammar(**fields: Any) -> str:
        asked = structured_of(fields)
        assert asked is not None
        return checked_grammar(asked).text

    usual = grammar(guided_json={"type": "object"})
    for text in ('{"a":1}', '{"a": 1}', '{\n  "a": [\n    1\n  ]\n}', '{\n\t"a": 1\n}'):
        assert accepts(usual, text)
    for text in ('{"a":   1}', '{\n\n"a": 1}', '{"a": 1}\n', f'{{"a":\n{" " * 25}1}}'):
        assert not accepts(usual, text)
    own = grammar(structured_outputs={"json": {"type": "object"}, "whitespace_pattern": " {0,3}"})
    assert accepts(own, '{"a":   1}') and not accepts(own, '{\n"a": 1}')
    alias = grammar(guided_json={"type": "object"}, guided_whitespace_pattern=" {0,3}")
    assert alias == own
    spaces = grammar(guided_json={"type": "object"}, guided_whitespace_pattern=r"\s|[\n\s]{3}")
    for text in ('{"a":\t1}', '{"a":\n \n1}'):
        assert accepts(spaces, text)
    for text in ('{"a":\u30001}', '{"a":\n \u30001}', '{"a":  1}'):
        assert not accepts(spaces, text)


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": {"type": "object"}, "disable_any_whitespace": True}},
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        {"structured_outputs": {"json_object": True, "whitespace_pattern": ""}},
        {"guided_json": {"type": "object"}, "guided_whitespace_pattern": ""},
    ],
)
def test_json_without_whitespace(fields: dict[str, Any]) -> None:
    asked = structured_of(fields)
    assert asked is not None
    grammar = checked_grammar(asked).text
    assert accepts(grammar, '{"a b":[1,{"c":" "}]}')
    for text in ('{"a": 1}', '{"a":[1, 2]}', '{\n"a":1}', '{"a":1 }'):
        assert not accepts(grammar, text)


def test_objects_are_closed_where_a_schema_leaves_them_open() -> None:
    part = {"type": "object", "properties": {"n": {"type": "integer"}}}
    schema = {
        "type": "object",
        "properties": {
            "part": {"$ref": "#/$defs/part"},
            "open": {**part, "additionalProperties": True},
            "any": {"type": "object"},
            "list": {"type": "array", "items": {"patternProperties": {"^x": {}}}},
        },
        "$defs": {"part": part},
    }
    before = json.dumps(schema)

    def grammar(**options: Any) -> str:
        asked = structured_of({"structured_outputs": {"json": schema, **options}})
        assert asked is not None
        return checked_grammar(asked).text

    closed = grammar(disable_additional_properties=True)
    usual = grammar(disable_additional_properties=False)
    for text in ('{"part": {"n": 1}}', '{"open": {"x": 1}, "any": {"x": 1}, "list": [{"xy": 1}]}'):
        assert accepts(closed, text) and accepts(usual, text)
    for text in ('{"x": 1}', '{"part": {"x": 1}}', '{"list": [{"y": 1}]}'):
        assert not accepts(closed, text) and accepts(usual, text)
    assert json.dumps(schema) == before, "the caller's schema stays as it is"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": "json"}, "response_format must be"),
        ({"response_format": {"type": "yaml"}}, "response_format must be"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema must be"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema is missing",
        ),
        ({"response_format": schema_format({}, strict=1)}, "response_format.json_schema.strict"),
        ({"response_format": schema_format(5)}, "response_format.json_schema.schema must be"),
        (
            {"response_format": schema_format("{")},
            "response_format.json_schema.schema is not valid",
        ),
        (
            {"response_format": schema_format({"not": {}, "foo": 1}, strict=True)},
            "response_format.json_schema.schema uses foo, not, which cannot be enforced",
        ),
        (
            {
                "response_format": schema_format(
                    {"oneOf": [{"type": "string"}, {"minLength": 2}]}, strict=True
                )
            },
            "oneOf",
        ),
        ({"structured_outputs": 5}, "structured_outputs must be"),
        ({"structured_outputs": {"yaml": 1}}, "structured_outputs.yaml is unknown"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs sets json, regex"),
        (
            {"structured_outputs": {"json": {}}, "guided_json": {}},
            "guided_json: structured_outputs.json and guided_json exclude each other",
        ),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex: response_format and guided_regex exclude each other",
        ),
        ({"guided_regex": 5}, "guided_regex must be"),
        ({"guided_regex": ""}, "guided_regex is empty"),
        ({"guided_regex": "("}, "guided_regex cannot be used as a grammar: error: unclosed group"),
        ({"guided_regex": "(?=a)b"}, "guided_regex cannot be used as a grammar: .*look-ahead"),
        ({"guided_regex": r"[^\s\S]"}, "guided_regex .*nothing can match it"),
        ({"guided_choice": []}, "guided_choice must be"),
        ({"guided_choice": ["a", 1]}, "guided_choice must be"),
        ({"guided_grammar": "hello"}, "guided_grammar is neither Lark .* nor EBNF"),
        ({"guided_grammar": "start: x"}, "guided_grammar .*unknown name"),
        ({"guided_grammar": "start: x\nx: x"}, "guided_grammar .*nothing can match it"),
        ({"guided_grammar": 'root ::= a\na ::= "x" b'}, "guided_grammar uses the rule 'b'"),
        (
            {"guided_grammar": 'root ::= b\nb ::= "a'},
            "guided_grammar: a text in quotes begins in line 2 and does not end there: close it",
        ),
        ({"guided_grammar": "root ::= [a"}, "guided_grammar: a class of characters begins in line"),
        ({"guided_grammar": 'roof ::= "x"'}, "guided_grammar has no rule `root"),
        ({"guided_grammar": 'root ::= "x"\nroot ::= "y"'}, "guided_grammar defines .*twice"),
        ({"guided_grammar": 'root ::= (?="x") "y"'}, "guided_grammar is no EBNF"),
        (
            {"guided_grammar": 'root ::= "\\ud800"'},
            "guided_grammar .*This is no character",
        ),
        ({"guided_grammar": 'start: "\ud800"'}, "guided_grammar holds half a surrogate pair"),
        ({"guided_json": {"$ref": "#"}}, "guided_json fits no finite answer"),
        ({"guided_json": {"type": "strin"}}, "guided_json .*Invalid type"),
        ({"guided_json": {"$ref": "http://a/b"}}, "guided_json .*not present"),
        ({"guided_json": {"type": "string", "pattern": "("}}, "guided_json"),
        ({"guided_json": {"enum": []}}, "guided_json"),
        ({"guided_json": False}, "guided_json is false"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern is only for JSON"),
        ({"guided_whitespace_pattern": 5}, "guided_whitespace_pattern must be"),
        (
            {"guided_regex": "a", "guided_whitespace_pattern": " "},
            "guided_regex: a rule for whitespace",
        ),
        (
            {"guided_json": {}, "guided_whitespace_pattern": "x"},
            "guided_json: its whitespace pattern allows more than JSON's whitespace",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": r"[^\S]*\u00a0?"}},
            "structured_outputs.json: its whitespace pattern allows more",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": 1}},
            "structured_outputs.disable_any_whitespace must be true or false",
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.regex: a rule for whitespace is only for JSON",
        ),
        (
            {"structured_outputs": {"disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace is only for JSON: send json",
        ),
        (
            {
                "structured_outputs": {
                    "json": {},
                    "disable_any_whitespace": True,
                    "whitespace_pattern": " ",
                }
            },
            "structured_outputs.disable_any_whitespace and .* exclude each other",
        ),
        (
            {
                "structured_outputs": {"json": {}, "disable_any_whitespace": True},
                "guided_whitespace_pattern": " ",
            },
            "guided_whitespace_pattern and .* exclude each other",
        ),
        (
            {"structured_outputs": {"choice": ["a"], "disable_additional_properties": True}},
            "structured_outputs.choice: disable_additional_properties is only for JSON",
        ),
        (
            {"structured_outputs": {"disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties is only for JSON: send json",
        ),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object must be true"),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "array"}}},
            "response_format.schema.type must be object",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
            "response_format.json_schema is not supported: leave it out, or use type, schema",
        ),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema is not"),
        (
            {"response_format": schema_format({}) | {"schema": {}}},
            "response_format.schema is not supported",
        ),
        (
            {"response_format": schema_format({}, strct=True)},
            "response_format.json_schema.strct is not supported: leave it out, or use .*strict",
        ),
        ({"guided_json": {}, "guided_whitespace_pattern": "("}, "guided_json"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.structures must be"),
        (
            {"response_format": {**TAG, "triggers": ["<g="]}},
            r"response_format.structures\[0\].begin begins with none",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            "response_format.format must be",
        ),
        ({"response_format": {**TAG, "trigers": []}}, "response_format.trigers is not supported"),
        (
            {"response_format": {"type": "structural_tag", "format": TRIGGERED, "triggers": []}},
            "response_format.triggers is not supported: leave it out, or use type, format",
        ),
        (
            tags_format(excludes=["<b>"]),
            r"structural_tag.format.excludes is not supported: leave it out, or use .*at_least_one",
        ),
        (tags_format(at_least_one="yes"), "format.at_least_one must be true or false, not 'yes'"),
        (tags_format(stop_after_first=1), "format.stop_after_first must be true or false, not 1"),
        (
            tags_format(tags=[{**TRIGGERED["tags"][0], "schema": CITY}]),
            r"format.tags\[0\].schema is not supported",
        ),
        (
            tags_format(
                tags=[
                    {
                        **TRIGGERED["tags"][0],
                        "content": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"},
                    }
                ]
            ),
            r"format.tags\[0\].content.style is not supported",
        ),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        asked = structured_of(fields)
        assert asked is not None
        checked_grammar(asked)
    assert len(str(caught.value)) < 1000
    assert ": " in str(caught.value) or " must " in str(caught.value)  # what to do about it


def test_what_asks_for_nothing() -> None:
    assert structured_of({}) is None
    assert structured_of({"response_format": {"type": "text"}, "guided_json": None}) is None
    assert structured_of({"structured_outputs": {"json": None, "json_object": False}}) is None
    with pytest.raises(ValueError, match="structured_outputs is empty"):
        structured_outputs({})


def test_keywords_that_are_not_enforced_are_named() -> None:
    schema = {
        "properties": {
            "not": {"type": "string", "format": "colour"},
            "a": {"type": "array", "uniqueItems": True},
            "b": {"enum": [{"if": 1}], "mine": 1, "title": "x"},
        }
    }
    asked = structured_of({"guided_json": schema})
    assert asked is not None
    assert checked_grammar(asked).unenforced == ("format colour", "mine", "uniqueItems")


def test_a_client_cannot_set_options_of_the_grammar_engine() -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_pattern": ".*", "coerce_one_of": True}}
    asked = structured_of({"guided_json": schema})
    assert asked is not None
    assert ".*" not in grammar_of(asked)
    assert checked_grammar(asked).unenforced == ("x-guidance",)
