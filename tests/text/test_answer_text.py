"""An answer's tokens into pieces: the same however tokens come, stop strings in content alone,
tokens of reasoning counted."""

import random
from typing import Any

import pytest
from text.answers.support import Setting
from text.backends import byte_level_backend

from pdserve.text.answer_text import AnswerText
from pdserve.text.answers.formats import CALL_FORMATS, REASONING_FORMATS
from pdserve.text.answers.pieces import (
    CallBegin,
    Content,
    Piece,
    calls_of,
    content_of,
    joined,
    reasoning_of,
)
from pdserve.text.answers.reading import AnswerReading
from pdserve.text.stop import StopStrings
from pdserve.text.tokenizer import Tokenizer

DELIMITERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
CALL = '<tool_call>{"name": "f", "arguments": {"x": "stop"}}</tool_call>'
ANSWERS = [
    "<think>so stop 🙂</think>I do it stop now",
    "<think>stop</think>It is st" + CALL + "op, then stop",
    "st" + CALL + CALL,
    "Grüße 你好 st",
    "<think>endless st",
]


@pytest.fixture(scope="module", params=["none", "added", "special"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Delimiters are text, or tokens that skip_special_tokens hides or not."""
    delimiters = () if request.param == "none" else DELIMITERS
    return Tokenizer(byte_level_backend(*delimiters, special=request.param == "special"))


def reading_of(tokenizer: Tokenizer, **more: Any) -> AnswerReading:
    added = tokenizer.added_tokens
    delimiters = {i: text for i, text in added.items() if text in DELIMITERS}
    return AnswerReading(
        CALL_FORMATS["hermes"], REASONING_FORMATS["think"], delimiters=delimiters, **more
    )


Read = tuple[list[Piece], str | None, int, int]


def read(
    tokenizer: Tokenizer, ids: list[int], ends: list[int], reason: str, stops: list[str]
) -> Read:
    """(pieces without ids, the stop string, tokens up to it, tokens of reasoning) of tokens that
    come in groups, which end at these places."""
    text = AnswerText(tokenizer, reading_of(tokenizer), stops=StopStrings(stops) if stops else None)
    pieces: list[Piece] = []
    start = 0
    for end in [*ends, len(ids)]:
        found, stop, length = text.push(ids[start:end], reason if end == len(ids) else None)
        pieces += found
        if stop is not None or end == len(ids):
            break
        start = end
    shown = [CallBegin(p.index, p.name) if isinstance(p, CallBegin) else p for p in pieces]
    return joined(shown), stop, length, text.num_reasoning_tokens


@pytest.mark.parametrize("stops", [[], ["stop"], ["st"], ["so", "op, t"]])
@pytest.mark.parametrize("answer", ANSWERS)
def test_how_tokens_come_changes_nothing(
    tokenizer: Tokenizer, answer: str, stops: list[str]
) -> None:
    ids = tokenizer.encode(answer)
    rng = random.Random(answer)
    expected = read(tokenizer, ids, list(range(1, len(ids))), "length", stops)
    for _ in range(20):
        ends = sorted(rng.sample(range(1, len(ids)), rng.randint(0, min(6, len(ids) - 1))))
        assert read(tokenizer, ids, ends, "length", stops) == expected
    if not stops:
        setting = Setting(
            CALL_FORMATS["hermes"],
            REASONING_FORMATS["think"],
            has_tokens=any(text in DELIMITERS for text in tokenizer.added_tokens.values()),
        )
        assert expected[0] == setting.shown(answer)


def test_stop_strings_see_content_alone(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode(ANSWERS[0])
    pieces, stop, length, _ = read(tokenizer, first, [], "stop", ["stop"])
    assert (stop, content_of(pieces)) == ("stop", "I do it ")
    assert reasoning_of(pieces) == "so stop 🙂" and length < len(first)
    second = tokenizer.encode(ANSWERS[1])
    pieces, stop, _, _ = read(tokenizer, second, [], "length", ["stop"])
    assert (stop, content_of(pieces)) == ("stop", "It is stop, then ")
    [call] = calls_of(pieces)
    assert call.arguments == '{"x": "stop"}' and call.is_complete


def test_the_last_token_of_an_answer_that_stopped_is_not_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a b c")
    [piece] = read(tokenizer, ids, [], "stop", [])[0]
    assert piece == Content(tokenizer.decode(ids[:-1]))
    shown = AnswerText(tokenizer, reading_of(tokenizer), include_stop=True).push(ids, "stop")
    assert shown[0] == [Content("a b c")]


def test_reasoning_counts_its_tokens(tokenizer: Tokenizer) -> None:
    thought = tokenizer.encode("hm, well</think>")
    ids = [*thought, *tokenizer.encode("Yes.")]
    text = AnswerText(tokenizer, reading_of(tokenizer, starts_in_reasoning=True))
    text.push(ids, "length")
    # where the delimiter is text, what it shares a token with counts too
    assert len(thought) <= text.num_reasoning_tokens <= len(thought) + 1


def test_ids_of_calls_fit_the_model(tokenizer: Tokenizer) -> None:
    text = AnswerText(tokenizer, reading_of(tokenizer))
    pieces, _, _ = text.push(tokenizer.encode(CALL * 2), "length")
    ids = [call.id for call in calls_of(pieces)]
    assert len(set(ids)) == 2 and all(i.startswith("call_") for i in ids)
    short = AnswerReading(CALL_FORMATS["mistral-args"]).new_call_id()
    assert len(short) == 9 and short.isalnum()


def test_an_unfinished_character_ends_before_a_delimiter(tokenizer: Tokenizer) -> None:
    if not any(text in DELIMITERS for text in tokenizer.added_tokens.values()):
        pytest.skip("delimiters are text here, which ends no character")
    begun = tokenizer.encode("🙂", add_special_tokens=False)[:1]
    assert tokenizer.token_bytes(begun[0]) != "🙂".encode()
    pieces, *_ = read(tokenizer, [*begun, *tokenizer.encode(CALL + "🙂", False)], [], "length", [])
    assert pieces[0] == Content("\ufffd") and content_of(pieces) == "\ufffd🙂"
    assert len(calls_of(pieces)) == 1
