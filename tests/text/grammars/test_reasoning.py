"""Reasoning before a form: what the composed grammar lets through, the parser reads as free
reasoning and content of that form."""

import json
import random
from typing import Any

import pytest
from text.grammars.support import Vocabulary, accepts, walk

from pdserve.text.answers.formats import REASONING_FORMATS
from pdserve.text.answers.parser import AnswerParser
from pdserve.text.answers.pieces import content_of, reasoning_of
from pdserve.text.grammars.checker import GrammarChecker, shared_checker
from pdserve.text.grammars.grammar_of import grammar_of
from pdserve.text.grammars.probe import matcher_of
from pdserve.text.grammars.reasoning import NO_REASONING, ReasoningPrefix, after_reasoning
from pdserve.text.grammars.structured import structured_outputs

THINK = REASONING_FORMATS["think"]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "tag": {"enum": ["<think>", "é\n"]}},
    "required": ["x", "tag"],
    "additionalProperties": False,
}
TAGS = {
    "structures": [{"begin": "<f>", "schema": POINT, "end": "</f>"}],
    "triggers": ["<f"],
}
FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": POINT},
    "json_object": {"json_object": True},
    "spaced": {"json": POINT, "whitespace_pattern": "[ ]?"},
    "regex": {"regex": "[0-9]+|no"},
    "free": {"regex": "(?s:.*)"},
    "choice": {"choice": ["yes", 'no "\\', "<f>"]},
    "lark": {"grammar": '%llguidance {"no_forcing": true}\nstart: rest\nrest: "a" | "b" rest'},
    "ebnf": {"grammar": 'root ::= "x" think\nthink ::= "y"+'},
    "tags": {"structural_tag": TAGS},
}
WORDS = ["<think>", "</think>", "hello", '{"', '": ', "}", " é", "😀", "<f>", "</f>", "yes", "no"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_walks_are_read_as_reasoning_and_a_form(name: str, is_open: bool, has_tokens: bool) -> None:
    special = (THINK.begin, THINK.end) if has_tokens else ()
    vocabulary = Vocabulary(WORDS, special)
    prefix = ReasoningPrefix(THINK, is_open, vocabulary.special)
    asked = structured_outputs(FORMS[name])
    form = grammar_of(asked, prefix.opening)
    whole = after_reasoning(form, prefix)
    num_reasoned = num_ended = 0
    for seed in range(25):
        items = walk(whole, vocabulary, random.Random(seed), length=40)
        if items is None:
            continue
        parser = AnswerParser(reasoning=THINK, starts_in_reasoning=is_open, tokens=special)
        pieces = [*parser.push(items), *parser.finish()]
        assert not parser.is_reasoning, items
        assert accepts(form, content_of(pieces)), (items, pieces)
        num_ended += 1
        num_reasoned += bool(reasoning_of(pieces))
    assert num_ended > 3 and num_reasoned
    assert is_open or name == "tags" or num_reasoned < num_ended


@pytest.mark.parametrize("name", FORMS)
def test_an_open_prompt_must_be_left_first(name: str) -> None:
    form = grammar_of(structured_outputs(FORMS[name]))
    fits = {"json": '{"x": 1, "tag": "<think>"}', "spaced": '{"x":1, "tag":"<think>"}'}
    fits |= {"json_object": "{}", "regex": "12", "free": "12", "choice": "yes"}
    fits |= {"lark": "bba", "ebnf": "xyy", "tags": 'a <f>{"x": 1, "tag": "<think>"}</f>'}
    answer = fits[name]
    assert accepts(form, answer)
    whole = after_reasoning(form, ReasoningPrefix(THINK, is_open=True))
    assert accepts(whole, f"I think.\n{THINK.end}\n\n{answer}")
    assert accepts(whole, f"{THINK.end}{answer}"), "a budget of 0 leaves no reasoning"
    assert not accepts(whole, answer)
    assert not accepts(whole, f"I think.\n{THINK.end}\n\n\x00{answer}\x00") or name in (
        "free",
        "tags",
    )
    assert after_reasoning(form, NO_REASONING) == form


@pytest.mark.processes
@pytest.mark.parametrize("name", ["free", "tags"])
def test_free_text_does_not_open_reasoning(name: str) -> None:
    """The parser would read it all as reasoning, and the answer would have no content."""
    checker = shared_checker()
    for form, is_free in ((NO_REASONING, True), (ReasoningPrefix(THINK), False)):
        text = checker.made(structured_outputs(FORMS[name]), form).text
        assert accepts(text, "\n<think>It is never ended.") is is_free
        assert accepts(text, "It is <think>.")
    assert accepts(text, "<think>It ends.</think>So.")


@pytest.mark.processes
@pytest.mark.parametrize("ids", [{}, {THINK.begin: 300, THINK.end: 301}], ids=["text", "tokens"])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_form_that_nothing_matches_is_refused_after_reasoning_too(
    is_open: bool, ids: dict[str, int]
) -> None:
    prefix = ReasoningPrefix(THINK, is_open, ids)
    with pytest.raises(ValueError, match=r"structured_outputs\.regex .*nothing can match it"):
        shared_checker().made(structured_outputs({"regex": r"[^\s\S]"}), prefix)
    with pytest.raises(ValueError, match=r"structured_outputs\.grammar cannot be used"):
        shared_checker().made(structured_outputs({"grammar": 'start: "a" missing'}), prefix)
    found = shared_checker().made(structured_outputs({"json": {"not": {}}}), prefix)
    assert found.unenforced == ("not",)
    assert not matcher_of(found.text).is_error()


@pytest.mark.processes
def test_a_composed_grammar_is_built_once() -> None:
    checker = GrammarChecker()
    try:
        asked = structured_outputs({"json": POINT})
        prefix = ReasoningPrefix(THINK, True, {THINK.begin: 300, THINK.end: 301})
        text = checker.made(asked, prefix).text
        assert "</think>" not in text and "<[301]>" in text
        assert checker.num_built == 1
        for field in ("logit_rules", "tools"):
            checker.unenforced(text, field)
        checker.made(asked, prefix)
        assert checker.num_built == 1
        assert checker.made(asked).text != text and checker.num_built == 2
    finally:
        checker.close()


def test_the_composed_grammar_keeps_what_it_composes() -> None:
    choices = ["Köln", 'a "b" \\c', "😀"]
    form = grammar_of(structured_outputs({"choice": choices}))
    composed = after_reasoning(form, ReasoningPrefix(THINK))
    assert json.loads(composed)["grammars"][1] == {"lark_grammar": form, "name": "answer"}
    assert "ö" in composed, "what is escaped may be longer than a rule's limit"
    odd = '{"grammars" is no JSON'  # Lark, though it cannot be used
    assert json.loads(after_reasoning(odd, ReasoningPrefix(THINK)))["grammars"][1] == {
        "lark_grammar": odd,
        "name": "answer",
    }
