"""Cuts a long JSON object into its members before anything is made from them, in small slices of
the event loop's time.

A JSON library decodes a body in one piece and holds the GIL meanwhile. Depending on the content,
32 MB take from 30 ms to 3 s and up to 800 MB of memory. The outline says where each member's value
is and how much a library would make of it. So too much can be refused, and the rest decoded piece
by piece. It does not check that values are valid JSON: decoding them does. Called by
`router.http.body_parsing`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from pdserve.background.pace import Pace
from pdserve.router.errors import ApiError

WINDOW = 1 << 17  # bytes scanned in one call, in less than a millisecond
PIECE_BYTES = 1 << 16
LEAVES_BYTES = 1 << 14  # bytes of leaves that are skipped together
MAX_NAME_BYTES = 1024
MAX_MEMBERS = 256
MAX_DEPTH = 100
MAX_VALUES = 1 << 16  # texts, arrays and objects in one member

_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_BETWEEN = re.compile(rb'[^"\[\]{}]*+')
# A leaf is a text, or an array or object that holds no other. Most of a long body is leaves.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_LEAF = rb'(?:%b|[\[{](?:[^"\[\]{}]++|%b)*+[\]}])' % (_STRING, _STRING)
_STRINGS = re.compile(_STRING, re.DOTALL)
_LEAVES = re.compile(_LEAF, re.DOTALL)
_RUN_OF_LEAVES = re.compile(rb'(?:%b[^"\[\]{}]*+)++' % _LEAF, re.DOTALL)
_SPACE = re.compile(rb"[ \t\n\r]*+")
_SCALAR = re.compile(rb"[^,}\] \t\n\r]*+")
_QUOTE, _BACKSLASH, _COLON, _COMMA = b'"\\:,'
_OPENING = tuple(b"[{")
_CLOSING = tuple(b"]}")
_END = -1
_CONTINUATION = bytes(range(0x80, 0xC0))  # UTF-8 bytes of characters that began before


@dataclass(slots=True)
class Member:
    """The place of a value, which is body[start:end], and its size."""

    start: int
    end: int
    # Texts, arrays and objects in it, including itself.
    num_values: int = 0
    num_commas: int = 0
    # Ends of the texts, arrays and objects that are items of the value itself.
    ends: list[int] = field(default_factory=list)


async def outline(body: bytearray, pace: Pace) -> dict[str, Member]:
    """Returns the members of the JSON object in body, by name. Raises ApiError (400)."""
    return await _Scanner(body, pace).members()


class _Scanner:
    def __init__(self, body: bytearray, pace: Pace) -> None:
        self._body = body
        self._pace = pace
        self._at = 0
        self._num_commas = 0

    async def members(self) -> dict[str, Member]:
        if await self._skip(_SPACE) != _OPENING[1]:
            raise ApiError("the body must be a JSON object", code="invalid_json")
        self._at += 1
        members: dict[str, Member] = {}
        following = await self._skip(_SPACE)
        for _ in range(MAX_MEMBERS):
            if following == _CLOSING[1] and not members:
                break
            name = await self._name(following)
            members[name] = await self._value(name)
            following = await self._skip(_SPACE)
            if following == _CLOSING[1]:
                break
            self._take(_COMMA, following)
            following = await self._skip(_SPACE)
        else:
            raise ApiError(
                f"the body must have at most {MAX_MEMBERS} fields", code="too_many_fields"
            )
        self._at += 1
        if await self._skip(_SPACE) != _END:
            raise self._invalid()
        return members

    async def _name(self, following: int) -> str:
        """Reads a member's name and its colon."""
        start = self._at
        self._take(_QUOTE, following)
        await self._string()
        if self._at - start > MAX_NAME_BYTES:
            raise ApiError(
                f"the name of a field has {self._at - start} bytes", code="unsupported_parameter"
            )
        name = _decoded_name(self._body[start : self._at])
        self._take(_COLON, await self._skip(_SPACE))
        await self._skip(_SPACE)
        return name

    async def _value(self, name: str) -> Member:
        member = Member(self._at, self._at)
        is_array = self._peek() == _OPENING[0]
        depth = self._num_commas = 0
        while True:
            if depth and not self._passes(_BETWEEN):
                await self._skip(_BETWEEN)
            if self._pace.is_due:
                await self._pace.rest()
            following = self._peek()
            if depth and self._leaves(member, depth == 1 and is_array):
                self._check(name, member, depth)
                continue
            if following == _QUOTE:
                self._at += 1
                await self._string()
                member.num_values += 1
            elif following in _OPENING:
                self._at += 1
                depth += 1
                member.num_values += 1
            elif following in _CLOSING and depth:
                self._at += 1
                depth -= 1
            else:
                self._scalar()
            if not depth:
                member.end = self._at
                member.num_commas = self._num_commas
                return member
            if depth == 1 and following not in _OPENING:
                member.ends.append(self._at)
            self._check(name, member, depth)

    def _leaves(self, member: Member, are_items: bool) -> bool:
        """Skips a run of leaves, if one begins here; True if so.

        `are_items` says that they are items of the member's own array.
        """
        body = self._body
        start = self._at
        match = _RUN_OF_LEAVES.match(body, start, start + LEAVES_BYTES)
        if match is None:
            return False
        self._at = match.end()
        bare = _STRINGS.sub(b'""', match.group())
        member.num_values += bare.count(b'"') // 2 + bare.count(b"[") + bare.count(b"{")
        self._num_commas += bare.count(b",")
        if are_items:
            member.ends += [leaf.end() for leaf in _LEAVES.finditer(body, start, self._at)]
        return True

    def _check(self, name: str, member: Member, depth: int) -> None:
        if depth > MAX_DEPTH:
            message = (
                f"the body is not valid JSON for this server: {name} is nested deeper than "
                f"{MAX_DEPTH}"
            )
            raise ApiError(message, param=name, code="invalid_json")
        if member.num_values > MAX_VALUES:
            message = (
                f"{name} holds more than {MAX_VALUES} texts, lists and objects: send less in a "
                "request"
            )
            raise ApiError(message, param=name, code="too_many_values")

    def _scalar(self) -> None:
        """Skips a number, true, false or null."""
        start = self._at
        match = _SCALAR.match(self._body, start, start + MAX_NAME_BYTES)
        self._at = match.end() if match is not None else start
        if not 0 < self._at - start < MAX_NAME_BYTES:
            raise self._invalid()

    async def _string(self) -> None:
        """Skips the rest of a text, from after its first quote to after its last."""
        following = await self._skip(_IN_STRING)
        while following == _BACKSLASH:  # at a window's end
            if self._at + 1 >= len(self._body):
                raise self._invalid()
            following = await self._skip(_IN_STRING)
        self._take(_QUOTE, following)

    async def _skip(self, kind: re.Pattern[bytes]) -> int:
        """Skips bytes of this kind, and returns the byte that follows."""
        while not self._passes(kind):
            if self._pace.is_due:
                await self._pace.rest()
        return self._peek()

    def _passes(self, kind: re.Pattern[bytes]) -> bool:
        """Skips at most a window of bytes of this kind; True if those were all."""
        window = self._at + WINDOW
        match = kind.match(self._body, self._at, window)
        assert match is not None
        if kind is _BETWEEN:
            self._num_commas += self._body.count(b",", self._at, match.end())
        self._at = match.end()
        return self._at < window

    def _peek(self) -> int:
        return self._body[self._at] if self._at < len(self._body) else _END

    def _take(self, wanted: int, following: int) -> None:
        if following != wanted:
            raise self._invalid()
        self._at += 1

    def _invalid(self) -> ApiError:
        return _invalid(self._at)


def arrays(body: bytearray, member: Member) -> Iterator[bytearray]:
    """Cuts the value, which is an array, into shorter arrays with the same items in order.

    An array has more than PIECE_BYTES only if it holds a single item that is longer. Raises
    ApiError (400).
    """
    if body[member.end - 1] != _CLOSING[0]:
        raise _invalid(member.end - 1)
    begin = at = member.start + 1
    for end in _ends(body, member):
        items = body[at:end].strip()
        if at > begin and items:
            if not items.startswith(b","):
                raise _invalid(at)
            del items[:1]
            items = items or bytearray(b",")  # which no decoder takes
        if items:
            yield bytearray(b"[") + items + b"]"
        at = end


def _ends(body: bytearray, member: Member) -> Iterator[int]:
    """Yields ends of items, about PIECE_BYTES apart."""
    at = member.start + 1
    last = member.end - 1
    if not member.ends:
        while (comma := body.find(b",", at + PIECE_BYTES, last)) >= 0:
            yield comma
            at = comma
    for index, end in enumerate(member.ends):
        following = member.ends[index + 1] if index + 1 < len(member.ends) else last
        if following - at > PIECE_BYTES:
            yield end
            at = end
    yield last


async def least_chars(body: bytearray, member: Member, pace: Pace) -> int:
    """Returns a lower bound of the characters in a JSON text; escapes make it inexact."""
    num = 0
    for start in range(member.start, member.end, WINDOW):
        part = body[start : min(start + WINDOW, member.end)]
        # two of \uXXXX may make one character; one may be cut by the window's end
        escapes = part.count(b"\\") + (1 + part.count(b"\\u")) * 9 // 2
        num += len(part.translate(None, _CONTINUATION)) - escapes
        if pace.is_due:
            await pace.rest()
    return max(0, num)


def _invalid(at: int) -> ApiError:
    return ApiError(f"the body is not valid JSON (byte {at})", code="invalid_json")


def _decoded_name(data: bytearray) -> str:
    try:
        return msgspec.json.decode(data, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from error
