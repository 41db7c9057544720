"""Makes the JSON of answers: encodes values, makes long arrays in slices of time, and keeps long
answers in pieces.

    JsonPieces: filled by `add` --> taken by `take`, piece by piece

Knows no API's form. Filled by the responders (`router.http.openai` and its neighbours), taken by
`router.http.answers`.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from pdserve.background.pace import Pace

Json = dict[str, Any]

json_bytes = msgspec.json.Encoder().encode

# JSON has no -inf; vLLM writes this number instead
LOWEST_LOGPROB = -9999.0

SHARED_BYTES = 4096  # longer pieces may be shared objects; shorter ones are joined
JOINED_JSON_BYTES = 1 << 17


class JsonPieces:
    """Long JSON that may repeat parts: a repeated part is held once. It is filled, then taken."""

    def __init__(self) -> None:
        self.num_held = 0  # bytes
        self._pieces: deque[bytes] = deque()
        self._uses: Counter[int] = Counter()  # uses of pieces that may repeat, by id()
        self._tail = bytearray()

    def add(self, pieces: Iterable[bytes]) -> int:
        """Adds pieces, and returns how many more bytes are held for them."""
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
        """Yields each piece, and the bytes that are freed when the next one is asked for."""
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
    """Encodes a JSON array of the items, in slices of time."""
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
    """Encodes one server-sent event."""
    return b"data: " + json_bytes(data) + b"\n\n"


def finite(logprob: float) -> float:
    """Returns the logprob, or LOWEST_LOGPROB if that is higher."""
    return max(logprob, LOWEST_LOGPROB)
