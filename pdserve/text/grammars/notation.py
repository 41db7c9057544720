"""Choices, regular expressions and context-free grammars as Lark.

A client's grammar is Lark (llguidance's) or the EBNF of llama.cpp and xgrammar (GBNF, whose rules
have ::= and whose first rule is root). GBNF is brought into the narrower form that llguidance's own
converter reads. `grammar_of` calls this module.
"""

import re
from collections.abc import Mapping
from typing import Any

from llguidance.gbnf_to_lark import GbnfToLarkError, Position, gbnf_to_lark

from pdserve.text.grammars import lark
from pdserve.text.grammars.limits import check_bytes, check_choices

# parts of GBNF: strings, classes of characters, comments, the start of an alternative on a new
# line, and names
_PARTS = re.compile(
    r'(?P<text>"(?:\\.|[^"\\\n])*")'
    r"|(?P<chars>\[(?:\\.|[^\]\\\n])*\])"
    r"|(?P<comment>#[^\n]*)"
    r"|(?P<more>\s*\n\s*\|)"
    r"|(?P<name>[A-Za-z_][\w-]*)(?P<defines>\s*::=)?",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_IS_LARK = re.compile(r"(?m)^\s*(%llguidance\b|[?!]?start\b[^:=\n]*:(?!:=))")
# the backslashes before a $ at the end: an even number leaves it an anchor
_END = re.compile(r"(?<!\\)((?:\\\\)*)\$\Z")
_ESCAPED_OR_CLASS = re.compile(r"\\.|[\[\]]", re.DOTALL)
_OPEN = {'"': "a text in quotes", "[": "a class of characters"}


def choice_grammar(value: Any, field: str) -> str:
    """Returns Lark that matches one of the texts. Raises ValueError that names the field."""
    is_texts = isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)
    if not is_texts or not value:
        raise ValueError(f"{field} must be a list of texts, not {value!r:.80}: send at least one")
    check_choices(len(value), field)
    texts = list(dict.fromkeys(value))
    check_bytes("".join(texts) or "-", field)
    strings = [lark.string(text) or '""' for text in texts]
    return "start: CHOICE\nCHOICE: " + " | ".join(strings) + "\n"


def regex_grammar(value: Any, field: str, opening: str = "") -> str:
    """Returns Lark for text that the whole regular expression matches (Rust's syntax; \\d is
    ASCII). An anchor at either end is left out. The text must not begin with `opening`."""
    if not isinstance(value, str):
        raise ValueError(f"{field} must be a regular expression, not {value!r:.80}")
    check_bytes(value, field)
    pattern = lark.regex(_END.sub(r"\1", value.removeprefix("^")))
    if opening:
        return f"start: TEXT\nTEXT: {pattern} & {lark.without(start=opening)}\n"
    return f"start: {pattern}\n"


def json_spaces(pattern: str) -> str:
    """Returns a pattern of whitespace in which \\s is JSON's whitespace, not Unicode's."""
    depth = 0  # of classes of characters

    def plain(found: re.Match[str]) -> str:
        nonlocal depth
        depth += {"[": 1, "]": -1}.get(found[0], 0)
        if found[0] != r"\s":
            return found[0]
        return r" \t\n\r" if depth else r"[ \t\n\r]"

    return _ESCAPED_OR_CLASS.sub(plain, pattern)


def lark_grammar(value: Any, field: str) -> str:
    """Returns Lark for a grammar that is Lark or GBNF. Raises ValueError that says which part
    cannot be read."""
    if not isinstance(value, str):
        raise ValueError(f"{field} must be the text of a grammar, not {value!r:.80}")
    check_bytes(value, field)
    if _IS_LARK.search(value):
        return value
    if "::=" not in value:
        raise ValueError(
            f"{field} is neither Lark (a rule `start: ...`) nor EBNF (a rule `root ::= ...`): send "
            "one of these"
        )
    try:
        converted = gbnf_to_lark(_plain_gbnf(value, field))
    except GbnfToLarkError as error:
        raise ValueError(f"{field} is no EBNF: {error!s:.300}: mend it, or send Lark") from error
    except RecursionError as error:
        raise ValueError(
            f"{field} is nested too deeply: give inner groups rules of their own"
        ) from error
    check_bytes(converted, field)
    return converted


def _plain_gbnf(text: str, field: str) -> str:
    """Returns the grammar without comments, with each rule on one line and with escapes that the
    converter knows. Names become lower-case ones that cannot clash in Lark."""
    _check_closed(text, field)
    names = _names(text, field)

    def plain(found: re.Match[str]) -> str:
        if found["text"] is not None or found["chars"] is not None:
            return _ESCAPE.sub(_escape, found[0])
        if found["comment"] is not None:
            return ""
        if found["more"] is not None:
            return " |"
        return names[found["name"]] + (" ::=" if found["defines"] else "")

    without_comments = _PARTS.sub(lambda f: "" if f["comment"] is not None else f[0], text)
    return _PARTS.sub(plain, without_comments)


def _check_closed(text: str, field: str) -> None:
    """Raises ValueError if a text or a class of characters has no end on its line."""
    at = 0
    for end, next_at in [*(found.span() for found in _PARTS.finditer(text)), (len(text),) * 2]:
        for mark, what in _OPEN.items():
            if mark in text[at:end]:
                line = text.count("\n", 0, text.index(mark, at)) + 1
                raise ValueError(
                    f"{field}: {what} begins in line {line} and does not end there: close it, or "
                    "write a line break in it as \\n"
                )
        at = next_at


def _names(text: str, field: str) -> Mapping[str, str]:
    """Returns each rule's name in the converted grammar, by its given name."""
    defined: list[str] = []
    used: dict[str, None] = {}
    for found in _PARTS.finditer(text):
        name = found["name"]
        if name is not None and found["defines"]:
            defined.append(name)
        elif name is not None:
            used[name] = None
    if "root" not in defined:
        raise ValueError(f"{field} has no rule `root ::= ...`: name its first rule root")
    for name in used:
        if name not in defined:
            raise ValueError(
                f"{field} uses the rule {name!r:.80}, which it does not define: add it"
            )
    doubled = (
        next((name for name in defined if defined.count(name) > 1), None)
        if (len(set(defined)) < len(defined))
        else None
    )
    if doubled is not None:
        raise ValueError(f"{field} defines the rule {doubled!r:.80} twice: join the two with |")
    return {name: "root" if name == "root" else f"r{i}" for i, name in enumerate(defined)}


def _escape(found: re.Match[str]) -> str:
    """Returns an escape that the converter knows. A character given by its code becomes itself, or
    has the form \\x0a."""
    code = found[1] or found[2] or found[3]
    if code is None:
        return found[0] if found[4] in '"\\[]nrt' else _char(found[4])
    number = int(code, 16)
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise GbnfToLarkError(Position(found[0], 0), "This is no character")
    return _char(chr(number))


def _char(char: str) -> str:
    return char if char.isalnum() or ord(char) > 127 else f"\\x{ord(char):02x}"
