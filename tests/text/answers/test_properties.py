"""Tests what holds for every answer in every format: cuts change nothing, nothing is lost, and the
output is what a writer wrote."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.answers.support import (
    WRITERS,
    Call,
    Setting,
    assert_nothing_lost,
    characters,
    parts_of,
    setting,
    without_syntax,
)

from pdserve.text.answers import scan
from pdserve.text.answers.formats import CALL_FORMATS, REASONING_FORMATS
from pdserve.text.answers.pieces import AnyPiece, Item

THINK = REASONING_FORMATS["think"]
LABELS = list(WRITERS)

# Delimiters, whole and in part, and what breaks careless parsers of JSON and XML
SNIPPETS = sorted(
    {token for form in CALL_FORMATS.values() for token in form.form.tokens}
    | {form.form.call_begin for form in CALL_FORMATS.values()}
    | {"<think>", "</think>", "<function=f>", "</function>", "<parameter=", "</parameter>"}
    | {"<tool_", "[TOOL", "</para", "<｜tool▁call", "```json\n", "```", '"}}', '", "', "\\", '\\"'}
    | {
        "{",
        "}",
        "[",
        "]",
        "<",
        ">",
        "'",
        '"',
        ":",
        ",",
        ";",
        " ",
        "\n",
        "\n\n",
        "\t",
        "é",
        "漢",
        "😀",
    }
)
# what a JSON dump may look like
DUMPS: list[dict[str, Any]] = [
    {},
    {"ensure_ascii": False},
    {"indent": 2},
    {"separators": (",", ":")},
]
SEEDS = 30


class Draw(random.Random):
    """Draws answers. Not by hypothesis: ten times as many in the same time."""

    def messy(self) -> str:
        some = self.choices([*SNIPPETS, "word", "x y", "\x07", "\u2028", "0"], k=self.randrange(6))
        return "".join(some)

    def plain(self, forbidden: Sequence[str]) -> str:
        """Text that is no delimiter, though it may begin like one."""
        text = self.messy().strip()
        return text if not any(part in text for part in forbidden) else self.plain(forbidden)

    def name(self) -> str:
        return self.choice("abXY_") + "".join(self.choices("abz09_-", k=self.randrange(10)))

    def value(self, depth: int = 2) -> Any:
        kinds = [self.messy, self.messy, self.random, lambda: self.randrange(-9, 1 << 70)]
        kinds += [lambda: None, lambda: self.choice([True, False])]
        if depth:
            kinds += [lambda: [self.value(depth - 1) for _ in range(self.randrange(3))]]
            kinds += [
                lambda: {self.messy(): self.value(depth - 1) for _ in range(self.randrange(3))}
            ]
        return self.choice(kinds)()

    def arguments(self, are_xml: bool) -> str:
        """With XML everything is a string, and no value holds the end of a call: then the tags say
        the same again."""
        values: dict[str, Any] = {}
        for _ in range(self.randrange(4)):
            if are_xml:
                values[self.name()] = self.plain(["</parameter>"])
            else:
                values[self.messy()] = self.value()
        return json.dumps(values, **self.choice(DUMPS))


@dataclass
class Answer:
    parser: Setting
    text: str
    reasoning: str
    content: str  # before the calls
    calls: list[Call]


def draw_answer(label: str, draw: Draw) -> Answer:
    format_name, writer = WRITERS[label]
    is_xml = format_name == "qwen3-coder"
    calls = [(draw.name(), draw.arguments(is_xml)) for _ in range(draw.randint(1, 3))]
    parser = setting(
        format_name,
        reasoning=THINK,
        tools={name: {} for name, _ in calls},
        has_tokens=draw.random() < 0.5,
        starts_in_reasoning=draw.random() < 0.5,
    )
    assert parser.calls is not None
    forbidden = (*parser.calls.form.tokens, "<think>", "</think>", "<function=")
    reasoning = draw.plain(forbidden)
    content = "" if label == "llama" else draw.plain(forbidden)
    if content.startswith("{"):
        content = "Here: " + content
    if reasoning or parser.starts_in_reasoning:
        begin = "" if parser.starts_in_reasoning else draw.choice(["", "\n"]) + "<think>"
        before = f"{begin}\n{reasoning}\n</think>\n\n"
    else:
        before = draw.choice(["", "<think></think>", "<think>\n\n</think>\n\n"])
    text = before + (content and content + draw.choice(["", "\n"])) + writer(calls)
    return Answer(parser, text, reasoning, content, calls)


def cut(items: Sequence[Item], places: Sequence[int]) -> list[Sequence[Item]]:
    finest = characters(items)
    at = sorted({0, len(finest), *(place % (len(finest) + 1) for place in places)})
    return [finest[a:b] for a, b in pairwise(at)]


def comparable(parser: Setting, pieces: list[AnyPiece]) -> list[AnyPiece]:
    """Where arguments are made, the syntax that they are made from comes between their slices."""
    is_made = parser.calls is not None and parser.calls.name == "qwen3-coder"
    return without_syntax(pieces) if is_made else pieces


def check_cuts(parser: Setting, text: str, places: Sequence[int]) -> list[AnyPiece]:
    items = parser.items(text)
    whole = parser.run([items])
    expected = comparable(parser, whole)
    assert comparable(parser, parser.run(cut(items, places))) == expected
    assert comparable(parser, parser.run([[item] for item in characters(items)])) == expected
    assert parser.calls is not None
    assert_nothing_lost(parser.calls.name, text, whole)
    return whole


@pytest.mark.parametrize("label", LABELS)
def test_what_was_written_comes_out_however_it_is_cut(label: str) -> None:
    for seed in range(SEEDS):
        draw = Draw(f"{label} {seed}")
        answer = draw_answer(label, draw)
        pieces = check_cuts(answer.parser, answer.text, draw.choices(range(1 << 12), k=6))
        reasoning, content, calls, num_complete = parts_of(pieces)
        assert (reasoning, content) == (answer.reasoning, answer.content), seed
        assert num_complete == len(calls) == len(answer.calls), seed
        if WRITERS[label][0] == "qwen3-coder":
            calls = [(name, json.dumps(json.loads(made))) for name, made in calls]
            answer.calls = [(name, json.dumps(json.loads(text))) for name, text in answer.calls]
        assert calls == answer.calls, seed


@pytest.mark.parametrize("label", LABELS)
def test_a_broken_answer_loses_nothing_and_cuts_change_nothing(label: str) -> None:
    for seed in range(SEEDS):
        draw = Draw(f"{label} {seed} broken")
        answer = draw_answer(label, draw)
        text = answer.text
        for _ in range(draw.randint(1, 3)):
            start = draw.randrange(len(text) + 1)
            end = min(len(text), start + draw.randrange(8))
            text = text[:start] + draw.choice(["", *SNIPPETS]) + text[end:]
        answer.parser.parallel = draw.random() < 0.5
        pieces = check_cuts(answer.parser, text, draw.choices(range(1 << 12), k=6))
        assert answer.parser.parallel or len(parts_of(pieces)[2]) <= 1, seed


@pytest.mark.parametrize("label", LABELS)
def test_cuts_change_nothing_where_the_limits_are(
    label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(SEEDS // 2):
        draw = Draw(f"{label} {seed} limits")
        monkeypatch.setattr(scan, "MAX_HELD", draw.randrange(60))
        answer = draw_answer(label, draw)
        check_cuts(answer.parser, answer.text, draw.choices(range(1 << 12), k=6))


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("has_tokens", [False, True])
def test_an_answer_cut_off_anywhere(label: str, has_tokens: bool) -> None:
    """Two halves at every place, and the first half alone: what has come out stays."""
    format_name, writer = WRITERS[label]
    calls = [("f", '{"a": "é\\"}]</"}'), ("g", '{"b": "x\\n"}')]
    content = "" if label == "llama" else "Sure <t.\n"
    text = "<think>\nhm\n</think>\n\n" + content + writer(calls)
    tools: dict[str, dict[str, Any]] = {"f": {}, "g": {}}
    parser = setting(format_name, reasoning=THINK, has_tokens=has_tokens, tools=tools)
    items = characters(parser.items(text))
    whole = parser.shown(text)
    assert len(parts_of(whole)[2]) == 2
    for place in range(len(items) + 1):
        assert without_syntax(parser.run([items[:place], items[place:]])) == whole
        before = parser.run([items[:place]])
        shown = "".join(i if isinstance(i, str) else i.text for i in items[:place])
        assert_nothing_lost(format_name, shown, before)
        assert parts_of(before)[3] <= 2
        streamed = parts_of(parser.parser().push(items[:place]))
        assert parts_of(whole)[0].startswith(streamed[0])
        assert parts_of(whole)[1].startswith(streamed[1])
        for (name, arguments), (all_name, all_arguments) in zip(
            streamed[2], parts_of(whole)[2], strict=False
        ):
            assert name == all_name and all_arguments.startswith(arguments)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=4)), max_size=8).map("".join),
    st.lists(st.integers(0, 100), max_size=4),
    st.sampled_from(list(CALL_FORMATS)),
    st.booleans(),
)
def test_any_text_at_all(text: str, places: list[int], name: str, has_tokens: bool) -> None:
    check_cuts(setting(name, reasoning=THINK, has_tokens=has_tokens), text, places)
