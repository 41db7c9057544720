"""Llama 3.1's JSON calls (also 3.2 and 3.3): the answer is the object.

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"type": "function", "name": "trending_songs", "parameters": {"n": "10"}}

Source: llama.com/docs/model-cards-and-prompt-formats/llama3_1. Without the tag, a call must stand
at the start of the answer and have a known function's name, because users also ask for JSON as
content. Several objects may follow each other, with or without ";" between them. Text after the tag
that is no such object (code for the built-in tools) is content.
"""

import re

from pdserve.text.answers.native.call_form import CallForm
from pdserve.text.answers.native.json_calls import json_calls
from pdserve.text.answers.reader import SPACE, Steps
from pdserve.text.answers.scan import Delimiter, Found, Scan

PYTHON_TAG = "<|python_tag|>"

FORM = CallForm(
    trigger='{"name": "',
    call_begin='{"name": "',
    before_arguments='", "parameters": ',
    after_arguments="}",
    between="; ",
    tokens=(PYTHON_TAG,),
    only_at_start=True,
)

_BETWEEN = re.compile(r"[\s;]++")


def parse(scan: Scan) -> Steps[None]:
    tag = scan.spelling(PYTHON_TAG)
    delimiter: Delimiter | None = Delimiter("", "")
    while delimiter is not None:
        scan.hold(delimiter)
        found = yield from json_calls(scan, SPACE, _BETWEEN, must_be_known=True)
        if found is Found.OPEN:
            delimiter = yield from scan.arguments_until(tag)
        else:
            delimiter = yield from scan.content_until(tag)
