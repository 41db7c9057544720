"""Cuts event batches into pieces that Serve's gRPC accepts (4 MiB per message as delivered), and
joins them again.

Almost every batch is one piece; large `prompt_logprobs` need several. Used by
`cluster.deployments.worker_replica` and `cluster.links.serve_links`.
"""

from collections.abc import Iterator

PIECE_BYTES = 2 << 20

_LAST = b"."
_MORE = b"+"


def cut(message: bytes) -> Iterator[bytes]:
    """Yields pieces of at most PIECE_BYTES; one byte before each says whether another follows."""
    start = 0
    while len(message) - start > PIECE_BYTES:
        yield _MORE + message[start : start + PIECE_BYTES]
        start += PIECE_BYTES
    yield _LAST + message[start:]


class Joiner:
    """Takes pieces in order, and returns each message when its last piece comes."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def feed(self, piece: bytes) -> bytes | None:
        self._parts.append(piece[1:])
        if piece[:1] == _MORE:
            return None
        message = b"".join(self._parts)
        self._parts.clear()
        return message
