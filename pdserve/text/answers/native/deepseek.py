"""DeepSeek's calls: V3 and R1 write a function's name and fenced JSON, V3.1 name and JSON alone.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}
    <｜tool▁call▁end｜><｜tool▁calls▁end｜>   (one line)

Source: the chat templates of deepseek-ai/DeepSeek-V3-0324 and DeepSeek-V3.1. The parser reads both
forms, and also calls without the outer tokens.
"""

import re

from pdserve.text.answers.native.call_form import CallForm
from pdserve.text.answers.native.json_calls import json_value
from pdserve.text.answers.reader import Steps
from pdserve.text.answers.scan import Delimiter, Found, Scan

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```json"
_TOKENS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)

FENCED_FORM = CallForm(
    trigger=CALLS_BEGIN,
    section_begin=CALLS_BEGIN,
    call_begin=CALL_BEGIN + "function" + SEPARATOR,
    before_arguments="\n" + FENCE + "\n",
    after_arguments="\n```" + CALL_END,
    between="\n",
    section_end=CALLS_END,
    tokens=_TOKENS,
)
PLAIN_FORM = CallForm(
    trigger=CALLS_BEGIN,
    section_begin=CALLS_BEGIN,
    call_begin=CALL_BEGIN,
    before_arguments=SEPARATOR,
    after_arguments=CALL_END,
    section_end=CALLS_END,
    tokens=_TOKENS,
)

_WORD = re.compile(r"[^\s<>{`\ud800-\udfff]++")
_AFTER = re.compile(r"[\s`]++")


def parse(scan: Scan) -> Steps[None]:
    calls_begin, begin = scan.spelling(CALLS_BEGIN), scan.spelling(CALL_BEGIN)
    delimiter = yield from scan.content_until(calls_begin, begin)
    while delimiter is not None:
        scan.hold(delimiter)
        yield from scan.skip()
        if delimiter.text == calls_begin and not (yield from scan.optional(begin)):
            scan.give_back()
            delimiter = yield from scan.content_until(calls_begin, begin)
            continue
        found = yield from _call(scan)
        delimiter = yield from _after_call(scan, found)
        if delimiter is None:
            delimiter = yield from scan.content_until(calls_begin, begin)


def _call(scan: Scan) -> Steps[Found]:
    name = yield from scan.word(_WORD)
    yield from scan.skip()
    if not (yield from scan.optional(scan.spelling(SEPARATOR))):
        return scan.give_back()
    yield from scan.skip()
    if not (yield from scan.read.is_next("{")):  # the word was the type, "function"
        name = yield from scan.word(_WORD)
        yield from scan.skip()
        yield from scan.optional(FENCE)
        yield from scan.skip()
    if not scan.accepts(name) or not (yield from scan.read.is_next("{")):
        return scan.give_back()
    scan.begin(name)
    if not (yield from json_value(scan.read, scan.write.argument)):
        return Found.OPEN
    scan.write.end()
    return Found.CALL


def _after_call(scan: Scan, found: Found) -> Steps[Delimiter | None]:
    """Reads what follows a call. Returns the begin delimiter of the next call if that follows
    directly."""
    begin, calls_end = scan.spelling(CALL_BEGIN), scan.spelling(CALLS_END)
    end = scan.spelling(CALL_END)
    if found is Found.NO_CALL:
        return None
    if found is Found.OPEN:
        delimiter = yield from scan.arguments_until(begin, end, calls_end)
        if delimiter is None or delimiter.text == begin:
            return delimiter
        scan.write.raw(delimiter.whole)
    else:
        yield from scan.skip(_AFTER)
        yield from scan.optional(end)
    yield from scan.skip()
    text, is_begin = yield from scan.read.literal((begin,))
    if is_begin:
        return Delimiter("", text)
    scan.read.unread(text)
    yield from scan.optional(calls_end)
    yield from scan.skip()
    return None
