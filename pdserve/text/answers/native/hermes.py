"""Hermes' calls: one JSON object between tags. Hermes 2 and 3, Qwen2.5, Qwen3 and QwQ write them.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Source: github.com/NousResearch/Hermes-Function-Calling and the chat templates of Qwen2.5 and Qwen3.
The parser also accepts "parameters" for "arguments", any order of keys, several objects between
two tags, a list of objects, a missing end tag and extra closing brackets.
"""

import re

from pdserve.text.answers.native.call_form import CallForm
from pdserve.text.answers.native.json_calls import json_calls
from pdserve.text.answers.reader import Steps
from pdserve.text.answers.scan import Found, Scan

BEGIN = "<tool_call>"
END = "</tool_call>"

FORM = CallForm(
    trigger=BEGIN,
    call_begin=BEGIN + '\n{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}\n" + END,
    between="\n",
    tokens=(BEGIN, END),
)

_BEFORE = re.compile(r"[\s\[]++")
_BETWEEN = re.compile(r"[\s,;\]})]++")


def parse(scan: Scan) -> Steps[None]:
    begin, end = scan.spelling(BEGIN), scan.spelling(END)
    delimiter = yield from scan.content_until(begin)
    while delimiter is not None:
        scan.hold(delimiter)
        found = yield from json_calls(scan, _BEFORE, _BETWEEN)
        if found is Found.OPEN:
            delimiter = yield from scan.arguments_until(begin, end)
            if delimiter is None or delimiter.text == begin:
                continue
            scan.write.raw(delimiter.whole)
        elif found is Found.CALL:
            yield from scan.optional(end)
        if found is not Found.NO_CALL:
            yield from scan.skip()
        delimiter = yield from scan.content_until(begin)
