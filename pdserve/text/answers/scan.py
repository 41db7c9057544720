"""The tools of a format's parser: the reader, the writer, the request's functions, and the reading
steps that all formats share.

Whitespace that touches a delimiter belongs to it. So content and reasoning neither begin nor end
with the line breaks that templates write around them. Text without delimiters stays as it is.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Any, NamedTuple

from pdserve.text.answers.reader import SPACE, Reader, Steps
from pdserve.text.answers.writer import PieceWriter

MAX_NAME = 256  # characters of a function's, a key's or a parameter's name
MAX_HELD = 1 << 20  # characters that may be held until a call's name is known

Schemas = Mapping[str, Mapping[str, Any]]  # function's name -> JSON schema of its parameters


class Found(Enum):
    NO_CALL = auto()  # no name was found; what was held has become content
    OPEN = auto()  # a call has begun, and its arguments are broken or cut off
    CALL = auto()  # a call has begun and is complete


class Delimiter(NamedTuple):
    space: str  # whitespace before it
    text: str

    @property
    def whole(self) -> str:
        return self.space + self.text


@lru_cache(256)
def _plain(firsts: str) -> re.Pattern[str]:
    """Returns a pattern of words and the space between them, in which no delimiter begins."""
    word = f"[^{re.escape(firsts)} \\t\\r\\n]++"
    return re.compile(f"{word}(?:[ \\t\\r\\n]++{word})*+")


@dataclass(frozen=True, slots=True)
class Scan:
    read: Reader
    write: PieceWriter
    spelling: Callable[[str], str]  # delimiter -> how the reader's text spells it
    shown: Callable[[str], str]  # the reader's text -> what clients see
    tools: Schemas | None  # None: any name counts as a function

    def accepts(self, name: str, must_be_known: bool = False) -> bool:
        """True if `name` can be a function's name. With `must_be_known`, it must be in `tools`,
        because here only the name tells a call from ordinary text."""
        known = not must_be_known or self.tools is None or name in self.tools
        return known and 0 < len(name) <= MAX_NAME and name.isprintable()

    def hold(self, delimiter: Delimiter | None = None) -> None:
        """Holds the text from here on until the name is known, because it may be a call."""
        self.write.hold()
        if delimiter is not None:
            self.write.raw(delimiter.whole)
        self.read.limit(MAX_HELD)

    def give_back(self) -> Found:
        self.read.limit(None)
        self.write.give_back()
        return Found.NO_CALL

    def begin(self, name: str) -> None:
        self.read.limit(None)
        self.write.begin(name)

    def skip(self, run: re.Pattern[str] = SPACE) -> Steps[None]:
        """Reads text of a class that only gives the call its form."""
        self.write.raw(self.read.run(run))
        if not self.read.has_char:
            self.write.raw((yield from self.read.take(run)))

    def word(self, run: re.Pattern[str]) -> Steps[str]:
        """Reads and returns at most MAX_NAME characters of a class."""
        text = yield from self.read.take(run, MAX_NAME)
        self.write.raw(text)
        return text

    def optional(self, *choices: str) -> Steps[str]:
        """Takes the delimiter that stands here if it is one of the choices. Otherwise takes nothing
        and returns ""."""
        text, is_whole = yield from self.read.literal(choices)
        if not is_whole:
            self.read.unread(text)
            return ""
        self.write.raw(text)
        return text

    def content_until(self, *delimiters: str) -> Steps[Delimiter | None]:
        """Writes content up to one of the delimiters, which is taken and returned but not written.
        None: the answer ended."""
        return self.text_until(delimiters, self.write.content)

    def arguments_until(self, *delimiters: str) -> Steps[Delimiter | None]:
        """Writes the rest of a broken call as the model wrote it, up to one of the delimiters."""
        return self.text_until(delimiters, self.write.argument)

    def text_until(
        self, delimiters: tuple[str, ...], write: Callable[[str], None]
    ) -> Steps[Delimiter | None]:
        """Writes text up to one of the delimiters.

        A delimiter's first character must occur only once in it. So after a false beginning the
        next delimiter can only begin at the next character.
        """
        firsts = "".join(sorted({text[0] for text in delimiters}))
        plain = _plain(firsts)
        spaces: list[str] = []
        while self.read.has_char or (yield from self.read.more()):
            if text := self.read.run(plain):
                is_found = False
            elif text := self.read.run(SPACE):
                spaces.append(text)
                continue
            else:
                text, is_found = yield from self.read.literal(delimiters)
            space = "".join(spaces)
            spaces.clear()
            if is_found:
                return Delimiter(space, text)
            write(space)
            write(text)
        write("".join(spaces))
        return None
