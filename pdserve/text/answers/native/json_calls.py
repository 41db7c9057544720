"""Calls that are written as JSON objects with a name and arguments, in any order of keys.

Arguments are passed on as the model wrote them. A value ends where its brackets and quotes close.
Nothing else of JSON's grammar is checked. The parsers of formats call this module.
"""

import json
import re
from collections.abc import Callable

from pdserve.text.answers.reader import Reader, Steps
from pdserve.text.answers.scan import MAX_NAME, Found, Scan

ARGUMENT_KEYS = ("arguments", "parameters")
# keys that may stand before the name if only the name tells a call from ordinary JSON
_KNOWN_KEYS = ("name", "type", "id", *ARGUMENT_KEYS)

_STRING_TEXT = re.compile(r'[^"\\]++')
_SCALAR = re.compile(r"[\w.+\-]++")
_BETWEEN = re.compile(r"[\w\s:,.+\-]++")
_BEFORE_KEY = re.compile(r"[\s,]++")
_CLOSERS = {"{": "}", "[": "]"}


def json_value(read: Reader, write: Callable[[str], None]) -> Steps[bool]:
    """Reads one value and writes it in slices as they arrive. Returns False if the value is broken
    before the next character, or if the answer ends in it."""
    closers: list[str] = []
    while read.has_char or (yield from read.more()):
        char = read.char
        if char == '"':
            if not (yield from _string(read, write)):
                return False
        elif char in _CLOSERS:
            closers.append(_CLOSERS[char])
            write(read.one())
        elif closers and char == closers[-1]:
            closers.pop()
            write(read.one())
        elif closers and (text := read.run(_BETWEEN)):
            write(text)
        elif not closers and (text := (yield from read.take(_SCALAR))):
            write(text)
            return (yield from read.more())  # at the answer's end the scalar may be cut off
        else:
            return False
        if not closers:
            return True
    return False


def _string(read: Reader, write: Callable[[str], None]) -> Steps[bool]:
    write(read.one())
    is_escaped = False
    while read.has_char or (yield from read.more()):
        if not is_escaped and (text := read.run(_STRING_TEXT)):
            write(text)
            continue
        char = read.one()
        write(char)
        if char == '"' and not is_escaped:
            return True
        is_escaped = char == "\\" and not is_escaped
    return False


def json_calls(
    scan: Scan, before: re.Pattern[str], between: re.Pattern[str], must_be_known: bool = False
) -> Steps[Found]:
    """Reads one object after another as long as they are calls. The text must be held already.

    - before: Characters that may stand before the first object.
    - between: Characters that may stand between objects.

    Returns the finding of the last object, or NO_CALL if there was no call.
    """
    last = Found.NO_CALL
    yield from scan.skip(before)
    while (yield from scan.read.is_next("{")):
        if last is not Found.NO_CALL:
            scan.hold()
        found = yield from _call_object(scan, must_be_known)
        if found is not Found.CALL:
            return last if found is Found.NO_CALL else found
        last = found
        yield from scan.skip(between)
    return scan.give_back() if last is Found.NO_CALL else last


def _call_object(scan: Scan, must_be_known: bool) -> Steps[Found]:
    write = scan.write
    write.raw(scan.read.one())
    has_arguments = False
    while (key := (yield from _key(scan))) is not None:
        if key == "name" and write.is_holding:
            name = yield from _short_string(scan)
            if name is None or not scan.accepts(name, must_be_known):
                return scan.give_back()
            scan.begin(name)
            if has_arguments:
                write.end()
        elif key in ARGUMENT_KEYS and not has_arguments:
            if not (yield from json_value(scan.read, write.argument)):
                return scan.give_back() if write.is_holding else Found.OPEN
            has_arguments = True
            if not write.is_holding:
                write.end()
        elif write.is_holding and must_be_known and key not in _KNOWN_KEYS:
            return scan.give_back()
        elif not (yield from json_value(scan.read, write.raw)):
            break
    if write.is_holding:
        return scan.give_back()
    if (yield from scan.read.is_next("}")):
        write.raw(scan.read.one())
        if not has_arguments:
            write.made_argument("{}")
            write.end()
        return Found.CALL
    return Found.CALL if has_arguments else Found.OPEN


def _key(scan: Scan) -> Steps[str | None]:
    """Reads the next key and its colon. Returns None if the object closes here, is broken or is
    cut off."""
    yield from scan.skip(_BEFORE_KEY)
    key = yield from _short_string(scan)
    yield from scan.skip()
    if key is None or not (yield from scan.read.is_next(":")):
        return None
    scan.write.raw(scan.read.one())
    yield from scan.skip()
    return key


def _short_string(scan: Scan) -> Steps[str | None]:
    """Reads and decodes a string of at most MAX_NAME characters. Returns None if there is none."""
    read = scan.read
    if not (yield from read.is_next('"')):
        return None
    text = read.one()
    is_escaped = False
    while (room := MAX_NAME + 2 - len(text)) and (read.has_char or (yield from read.more())):
        if not is_escaped and (part := read.run(_STRING_TEXT, room)):
            text += part
            continue
        char = read.one()
        text += char
        if char == '"' and not is_escaped:
            break
        is_escaped = char == "\\" and not is_escaped
    scan.write.raw(text)
    try:
        return json.loads(text)
    except ValueError:  # too long, cut off or a bad escape
        return None
