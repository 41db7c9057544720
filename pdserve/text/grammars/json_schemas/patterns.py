"""Patterns of JSON schemas (regular expressions of ECMA-262) as llguidance can enforce them.

llguidance reads Rust's syntax, and matches the JSON spelling of a string. Two differences matter:

- Some syntax means something else in Rust: `[a[b]`, `[a&&b]`, `\\s`, `\\d`, the name of a group. It
  is written out here.
- A class with all control characters, such as `[^"]`, lets the escapes `\\"` and `\\\\` through. No
  class has U+0000 here, so none is of that kind. Answers never hold U+0000 anyway (`schemas`).

This module knows no schemas. `schemas` and `parameters` call it.
"""

import re
from dataclasses import dataclass
from enum import Enum, auto

_DIGIT, _WORD = "0-9", "0-9A-Za-z_"
_SPACE = (
    r"\x09-\x0d\x20\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
)
_SETS = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_NEVER = "[a&&b]"  # a class without characters
_ANY = "(?s:.*)"
_CODE = re.compile(
    r"x([0-9a-fA-F]{2})|[xu]\{([0-9a-fA-F]{1,6})\}"
    r"|u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4})"
    r"|c([A-Za-z])|0(?![0-9])"
)
_PROPERTY = re.compile(r"[pP](?:\{[^{}]*\}|[A-Za-z])")
_COUNT = re.compile(r"\{[0-9]+(?:,[0-9]*)?\}")
_LOOK = re.compile(r"\(\?<?[=!]")
_NAMED = re.compile(r"\(\?P?<[^<>=!]+>")
_FLAGS = re.compile(r"\(\?([A-Za-z-]+)([:)])")


class _Kind(Enum):
    TEXT = auto()
    OPEN = auto()  # of a group
    CLOSE = auto()
    OR = auto()
    START = auto()  # ^
    END = auto()  # $
    FLAGS = auto()  # such as (?i), to the end of the group
    LOOK = auto()  # what no automaton can do: look-around, word boundaries, references back


@dataclass(frozen=True)
class _Piece:
    kind: _Kind
    text: str


def searched(pattern: str) -> str:
    """Returns the pattern in Rust's syntax, to be found anywhere in a text, as in ECMA-262. Raises
    ValueError that says what to write instead."""
    return "".join(piece.text for piece in _pieces(pattern))


def whole(pattern: str) -> str | None:
    """Returns an expression in Rust's syntax that matches a whole text if the pattern is found
    anywhere in it. None if there is no such expression. Raises like `searched`."""
    pieces = _pieces(pattern)
    flags = ""
    while pieces and pieces[0].kind is _Kind.FLAGS:
        flags += pieces.pop(0).text
    parts = []
    for branch in _branches(pieces):
        begin = end = _ANY
        if branch and branch[0].kind is _Kind.START:
            begin, branch = "", branch[1:]
        if branch and branch[-1].kind is _Kind.END:
            end, branch = "", branch[:-1]
        if any(p.kind in (_Kind.START, _Kind.END, _Kind.FLAGS, _Kind.LOOK) for p in branch):
            return None
        parts.append(f"{begin}{''.join(piece.text for piece in branch)}{end}")
    return f"{flags}(?:{'|'.join(parts)})"


def _branches(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Returns the alternatives outside of groups."""
    found: list[list[_Piece]] = [[]]
    depth = 0
    for piece in pieces:
        depth += (piece.kind is _Kind.OPEN) - (piece.kind is _Kind.CLOSE)
        if piece.kind is _Kind.OR and depth == 0:
            found.append([])
        else:
            found[-1].append(piece)
    return found


def _pieces(pattern: str) -> list[_Piece]:
    reader = _Reader(pattern)
    found = []
    while reader.at < len(pattern):
        found.append(reader.piece())
    return found


class _Reader:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0

    def piece(self) -> _Piece:
        char = self._pattern[self.at]
        if char == "\\":
            return self._escape()
        if char == "(":
            return self._group()
        if char == "{" and not self._pattern.startswith("{,", self.at):
            count = self._take(_COUNT)
            return _Piece(_Kind.TEXT, count[0] if count else self._literal())
        self.at += 1
        if char == "[":
            return _Piece(_Kind.TEXT, self._class())
        if char in "]}\0":
            return _Piece(_Kind.TEXT, _char(ord(char)))
        kinds = {")": _Kind.CLOSE, "|": _Kind.OR, "^": _Kind.START, "$": _Kind.END}
        return _Piece(kinds.get(char, _Kind.TEXT), char)

    def _literal(self) -> str:
        self.at += 1
        return _char(ord(self._pattern[self.at - 1]))

    def _group(self) -> _Piece:
        if look := self._take(_LOOK):
            return _Piece(_Kind.LOOK, look[0])
        if self._take(_NAMED):  # Rust's engine gives a group that is called "stop" a meaning
            return _Piece(_Kind.OPEN, "(?:")
        if flags := self._take(_FLAGS):
            if "x" in flags[1]:
                raise self._error("uses the flag x: write the pattern without blanks and comments")
            return _Piece(_Kind.OPEN if flags[2] == ":" else _Kind.FLAGS, flags[0])
        self.at += 1
        return _Piece(_Kind.OPEN, "(")

    def _escape(self) -> _Piece:
        """Reads an escape outside of a class."""
        self.at += 1
        char = self._pattern[self.at : self.at + 1]
        if char in ("A", "z"):  # as in Rust; ECMA-262 has no such escapes
            self.at += 1
            return _Piece(_Kind.START if char == "A" else _Kind.END, f"\\{char}")
        if char and char in "bBk123456789":
            self.at += 1
            return _Piece(_Kind.LOOK, f"\\{char}")
        found = self._escaped()
        return _Piece(_Kind.TEXT, found if isinstance(found, str) else _char(found))

    def _class(self) -> str:
        """Reads a class from after its [ to its ], and returns it without U+0000."""
        is_negated = self._pattern.startswith("^", self.at)
        self.at += is_negated
        if self._pattern.startswith("]", self.at):
            raise self._error("begins a class with ], which not all engines read alike: write \\]")
        parts = [r"\x{0}"] if is_negated else []
        while not self._pattern.startswith("]", self.at):
            first = last = self._member()
            if isinstance(first, int) and self._is_range():
                self.at += 1
                last = self._member()
            if isinstance(first, str):
                parts.append(first)
            elif isinstance(last, str):  # the hyphen is a member
                parts += [_range(first, first), _range(45, 45), last]
            elif last < first:
                raise self._error("has a range whose end comes before its begin: swap the two")
            else:
                parts.append(_range(first, last))
        self.at += 1
        text = "".join(parts)
        return f"[{'^' * is_negated}{text}]" if text else _NEVER

    def _is_range(self) -> bool:
        """True if a hyphen is next that is not the last member of its class."""
        following = self._pattern[self.at : self.at + 2]
        return following.startswith("-") and following != "-]"

    def _member(self) -> int | str:
        """Reads a member of a class: the code of a character, or a set as a class."""
        char = self._pattern[self.at : self.at + 1]
        if not char:
            raise self._error("has a class without an end: add ]")
        self.at += 1
        if char != "\\":
            return ord(char)
        if self._pattern.startswith("b", self.at):
            self.at += 1
            return 8
        return self._escaped()

    def _escaped(self) -> int | str:
        """Reads what follows a backslash: the code of a character, or a set as a class."""
        if code := self._take(_CODE):
            return self._code(code)
        if named := self._take(_PROPERTY):
            return rf"[\{named[0]}&&[^\x{{0}}]]"
        char = self._pattern[self.at : self.at + 1]
        self.at += 1
        if char in _SETS:
            return f"[{_SETS[char]}]"
        if char.lower() in _SETS:
            return rf"[^\x{{0}}{_SETS[char.lower()]}]"
        if char in _CONTROLS:
            return _CONTROLS[char]
        if not char or (char.isascii() and char.isalnum()):
            raise self._error(f"has the escape \\{char}, which is unknown: write the character")
        return ord(char)

    def _code(self, found: re.Match[str]) -> int:
        byte, braced, high, low, unit, control = found.groups()
        if control:
            return ord(control) % 32
        if high:
            return 0x10000 + ((int(high, 16) - 0xD800) << 10) + (int(low, 16) - 0xDC00)
        code = int(byte or braced or unit or "0", 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._error(f"has \\{found[0]}, which is no character: leave it out")
        return code

    def _take(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        found = expression.match(self._pattern, self.at)
        if found:
            self.at = found.end()
        return found

    def _error(self, what: str) -> ValueError:
        return ValueError(f"the pattern {self._pattern!r:.200} {what}")


def _char(code: int) -> str:
    """Returns an expression for one character. U+0000 matches nothing."""
    return _written(code) if code else _NEVER


def _range(first: int, last: int) -> str:
    """Returns a range inside a class, without U+0000."""
    first = max(first, 1)
    if first >= last:
        return _written(first) if first == last else ""
    return f"{_written(first)}-{_written(last)}"


def _written(code: int) -> str:
    char = chr(code)
    return char if char.isalnum() or char == "_" else f"\\x{{{code:x}}}"
