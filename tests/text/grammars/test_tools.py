"""The grammar of tool calls and the parsers of their formats agree: what one lets through the other
reads, with the same names and arguments."""

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.grammars.support import Vocabulary, accepts, text_of, walk

from pdserve.text.answers.formats import CALL_FORMATS, REASONING_FORMATS, CallFormat
from pdserve.text.answers.native.call_form import CallForm
from pdserve.text.answers.native.parameter_types import json_of, kinds_of
from pdserve.text.answers.parser import AnswerParser
from pdserve.text.answers.pieces import CallArguments, CallBegin, CallEnd, Content, Item, Reasoning
from pdserve.text.grammars.grammar_of import grammar_of
from pdserve.text.grammars.probe import Check, Finding, Make, answer, matcher_of
from pdserve.text.grammars.reasoning import ReasoningPrefix, after_reasoning
from pdserve.text.grammars.structured import structured_outputs
from pdserve.text.grammars.tools import call_rules, tools_grammar

THINK = REASONING_FORMATS["think"]
FORMATS = sorted(CALL_FORMATS)
WORDS = ["hello", " é", "😀", '"', '", "', '": ', "}", "}}", "]", "</tool_call>", "\\n", "{"]
WORDS += [
    "\n</parameter>\n",
    "</think>",
    "<think>",
    "<tool_call>",
    "[1, ",
    '{"name": "',
    "</parameter",
]


def tool(name: str, schema: Any = None) -> dict[str, Any]:
    function = {"name": name} if schema is None else {"name": name, "parameters": schema}
    return {"type": "function", "function": function}


def strict(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [tool("get", WEATHER), tool("get_time"), tool("get.weather-2", {"properties": {}})]


def special_of(form: CallForm, has_tokens: bool) -> tuple[str, ...]:
    return (*form.tokens, THINK.begin, THINK.end) if has_tokens else ()


def vocabulary_of(form: CallForm, has_tokens: bool) -> Vocabulary:
    words = [*WORDS, form.call_begin, form.trigger, form.before_arguments, form.after_arguments]
    return Vocabulary([word for word in words if word], special_of(form, has_tokens))


def parsed(
    calls: CallFormat, items: Sequence[Item], tools: Sequence[dict[str, Any]], **options: Any
) -> tuple[list[tuple[str, str]], int, str, str]:
    """Calls, how many are complete, content, reasoning."""
    schemas = {t["function"]["name"]: t["function"].get("parameters", {}) for t in tools}
    parser = AnswerParser(calls, tools=schemas, **options)
    pieces = [*parser.push(items), *parser.finish()]
    found: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallBegin):
            found.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            found[-1] = (found[-1][0], found[-1][1] + piece.text)
    ends = sum(isinstance(piece, CallEnd) for piece in pieces)
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return found, ends, content, thought


def written(form: CallForm, text: str, tools: Sequence[dict[str, Any]]) -> list[tuple[str, Any]]:
    """The calls of an answer that holds nothing else, read by the form's description alone."""
    schemas = {t["function"]["name"]: t["function"].get("parameters", {}) for t in tools}
    calls = []
    text = text.removeprefix(form.section_begin)
    while text:
        assert text.startswith(form.call_begin), text
        name, _, text = text[len(form.call_begin) :].partition(form.before_arguments)
        if form.parameter is None:
            value, end = json.JSONDecoder().raw_decode(text)
        else:
            value, end = {}, 0
            while text[end:].startswith(form.parameter.begin):
                key, _, rest = text[end + len(form.parameter.begin) :].partition(
                    form.parameter.before_value
                )
                shown, _, after = rest.partition(form.parameter.end)
                kinds = kinds_of(schemas[name], key)
                is_text = kinds <= {"string"}
                value[key] = shown if is_text else json.loads(json_of(shown, kinds))
                end = len(text) - len(after)
        calls.append((name, value))
        text = text[end:].removeprefix(form.after_arguments)
        text = text.removeprefix(form.section_end) if text == form.section_end else text
        text = text.removeprefix(form.between) if text.startswith(form.between) else text
    return calls


# schemas whose keywords llguidance enforces
_LEAVES = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "maxLength": 5},
        {"type": "string", "enum": ["a", "b c", "é\n"]},
        {"type": "integer"},
        {"type": "integer", "minimum": -3, "maximum": 40},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["string", "null"]},
        {"type": ["integer", "string"]},
        {"const": 5},
        {"enum": [1, "x", None]},
        {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        {"$ref": "#/$defs/Point"},
        {"$ref": "#/$defs/Colour"},
        {"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}]},
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
        {"type": "string", "pattern": '^[^"]*x'},
        {},
    ]
)
_KEYS = st.text("abcXYZ_0", min_size=1, max_size=6)


@st.composite
def argument_schemas(draw: st.DrawFn, depth: int = 1) -> dict[str, Any]:
    parts = _LEAVES if not depth else st.one_of(_LEAVES, argument_schemas(depth=0))
    properties = draw(st.dictionaries(_KEYS, parts, max_size=4))
    required = (
        draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    )
    schema = {"type": "object", "properties": properties, "required": required}
    return schema | {"additionalProperties": False}


def rooted(schema: dict[str, Any]) -> dict[str, Any]:
    point = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
    colour = {"type": "string", "enum": ["red", "dark blue", "null"]}
    return schema | {"$defs": {"Point": point | {"additionalProperties": False}, "Colour": colour}}


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25, deadline=None)
@given(
    schemas=st.lists(argument_schemas().map(rooted), min_size=1, max_size=3),
    seed=st.integers(0, 1 << 30),
    has_tokens=st.booleans(),
    parallel=st.booleans(),
)
def test_required_calls_are_parsed_back(
    name: str, schemas: list[dict[str, Any]], seed: int, has_tokens: bool, parallel: bool
) -> None:
    calls = CALL_FORMATS[name]
    tools = [tool(f"f{'_x' * i}", schema) for i, schema in enumerate(schemas)]
    vocabulary = vocabulary_of(calls.form, has_tokens)
    grammar = tools_grammar(calls.form, tools, "required", parallel, token_ids=vocabulary.special)
    items = walk(grammar, vocabulary, random.Random(seed))
    if items is None:
        return
    expected = written(calls.form, text_of(items), tools)
    found, ends, content, _ = parsed(calls, items, tools, tokens=special_of(calls.form, has_tokens))
    assert [(n, json.loads(arguments)) for n, arguments in found] == expected
    assert ends == len(found) >= 1
    assert not content
    assert parallel or len(found) == 1
    for called, arguments in expected:
        schema = next(t["function"]["parameters"] for t in tools if t["function"]["name"] == called)
        jsonschema.validate(arguments, schema)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", "none", {"function": {"name": "get_time"}}])
@pytest.mark.parametrize("inside", [None, False, True])
def test_walks_through_whole_answers(
    name: str, has_tokens: bool, choice: Any, inside: bool | None
) -> None:
    """Walks through whole answers. `inside` is True if the prompt opened the reasoning, and None if
    the model does not reason."""
    calls = CALL_FORMATS[name]
    reasoning = None if inside is None else THINK
    vocabulary = vocabulary_of(calls.form, has_tokens)
    grammar = tools_grammar(
        calls.form,
        TOOLS,
        choice,
        reasoning=reasoning,
        starts_in_reasoning=bool(inside),
        token_ids=vocabulary.special,
    )
    num_calls = 0
    for seed in range(12):
        items = walk(grammar, vocabulary, random.Random(seed), length=60)
        if items is None:
            continue
        found, ends, _, thought = parsed(
            calls,
            items,
            TOOLS,
            reasoning=reasoning,
            starts_in_reasoning=bool(inside),
            tokens=special_of(calls.form, has_tokens),
        )
        text = text_of(items)
        assert ends == len(found), text
        num_calls += ends
        for called, arguments in found:
            schemas = {t["function"]["name"]: t["function"].get("parameters", {}) for t in TOOLS}
            jsonschema.validate(json.loads(arguments), schemas[called])
        if choice == "none":
            assert not found, text
        elif choice != "auto":
            assert found, text
        if isinstance(choice, dict):
            assert [called for called, _ in found] == ["get_time"], text
        if inside is None:
            assert not thought
    assert choice in ("auto", "none") or num_calls


@pytest.mark.parametrize("name", FORMATS)
def test_auto_enforces_a_call_from_its_trigger_on(name: str) -> None:
    form = CALL_FORMATS[name].form
    grammar = tools_grammar(form, TOOLS)
    call = form.section_begin + form.call_begin + "get" + form.before_arguments
    head = "" if form.only_at_start else "I will look. "
    assert accepts(grammar, 'Just text, {"name": 1}')
    assert accepts(grammar, "")
    arguments = '{"city": "Paris"}'
    if form.parameter is not None:
        arguments = (
            f"{form.parameter.begin}city{form.parameter.before_value}Paris{form.parameter.end}"
        )
    whole = head + call + arguments + form.after_arguments + form.section_end
    assert accepts(grammar, whole)
    assert not accepts(grammar, whole[: len(head + call)])
    assert not accepts(grammar, head + form.trigger + "x")
    assert not accepts(grammar, head + call.replace("get", "put", 1))
    other = arguments.replace("city", "town")
    assert not accepts(grammar, head + call + other + form.after_arguments + form.section_end)
    loose = tools_grammar(form, TOOLS, enforce="syntax")
    assert accepts(loose, head + call + other + form.after_arguments + form.section_end)
    assert not accepts(loose, head + call + arguments[:-1] + "!")
    assert tools_grammar(form, TOOLS, enforce="off") == ""


@pytest.mark.parametrize("name", FORMATS)
def test_none_forbids_calls(name: str) -> None:
    form = CALL_FORMATS[name].form
    grammar = tools_grammar(form, TOOLS, "none")
    assert accepts(grammar, "Paris is sunny.")
    assert not accepts(grammar, form.section_begin + form.call_begin + "get")


@pytest.mark.parametrize("name", FORMATS)
def test_grammars_can_be_used(name: str) -> None:
    for choice in ("auto", "required", "none"):
        for reasoning in (None, *REASONING_FORMATS.values()):
            for ids in ({}, {t: 300 + i for i, t in enumerate(CALL_FORMATS[name].form.tokens)}):
                grammar = tools_grammar(
                    CALL_FORMATS[name].form, TOOLS, choice, reasoning=reasoning, token_ids=ids
                )
                assert not matcher_of(grammar).is_error(), grammar


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([], "auto", "tools must hold"),
        ([{"type": "function"}], "auto", r"tools\[0\].function.name"),
        ([tool("a b")], "auto", r"tools\[0\].function.name"),
        ([tool("a"), tool("a")], "auto", "twice"),
        ([tool("a", {"type": "array"})], "auto", r"tools\[0\].function.parameters.type"),
        ([tool("a", 5)], "auto", r"tools\[0\].function.parameters"),
        ([tool("a", {"properties": {"x": {"$ref": "#"}}, "required": ["x"]})], "auto", "finite"),
        ([strict("a", {"properties": {"x": {"not": {}}}})], "auto", "uses not, which cannot"),
        ([tool("a")], "sometimes", "tool_choice"),
        ([tool("a")], {"function": {"name": "b"}}, "tool_choice names 'b'"),
    ],
)
def test_bad_tools_are_named(tools: list[Any], choice: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tools_grammar(CALL_FORMATS["hermes"].form, tools, choice)


COLOUR = {"Colour": {"type": "string", "enum": ["red", "null"]}}
TREE = {"type": "object", "properties": {"child": {"$ref": "#/properties/x"}, "top": {"$ref": "#"}}}


def call_of_x(text: str) -> str:
    form = CALL_FORMATS["qwen3-coder"].form
    assert form.parameter is not None
    parameter = f"{form.parameter.begin}x{form.parameter.before_value}{text}{form.parameter.end}"
    return f"{form.call_begin}f{form.before_arguments}{parameter}{form.after_arguments}"


def made(schema: Any, is_strict: bool = False) -> Finding:
    """The grammar of a call of f in Qwen3-Coder's form."""
    tools = [(strict if is_strict else tool)("f", schema)]
    grammar = tools_grammar(CALL_FORMATS["qwen3-coder"].form, tools, "required", parallel=False)
    return answer(Check(grammar, "tools"))


@pytest.mark.parametrize(
    ("part", "fits", "others"),
    [
        ({"type": "string", "pattern": "^x"}, ["x", "xy"], ["y", "yx"]),
        ({"type": "string", "pattern": "b", "maxLength": 2}, ["b", "ab"], ["a", "abc"]),
        ({"minLength": 2}, ["ab"], ["a"]),
        ({"$ref": "#/$defs/Colour"}, ["red", "null"], ["blue"]),
        (
            {"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}]},
            ["red", "null", '"null"'],
            ["blue", "None", '"red"'],
        ),
        (
            {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
            ["abc", "1234", "a"],
            ["abcd", "1.5", '"a"'],
        ),
        ({"type": ["string", "array"]}, ["a", "[1]", "[a"], []),
        ({"enum": ["a", 1, None, True, "1", ""]}, ["a", "1", '"1"', "null", ""], ["b", "None"]),
        ({"allOf": [{"type": "string"}, {"type": ["string", "null"]}]}, ["a"], ["null"]),
        ({"oneOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ["c"]),
        ({"oneOf": [{"const": f"a{i}"} for i in range(900)]}, ["a0", "a899"], ["a900"]),
        (TREE, ['{"child":{}}', '{"top":{"x":{}}}'], ['{"child":1}', '{"top":{}}']),
    ],
)
def test_plain_text_follows_the_schema(part: Any, fits: list[str], others: list[str]) -> None:
    schema = {"type": "object", "properties": {"x": part}, "required": ["x"], "$defs": COLOUR}
    found = made(schema, is_strict=True)
    assert not found.error and not found.unenforced
    assert [text for text in fits if not accepts(found.text, call_of_x(text))] == []
    assert [text for text in others if accepts(found.text, call_of_x(text))] == []


def test_types_that_are_unknown_are_refused() -> None:
    with pytest.raises(ValueError, match="the parameter 'x': its type 'thing' is unknown"):
        made({"properties": {"x": {"type": ["string", "thing"]}}})
    assert "Invalid type: thing" in made({"properties": {"x": {"type": "thing"}}}).error


def test_parameters_that_properties_does_not_name() -> None:
    required = {"required": ["x"], "additionalProperties": {"type": "integer"}}
    assert accepts(made(required).text, call_of_x("1"))
    assert not accepts(made(required).text, call_of_x("a"))
    forbidden = made({"properties": {"x": False, "y": {}}})
    assert not accepts(forbidden.text, call_of_x("a"))


OPTIONAL: dict[str, Any] = {"properties": {"a": {}, "b": {}}}


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"properties": {"x": {"type": "string", "format": "date"}}}, ("format date",)),
        ({"properties": {"x": {"pattern": "(^a|b)c"}}}, ("pattern",)),
        ({"properties": {"x": {"type": "string", "pattern": "(?=a)"}}}, ("pattern",)),
        (
            {"properties": {"x": {"anyOf": [{"type": "string"}, {"minimum": 3}]}}},
            (),  # without a type it is a string
        ),
        (
            {
                "properties": {
                    "x": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}
                }
            },
            ("minimum",),
        ),
        (
            {
                "properties": {
                    "x": {
                        "anyOf": [
                            {"type": "string", "maxLength": 3},
                            {"type": "array", "items": {}},
                        ]
                    }
                }
            },
            ("items", "maxLength"),
        ),
        ({"properties": {"x": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}}, ("oneOf",)),
        (OPTIONAL | {"minProperties": 1}, ("minProperties",)),
        (OPTIONAL | {"maxProperties": 1}, ("maxProperties",)),
        (OPTIONAL | {"minProperties": 1, "maxProperties": 2, "required": ["a"]}, ()),
        (OPTIONAL | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ("anyOf",)),
        (OPTIONAL | {"patternProperties": {"^a": {"minLength": 2}}}, ("patternProperties",)),
        ({"$ref": "#/$defs/x", "$defs": {"x": OPTIONAL}}, ("$ref",)),
        ({"properties": {"x": {"not": {}}}}, ("not",)),
    ],
)
def test_what_plain_text_does_not_follow_is_reported(schema: Any, names: tuple[str, ...]) -> None:
    schema = {"type": "object", **schema}
    assert made(schema).unenforced == names
    if names:
        message = f"uses {re.escape(', '.join(names))}, which cannot .*send strict: false"
        with pytest.raises(ValueError, match=rf"tools\[0\].function.parameters {message}"):
            made(schema, is_strict=True)
    else:
        assert not made(schema, is_strict=True).error


@pytest.mark.parametrize("name", FORMATS)
def test_keywords_of_calls_are_named_beside_a_form_too(name: str) -> None:
    form = CALL_FORMATS[name].form
    tools = [tool("a", {"properties": {"x": {"not": {}, "odd name!": 1}}, "minProperties": 2})]
    rules = call_rules(form, tools, True, "schema", {})
    found = answer(Make(structured_outputs({"json": {"contains": {}}}), call_rules=rules))
    assert found.unenforced == ("(other)", "contains", "minProperties", "not")


AMPLIFIED: list[Any] = [
    {"enum": [f"v{i}" for i in range(1000)], "anyOf": [{"minLength": i} for i in range(900)]},
    {"allOf": [{"anyOf": [{"minLength": i + j} for i in range(90)]} for j in range(9)]},
]


def test_references_that_double_take_no_time() -> None:
    steps: dict[str, Any] = {
        f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(60)
    }
    steps |= {"a60": {"type": "string"}, "b": {"anyOf": [{"$ref": "#/$defs/b"}, {"const": "a"}]}}
    schema = {"type": "object", "required": ["x"], "$defs": steps}
    found = made(schema | {"properties": {"x": {"$ref": "#/$defs/a0"}}})
    assert "anyOf" in found.unenforced and accepts(found.text, call_of_x("a"))
    assert max(len(made(schema | {"properties": {"x": part}}).text) for part in AMPLIFIED) < 50_000
    itself = made(schema | {"properties": {"x": {"$ref": "#/$defs/b"}}})
    assert accepts(itself.text, call_of_x("a")) and not accepts(itself.text, call_of_x("b"))


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("asked", [{"json": {"type": "integer"}}, {"regex": "[0-9]+"}])
@pytest.mark.parametrize("ids", [{}, {THINK.begin: 300, THINK.end: 301}])
def test_reasoning_may_stand_before_a_form(
    is_open: bool, asked: dict[str, Any], ids: dict[str, int]
) -> None:
    grammar = grammar_of(structured_outputs(asked))
    prefix = ReasoningPrefix(THINK, is_open, ids)
    whole = after_reasoning(grammar, prefix)
    assert not matcher_of(whole).is_error()
    if not ids:
        begin = "" if is_open else THINK.begin
        assert accepts(whole, f"{begin}It is {{1}}.{THINK.end}\n\n12")
        assert accepts(whole, "12") is not is_open
        assert not accepts(whole, f"{begin}It is 1.{THINK.end}\n\nx")
        assert not accepts(whole, f"{begin}It is 1.")
    assert after_reasoning(grammar, ReasoningPrefix()) == grammar
