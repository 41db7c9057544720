"""Qwen3-Coder's calls: tags for the function and for each parameter.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Source: the chat template of Qwen/Qwen3-Coder-480B-A35B-Instruct. A value is the text between its
tags, without one line break at each side. It ends at a </parameter> that is followed by another
parameter or by the end of the function, so a value may contain that tag. `parameter_types` converts
values to JSON. Strings are passed on as they arrive, other values when they are complete. The
parser also accepts calls of a known function without <tool_call>, and a missing </function>.
"""

import json
import re
from collections.abc import Callable
from enum import Enum, auto

from pdserve.text.answers.native.call_form import CallForm, ParameterForm
from pdserve.text.answers.native.parameter_types import json_of, kinds_of
from pdserve.text.answers.reader import SPACE, Steps
from pdserve.text.answers.scan import Delimiter, Found, Scan

BEGIN = "<tool_call>"
END = "</tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"

FORM = CallForm(
    trigger=BEGIN,
    call_begin=BEGIN + "\n" + FUNCTION,
    before_arguments=">\n",
    after_arguments=FUNCTION_END + "\n" + END,
    between="\n",
    tokens=(BEGIN, END),
    parameter=ParameterForm(PARAMETER, ">\n", "\n" + PARAMETER_END + "\n"),
)

_NAME = re.compile(r"[^\s<>\ud800-\udfff]++")
_KEY = re.compile(r"[^<>\n\ud800-\udfff]++")
_VALUE = re.compile(r"[^\n<\ud800-\udfff]++")


class _Next(Enum):
    """The tag that follows a parameter."""

    PARAMETER = auto()
    FUNCTION_END = auto()
    CALL_END = auto()
    NOTHING = auto()  # no tag that belongs here, or the answer ended


def parse(scan: Scan) -> Steps[None]:
    begin, end = scan.spelling(BEGIN), scan.spelling(END)
    delimiter = yield from scan.content_until(begin, FUNCTION)
    while delimiter is not None:
        found = yield from _call(scan, delimiter)
        if found is Found.OPEN:
            delimiter = yield from scan.text_until((begin, FUNCTION_END, end), _as_written(scan))
            if delimiter is None or delimiter.text == begin:
                continue
            scan.write.raw(delimiter.whole)
        if found is not Found.NO_CALL:
            yield from scan.skip()
            yield from scan.optional(end)
            yield from scan.skip()
        delimiter = yield from scan.content_until(begin, FUNCTION)


def _as_written(scan: Scan) -> Callable[[str], None]:
    def write(text: str) -> None:
        scan.write.raw(text)
        scan.write.made_argument(text)

    return write


def _call(scan: Scan, delimiter: Delimiter) -> Steps[Found]:
    scan.hold(delimiter)
    is_bare = delimiter.text == FUNCTION
    yield from scan.skip()
    if not is_bare and not (yield from scan.optional(FUNCTION)):
        return scan.give_back()
    name = yield from scan.word(_NAME)
    if not scan.accepts(name, is_bare) or not (yield from scan.read.is_next(">")):
        return scan.give_back()
    scan.write.raw(scan.read.one())
    scan.begin(name)
    following = yield from _arguments(scan, name)
    if following is _Next.NOTHING:
        return Found.OPEN
    scan.write.end()
    return Found.CALL


def _arguments(scan: Scan, name: str) -> Steps[_Next]:
    yield from scan.skip()
    following, text = yield from _what_follows(scan)
    if following is _Next.NOTHING:
        scan.read.unread(text)
    else:
        scan.write.raw(text)
    before = "{"
    while following is _Next.PARAMETER:
        key = yield from scan.word(_KEY)
        if not (yield from scan.read.is_next(">")):
            return _Next.NOTHING
        scan.write.raw(scan.read.one())
        scan.write.made_argument(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        following = yield from _value(scan, kinds_of((scan.tools or {}).get(name), key))
    if following is not _Next.NOTHING:
        scan.write.made_argument("{}" if before == "{" else "}")
    return following


def _what_follows(scan: Scan) -> Steps[tuple[_Next, str]]:
    tags = {
        PARAMETER: _Next.PARAMETER,
        FUNCTION_END: _Next.FUNCTION_END,
        scan.spelling(END): _Next.CALL_END,
    }
    text, is_whole = yield from scan.read.literal(tags)
    return tags[text] if is_whole else _Next.NOTHING, text


def _value(scan: Scan, kinds: frozenset[str]) -> Steps[_Next]:
    """Reads a value and the tags after it."""
    value = _Value(scan, kinds)
    read = scan.read
    if (yield from read.is_next("\n")):
        scan.write.raw(read.one())
    line_break = ""  # held back, because a line break before the tag is not part of the value
    while read.has_char or (yield from read.more()):
        if text := read.run(_VALUE):
            value.add(line_break + text)
            line_break = ""
            continue
        if read.char == "\n":
            value.add(line_break)
            line_break = read.one()
            continue
        tag, is_tag = yield from read.literal((PARAMETER_END,))
        if is_tag:
            space = yield from read.take(SPACE)
            following, text = yield from _what_follows(scan)
            if following is not _Next.NOTHING or not (yield from read.more()):
                value.close()
                scan.write.raw(line_break + tag + space + text)
                return following
            read.unread(space + text)
        value.add(line_break + (tag or read.one()))
        line_break = ""
    value.add(line_break)
    value.cut_off()
    return _Next.NOTHING


class _Value:
    """Collects the text of one parameter and writes it as JSON."""

    def __init__(self, scan: Scan, kinds: frozenset[str]) -> None:
        self._scan = scan
        self._kinds = kinds
        self._held: list[str] | None = None if kinds <= {"string"} else []
        if self._held is None:
            scan.write.made_argument('"')

    def add(self, text: str) -> None:
        self._scan.write.raw(text)
        if self._held is not None:
            self._held.append(text)
        elif text:
            shown = self._scan.shown(text)
            self._scan.write.made_argument(json.dumps(shown, ensure_ascii=False)[1:-1])

    def close(self) -> None:
        if self._held is None:
            self._scan.write.made_argument('"')
        else:
            text = self._scan.shown("".join(self._held))
            self._scan.write.made_argument(json_of(text, self._kinds))

    def cut_off(self) -> None:
        """Writes an incomplete value as the model wrote it, because the answer ended inside it."""
        self._scan.write.made_argument("".join(self._held or ()))
