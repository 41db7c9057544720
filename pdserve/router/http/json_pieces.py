"""JSON of answers: values as bytes, long arrays made in slices of time, long answers kept in
pieces.

    JsonPieces: filled by `add` --> taken by `take`, piece by piece

Knows no form of any API. Filled by `router.http.openai`, taken by `router.http.answers`.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from pdserve.background.pace import Pace

Json = dict[str, Any]

json_bytes = msgspec.json.Encoder().encode

# JSON has no -inf; vLLM writes the same number
LOWEST_LOGPROB = -9999.0

SHARED_BYTES = 4096  # a longer piece may be the same object as others; shorter ones are joined
JOINED_JSON_BYTES = 1 << 17


class JsonPieces:
    """Long JSON, of which parts may repeat: what repeats is held once. Filled, then taken."""

    def __init__(self) -> None:
        self.num_held = 0  # bytes
        self._pieces: deque[bytes] = deque()
        self._uses: Counter[int] = Counter()  # by id, of those that may repeat
        self._tail = bytearray()

    def add(self, pieces: Iterable[bytes]) -> int:
        """How many more bytes it holds for them."""
        before = self.num_held
        for piece in pieces:
            if len(piece) < SHARED_BYTES:
                self._tail += piece
                self.num_held += len(piece)
                if len(self._tail) >= JOINED_JSON_BYTES:
                    self._join()
            else:
                self._join()
                self._pieces.append(piece)
                self._uses[id(piece)] += 1
                self.num_held += len(piece) if self._uses[id(piece)] == 1 else 0
        return self.num_held - before

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._pieces)) + len(self._tail)

    def take(self) -> Iterator[tuple[bytes, int]]:
        """Each piece, with the bytes that are held no more when the next is asked for."""
        self._join()
        while self._pieces:
            piece = self._pieces.popleft()
            self._uses[id(piece)] -= 1
            yield piece, 0 if self._uses[id(piece)] > 0 else len(piece)

    def _join(self) -> None:
        if self._tail:
            self._pieces.append(bytes(self._tail))
            self._tail.clear()


async def json_array(items: Iterable[Any], pace: Pace) -> bytes:
    """A JSON array of the items, encoded in slices of time."""
    encoded = bytearray(b"[")
    for item in items:
        encoded += json_bytes(item)
        encoded += b","
        if pace.is_due:
            await pace.rest()
    if len(encoded) > 1:
        del encoded[-1:]
    return bytes(encoded + b"]")


def event_bytes(data: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json_bytes(data) + b"\n\n"


def finite(logprob: float) -> float:
    """The logprob, or LOWEST_LOGPROB where it is lower."""
    return max(logprob, LOWEST_LOGPROB)
