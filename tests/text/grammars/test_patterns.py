"""Patterns: what the grammar of a string lets through is what ECMA-262 says, whatever has to be
escaped in JSON."""

import json
import re

import pytest
from text.grammars.drawing import PATTERNS, TEXTS
from text.grammars.support import accepts

from pdserve.text.grammars import lark
from pdserve.text.grammars.json_schemas.patterns import searched, whole
from pdserve.text.grammars.probe import Make, answer
from pdserve.text.grammars.structured import StructuredRequest

# (pattern, a text that it is found in, one that it is not found in)
CASES = [
    ('^[^"]*$', "a\\b", 'a"b'),
    (r"^[^\\]*$", 'a"b', "\\"),
    (r'^[^"\\]+$', "a\nb", 'a"'),
    ('^[^"\n]*$', "a\\", 'a"'),
    (r'^[^"\t]*$', "a\n\\", 'a"'),
    ("^[^a]*$", '"\\', "a"),
    (r"^\w$", "_", "é"),
    (r"^\d$", "7", "٧"),
    (r"^[\w-]+$", "a-b", 'a"'),
    (r"^[^\w]$", '"', "a"),
    (r"^[\x00-!]$", "!", '"'),
    (r"^\P{Po}$", "a", '"'),
    (r"^[\p{Lu}\d]+$", "É1", "é"),
    (r"^(?:[^\\]|\\x)$", "a", "\\"),
    (r"^(?:[^\\]|\\x)$", "\\x", "\\y"),
    (r"^\s$", "\ufeff", "\u0085"),
    (r"^[^\S]$", "\u00a0", "a"),
    (r"^[[]$", "[", "]"),
    (r"^[a&&b]$", "&", "c"),
    (r"^[+--]$", ",", "."),
    (r"^[a\-c]$", "-", "b"),
    (r"^[a-\d]$", "-", "b"),
    (r"^[\b]$", "\b", "b"),
    (r"^\u0041\x42\u{43}\ud83d\ude00$", "ABC😀", "ABC"),
    (r"^\ca$|^\/\<$", "/<", "\\/<"),
    ("^{a}$", "{a}", "a"),
    ("^a{2}$", "aa", "a{2}"),
    (r"^(?<stop>a)b$", "ab", "a"),
    ("(?i)^A$", "a", "b"),
    ("^a|b$", "ax", "bx"),
    ("(a|^b)", "xa", "xb"),
    ("b", "\nb\n", "a"),
    (r"\Aa\z", "a", "ab"),
]


def lets_through(pattern: str, text: str) -> bool:
    found = answer(Make(StructuredRequest("json", {"type": "string", "pattern": pattern}, "f")))
    assert not found.error and not found.unenforced
    return accepts(found.text, json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize(("pattern", "fits", "other"), CASES)
def test_patterns_mean_what_ecma_262_says(pattern: str, fits: str, other: str) -> None:
    assert lets_through(pattern, fits)
    assert not lets_through(pattern, other)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_agree_with_python(pattern: str) -> None:
    expected = re.compile(pattern.replace("$", r"\Z"), re.ASCII)
    for text in TEXTS:
        assert lets_through(pattern, text) == bool(expected.search(text)), text


@pytest.mark.parametrize(("pattern", "fits", "other"), CASES)
def test_whole_matches_where_the_pattern_is_found(pattern: str, fits: str, other: str) -> None:
    expression = whole(pattern)
    if expression is None:
        assert "|^" in pattern
        return
    grammar = f"start: TEXT\nTEXT: {lark.regex(expression)}\n"
    assert accepts(grammar, fits) and not accepts(grammar, other)


@pytest.mark.parametrize("pattern", ["(^a|b)$", r"a\b", "(?=a)a", r"(a)\1", "a(?i)b"])
def test_what_no_expression_for_whole_texts_can_do(pattern: str) -> None:
    assert whole(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("[]a]", r"write \\\]"),
        ("[^]", r"write \\\]"),
        ("[a", "add ]"),
        ("[z-a]", "swap the two"),
        ("(?x)a b", "without blanks"),
        (r"\q", "write the character"),
        ("a\\", "write the character"),
        (r"\ud800", "leave it out"),
    ],
)
def test_patterns_that_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        searched(pattern)
    found = answer(Make(StructuredRequest("json", {"pattern": pattern}, "f")))
    assert found.error.startswith("f cannot be enforced: the pattern ")
