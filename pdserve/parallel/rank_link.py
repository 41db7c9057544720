"""Messages of bytes between rank 0 and each other rank, both ways, whole and in order. They carry
what the step channel is not for.

They go over a stream socket, which a thread reads; any thread may send. Knows nothing of the
content.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from functools import partial

from pdserve.background.threads import KeptThread
from pdserve.parallel.bring_up import RankGroup
from pdserve.parallel.rank_sockets import gather, reach, read_exactly

HEAD = struct.Struct("=I")
MAX_BYTES = 1 << 30


class RankLink:
    """One end of a link. Nothing is read before the call of `read`."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()
        self._reader: KeptThread | None = None

    def read(self, on_message: Callable[[bytes], None], on_gone: Callable[[], None]) -> None:
        """Pass every message to on_message from now on, on the link's thread. on_gone is called
        there once, when the other end is gone or this one is closed."""
        self._reader = KeptThread("rank link", partial(self._read, on_message, on_gone))

    def send(self, message: bytes) -> None:
        """Send a message; waits while the other end is far behind. ConnectionError if it is gone;
        ValueError if the message is too large."""
        if len(message) > MAX_BYTES:
            raise ValueError(f"a message has {len(message)} bytes, more than {MAX_BYTES}")
        with self._sending:
            try:
                self._end.sendall(HEAD.pack(len(message)) + message)
            except OSError as error:
                raise ConnectionError(f"the other rank is gone: {error}") from error

    def close(self) -> None:
        """Close this end. The other end still reads what was sent. Idempotent; must not be called
        on the link's own thread."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        if self._reader is not None:
            self._reader.finish()
        self._end.close()

    def _read(self, on_message: Callable[[bytes], None], on_gone: Callable[[], None]) -> None:
        try:
            while True:
                [size] = HEAD.unpack(read_exactly(self._end, HEAD.size))
                on_message(bytes(read_exactly(self._end, size)))
        except (EOFError, OSError):
            on_gone()


def host_links(group: RankGroup, name: str) -> dict[int, RankLink]:
    """Make rank 0's links to each other rank. Each of these calls `join_link` with the same name
    at the same time. TimeoutError names a rank that does not."""
    return {rank: RankLink(end) for rank, end in gather(group, name).items()}


def join_link(group: RankGroup, name: str) -> RankLink:
    """Make another rank's link to rank 0."""
    return RankLink(reach(group, name))
