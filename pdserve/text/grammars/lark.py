"""Pieces of Lark as llguidance reads it: strings, regular expressions, free text with an end,
remarks.

This module does not know what the pieces are for. `notation`, `tags`, `tools` and `parameters` call
it.
"""

import json
import re
from collections.abc import Collection, Mapping

_PLAIN = re.compile(r"[\w$@.:/+ -]{1,64}", re.ASCII)
_REMARK = re.compile(r"// not enforced: ([\w$@.:/+(), -]+)", re.ASCII)


def string(text: str) -> str:
    """Returns a Lark string that matches the text. The empty text gives ""."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""


def escaped(text: str) -> str:
    """Escapes the text for use in a regular expression between slashes."""
    return "".join(
        char if char.isalnum() or char == "_" or ord(char) > 127 else f"\\x{ord(char):02x}"
        for char in text
    )


def regex(pattern: str) -> str:
    """Returns the regular expression between slashes, with its slashes and line breaks escaped."""
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
    """Returns a terminal's right side: any text that contains none of `texts`. With `start`, it
    must also not begin with that after whitespace."""
    parts = ["/(?s:.*)/"]
    parts += [f"~/(?s:.*){escaped(text)}(?s:.*)/" for text in texts]
    if start:
        parts.append(f"~/\\s*{escaped(start)}(?s:.*)/")
    return " & ".join(parts)


def delimiter(text: str, token_ids: Mapping[str, int]) -> str:
    """Returns the delimiter as one token if the vocabulary has it as a special token, else as
    text."""
    return f"<[{token_ids[text]}]>" if text in token_ids else string(text)


def with_delimiters(text: str, token_ids: Mapping[str, int]) -> str:
    """Returns a sequence that matches the text. Special tokens in the text are matched as
    tokens."""
    found = [(at, name) for name in token_ids if name and (at := text.find(name)) >= 0]
    if not found:
        return string(text)
    at, name = min(found, key=lambda place: (place[0], -len(place[1])))
    parts = [string(text[:at]), f"<[{token_ids[name]}]>"]
    parts.append(with_delimiters(text[at + len(name) :], token_ids))
    return " ".join(part for part in parts if part)


def remark(unenforced: Collection[str]) -> list[str]:
    """Returns lines of Lark that name keywords of JSON schemas that the grammar leaves out: one
    comment, or none. A name with unusual characters is written as "(other)"."""
    names = [name if _PLAIN.fullmatch(name) else "(other)" for name in sorted(unenforced)]
    return [f"// not enforced: {', '.join(names)}"] if names else []


def remarked(grammar: str) -> list[str]:
    """Returns the keywords that remarks in a grammar name, also if the Lark stands inside JSON."""
    return [name for found in _REMARK.findall(grammar) for name in found.split(", ")]
