"""The text of an answer that is still to be read, and the ways of reading it.

Parsers of formats are generators. A parser is written as if the whole answer were there, and it
yields whenever it needs text that has not arrived yet. So the way in which the answer was cut
cannot change the result. A special token is one character of this text: a lone surrogate, which
detokenised text never contains. This module knows no format and no pieces. Parsers use it through
`scan`.
"""

import re
from collections.abc import Collection, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

from pdserve.text.answers.pieces import Item, SpecialToken

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields when it needs more text; returns T

SPACE = re.compile(r"[ \t\r\n]++")
_SURROGATE = re.compile("[\ud800-\udfff]")
_FIRST_TOKEN = 0xD800


@lru_cache(256)
def _beginning(text: str) -> re.Pattern[str]:
    """Returns a pattern that matches the longest prefix of the text."""
    pattern = ""
    for char in reversed(text):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return re.compile(pattern)


class Alphabet:
    """Translates between items and the text that parsers read."""

    def __init__(self, tokens: Collection[str] = ()) -> None:
        """Assigns a character to each of `tokens`, the delimiters that arrive as `SpecialToken`.
        Text that spells one of them is plain text."""
        self._chars = {text: chr(_FIRST_TOKEN + n) for n, text in enumerate(sorted(tokens))}
        self._texts = {char: text for text, char in self._chars.items()}

    def spelling(self, delimiter: str) -> str:
        """Returns the delimiter as parsers read it, which is one character if it is a token."""
        return self._chars.get(delimiter, delimiter)

    def read(self, items: Iterable[Item]) -> str:
        """Returns the items as text for parsers. A token that is no delimiter here becomes its
        text."""
        return "".join([self._read(item) for item in items])

    def shown(self, text: str) -> str:
        """Returns the text as clients see it, with tokens written as their texts."""
        if text.isascii() or not self._texts:
            return text
        return _SURROGATE.sub(lambda found: self._texts.get(found.group(), "\ufffd"), text)

    def _read(self, item: Item) -> str:
        if isinstance(item, SpecialToken):
            if item.text in self._chars:
                return self._chars[item.text]
            item = item.text
        return item if item.isascii() else _SURROGATE.sub("\ufffd", item)


class Reader:
    """Text with a read position. Every method takes the same characters however they arrive, except
    `run`. That one takes only what has arrived, and is for text that is passed on at once."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._end = 0  # end of the part of _text that may be read
        self._start = 0  # number of the answer's characters before _text
        self._limit: int | None = None  # number of the answer's characters that may be read
        self._ended = False

    def feed(self, text: str) -> None:
        self._replace(self._text[self._at :] + text, self._start + self._at)

    def end(self) -> None:
        """Marks the end: no more text will arrive."""
        self._ended = True

    def limit(self, num_chars: int | None) -> None:
        """Reads on as if the answer ended after `num_chars` more characters. None lifts the
        limit."""
        self._limit = None if num_chars is None else self._start + self._at + num_chars
        self._bound()

    def more(self) -> Steps[bool]:
        """Waits until a character (`char`) has arrived. False: the answer has ended."""
        while self._at >= self._end:
            if self._ended or self._end < len(self._text) or self._is_at_limit:
                return False
            yield
        return True

    @property
    def has_char(self) -> bool:
        """True if `more` would be true at once. Frequent callers check this first, because it is
        cheaper."""
        return self._at < self._end

    @property
    def char(self) -> str:
        """The next character. It may only be read after `more` was true."""
        return self._text[self._at]

    def is_next(self, chars: str) -> Steps[bool]:
        """True if the next character is one of `chars`. False at the answer's end."""
        return (self.has_char or (yield from self.more())) and self.char in chars

    def one(self) -> str:
        """Takes `char`."""
        self._at += 1
        return self._text[self._at - 1]

    def run(self, pattern: re.Pattern[str], max_chars: int = 1 << 62) -> str:
        """Takes what matches here in the text that has arrived. The match may be empty."""
        found = pattern.match(self._text, self._at, min(self._end, self._at + max_chars))
        if found is None:
            return ""
        self._at = found.end()
        return found.group()

    def take(self, run: re.Pattern[str], max_chars: int = 1 << 62) -> Steps[str]:
        """Takes all characters of a class, waiting for more text as needed. `run` matches one or
        more characters of the class."""
        first = self.run(run, max_chars)
        if self.has_char:
            return first
        parts = [first]
        max_chars -= len(first)
        while max_chars and (self.has_char or (yield from self.more())):
            part = self.run(run, max_chars)
            if not part:
                break
            parts.append(part)
            max_chars -= len(part)
        return "".join(parts)

    def literal(self, choices: Collection[str]) -> Steps[tuple[str, bool]]:
        """Takes characters while they are the beginning of a choice. No choice may begin another.
        Returns the characters, and whether they are a whole choice."""
        longest = 0
        for choice in choices:
            length = self._num_equal(choice)
            if length == len(choice):
                self._at += length
                return choice, True
            longest = max(longest, length)
        self._at += longest
        read = self._text[self._at - longest : self._at]
        while self.has_char or (yield from self.more()):
            longer = read + self.char
            if not any(choice.startswith(longer) for choice in choices):
                break
            self._at += 1
            read = longer
            if read in choices:
                return read, True
        return read, False

    def unread(self, text: str) -> None:
        """Puts back `text`, which was taken last."""
        back = self._at - len(text)
        if back >= 0:
            self._at = back
        else:  # it began in text that came earlier
            self._replace(text + self._text[self._at :], self._start + back)

    def _num_equal(self, choice: str) -> int:
        """Returns the number of the choice's first characters that match the arrived text."""
        if self._text.startswith(choice, self._at, self._end):
            return len(choice)
        found = _beginning(choice).match(self._text, self._at, self._end)
        return found.end() - self._at if found is not None else 0

    @property
    def _is_at_limit(self) -> bool:
        return self._limit is not None and self._start + self._at >= self._limit

    def _replace(self, text: str, start: int) -> None:
        self._text = text
        self._start = start
        self._at = 0
        self._bound()

    def _bound(self) -> None:
        self._end = len(self._text)
        if self._limit is not None:
            self._end = min(self._end, max(self._limit - self._start, self._at))
