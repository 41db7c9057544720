"""Pieces of Lark as llguidance reads it: strings, regular expressions, free text with an end.

Knows what none of the pieces are for. Called by `notation`, `tags`, `tools` and `parameters`.
"""

import json
from collections.abc import Mapping


def string(text: str) -> str:
    """A string that matches the text; nothing for the empty text."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""


def escaped(text: str) -> str:
    """The text inside of a regular expression between slashes."""
    return "".join(
        char if char.isalnum() or char == "_" or ord(char) > 127 else f"\\x{ord(char):02x}"
        for char in text
    )


def regex(pattern: str) -> str:
    """A regular expression between slashes; slashes and line breaks in it are escaped."""
    parts: list[str] = []
    is_escaped = False
    for char in pattern:
        if char == "/" and not is_escaped:
            char = "\\/"
        elif char == "\n":
            char = "x0a" if is_escaped else "\\x0a"
        parts.append(char)
        is_escaped = char == "\\" and not is_escaped
    return f"/{''.join(parts)}/"


def without(*texts: str, start: str = "") -> str:
    """A terminal's right side: any text that holds none of the texts. start: it must not begin with
    this either, after whitespace."""
    parts = ["/(?s:.*)/"]
    parts += [f"~/(?s:.*){escaped(text)}(?s:.*)/" for text in texts]
    if start:
        parts.append(f"~/\\s*{escaped(start)}(?s:.*)/")
    return " & ".join(parts)


def delimiter(text: str, token_ids: Mapping[str, int]) -> str:
    """The delimiter as its one token, where the vocabulary has it as a special token; else as
    text."""
    return f"<[{token_ids[text]}]>" if text in token_ids else string(text)


def with_delimiters(text: str, token_ids: Mapping[str, int]) -> str:
    """A sequence that matches the text, with the special tokens in it as tokens."""
    found = [(at, name) for name in token_ids if name and (at := text.find(name)) >= 0]
    if not found:
        return string(text)
    at, name = min(found, key=lambda place: (place[0], -len(place[1])))
    parts = [string(text[:at]), f"<[{token_ids[name]}]>"]
    parts.append(with_delimiters(text[at + len(name) :], token_ids))
    return " ".join(part for part in parts if part)
