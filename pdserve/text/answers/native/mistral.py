"""Mistral's calls, which differ by the version of the tokenizer.

    v2 to v7:  [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {...}]
    v11:       [TOOL_CALLS]get_weather[CALL_ID]abcDEF123[ARGS]{"city": "Paris"}[TOOL_CALLS]...
    v13:       [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]...

Source: mistral-common's instruct tokenizers and docs.mistral.ai. The parser reads all of these
forms, whatever the template says, and also v11's form without [ARGS]. The ids that the model writes
are dropped as syntax, because the server makes ids. Text after the arguments is content.
"""

import re

from pdserve.text.answers.native.call_form import CallForm
from pdserve.text.answers.native.json_calls import json_calls, json_value
from pdserve.text.answers.reader import Steps
from pdserve.text.answers.scan import Found, Scan

CALLS = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"

ARRAY_FORM = CallForm(
    trigger=CALLS,
    section_begin=CALLS + " [",
    call_begin='{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}",
    between=", ",
    section_end="]",
    tokens=(CALLS,),
)
NAMED_FORM = CallForm(
    trigger=CALLS,
    call_begin=CALLS,
    before_arguments=ARGS,
    after_arguments="",
    tokens=(CALLS, ARGS, CALL_ID),
)

_BEFORE = re.compile(r"[\s\[]++")
_BETWEEN = re.compile(r"[\s,;\]]++")
_NAME = re.compile(r'[^\s\[\]{}"<>\ud800-\udfff]++')
_ID = re.compile(r"\w++")


def parse(scan: Scan) -> Steps[None]:
    calls = scan.spelling(CALLS)
    delimiter = yield from scan.content_until(calls)
    while delimiter is not None:
        scan.hold(delimiter)
        yield from scan.skip(_BEFORE)
        if (yield from scan.read.is_next("{")):
            found = yield from json_calls(scan, _BEFORE, _BETWEEN)
        else:
            found = yield from _named_call(scan)
        if found is Found.OPEN:
            delimiter = yield from scan.arguments_until(calls)
            continue
        if found is Found.CALL:
            yield from scan.skip()
        delimiter = yield from scan.content_until(calls)


def _named_call(scan: Scan) -> Steps[Found]:
    name = yield from scan.word(_NAME)
    yield from scan.skip()
    if (yield from scan.optional(scan.spelling(CALL_ID))):
        yield from scan.word(_ID)
        yield from scan.skip()
    yield from scan.optional(scan.spelling(ARGS))
    yield from scan.skip()
    if not scan.accepts(name) or not (yield from scan.read.is_next("{")):
        return scan.give_back()
    scan.begin(name)
    if not (yield from json_value(scan.read, scan.write.argument)):
        return Found.OPEN
    scan.write.end()
    return Found.CALL
