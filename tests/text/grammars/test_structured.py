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
TRIGGERED = {
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


@pytest.mark.parametrize(
    ("fields", "fits", "others"),
    [
        ({"response_format": {"type": "json_object"}}, ['{"a": [1]}', "{}"], ["[1]", "1", "{"]),
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
            {
                "structured_outputs": {
                    "structural_tag": {"format": {**TRIGGERED, "at_least_one": True}}
                }
            },
            ['<f=b>{"city": ""}</f>', 'a <f=b>{"city": ""}</f> b'],
            ["", "a"],
        ),
        (
            {
                "structured_outputs": {
                    "structural_tag": {
                        "format": {**TRIGGERED, "at_least_one": True, "stop_after_first": True}
                    }
                }
            },
            ['a <f=b>{"city": ""}</f>'],
            ["", 'a <f=b>{"city": ""}</f> b'],
        ),
        (
            {
                "structured_outputs": {
                    "structural_tag": {"format": {**TRIGGERED, "stop_after_first": True}}
                }
            },
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
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_regex: a whitespace"),
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
