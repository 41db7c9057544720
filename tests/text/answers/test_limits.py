"""Time is linear in the answer, and what is held is bounded, also when the answer is hostile."""

import time

import pytest
from text.answers.support import parts_of, setting

from pdserve.text.answers.formats import CALL_FORMATS, REASONING_FORMATS
from pdserve.text.answers.pieces import CallBegin
from pdserve.text.answers.scan import MAX_HELD, MAX_NAME

MILLION = 1_000_000


def repeated(text: str, length: int = MILLION // 5) -> str:
    return text * (length // len(text))


ANSWERS = {
    "content": ("hermes", repeated("some words, <b>bold</b>\n", MILLION)),
    "white space": ("hermes", "<think>" + repeated(" \n", MILLION)),
    "delimiters that are none": ("hermes", repeated("<tool_call>")),
    "half delimiters": ("deepseek-v3", repeated("<｜tool▁calls▁")),
    "a long string": (
        "hermes",
        '<tool_call>{"name":"f","arguments":{"a":"' + repeated("\\n x", MILLION),
    ),
    "brackets": ("hermes", '<tool_call>{"name":"f","arguments":' + repeated("{")),
    "arguments first": ("hermes", '<tool_call>{"arguments":[' + repeated('"x", ')),
    "an endless name": ("hermes", '<tool_call>{"name":"' + repeated("x")),
    "many keys": ("llama3-json", '{"type":' + repeated('1,"id":')),
    "many calls": ("mistral-args", repeated('[TOOL_CALLS]f[ARGS]{"a": 1}')),
    "ends that are none": ("qwen3-coder", "<function=f><parameter=a>" + repeated("</parameter> ")),
    "parameters": (
        "qwen3-coder",
        "<function=f>" + repeated("<parameter=a>\n1\n</parameter>\n"),
    ),
}


@pytest.mark.parametrize("label", ANSWERS)
def test_a_megabyte_takes_seconds(label: str) -> None:
    """Four at most, on cores that others use too; alone it is 0.4 to 1.7. The hostile ones are a
    fifth of a megabyte: most of a test's time would go to them."""
    name, text = ANSWERS[label]
    parser = setting(name, reasoning=REASONING_FORMATS["think"], tools={"f": {}}).parser()
    begun = time.process_time()
    for start in range(0, len(text), 4096):
        parser.push([text[start : start + 4096]])
    parser.finish()
    assert time.process_time() - begun < 4 * len(text) / MILLION + 0.1


@pytest.mark.parametrize("label", ANSWERS)
def test_single_characters_take_linear_time(label: str) -> None:
    name, text = ANSWERS[label]

    def seconds(length: int) -> float:
        parser = setting(name, reasoning=REASONING_FORMATS["think"], tools={"f": {}}).parser()
        begun = time.process_time()
        for char in text[:length]:
            parser.push([char])
        parser.finish()
        return time.process_time() - begun

    assert seconds(16_000) < 8 * seconds(4_000) + 0.1  # quadratic: 16 times


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_name_that_is_too_long_is_no_name(name: str) -> None:
    form = CALL_FORMATS[name].form
    parser = setting(name)
    for length in (MAX_NAME, MAX_NAME + 1):
        text = form.section_begin + form.call_begin + "x" * length + form.before_arguments + "{"
        reasoning, content, calls, num_complete = parts_of(parser.whole(text))
        assert (not reasoning, num_complete) == (True, 0)
        assert (len(calls), content) == ((1, "") if length == MAX_NAME else (0, text))


def test_text_is_held_for_a_name_up_to_a_limit() -> None:
    def first(num_held: int) -> tuple[str, bool]:
        before = '<tool_call>{"arguments": "'
        filler = "x" * (num_held - len(before + '", "name": "f"') + len("<tool_call>"))
        text = f'{before}{filler}", "name": "f"}}</tool_call>'
        pieces = setting("hermes").whole(text)
        return parts_of(pieces)[1], CallBegin(0, "f") in pieces

    assert first(MAX_HELD) == ("", True)
    content, is_call = first(MAX_HELD + 1)
    assert not is_call and content.startswith("<tool_call>") and content.endswith("</tool_call>")
