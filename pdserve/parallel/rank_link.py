"""Messages of bytes between rank 0 and each other, both ways, whole and in order: what the step
channel is not for.

Over a stream socket, with a thread that reads; any thread may send. Knows nothing of what is in the
messages.
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
    """One end. Nothing is read before `read`."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()
        self._reader: KeptThread | None = None

    def read(self, on_message: Callable[[bytes], None], on_gone: Callable[[], None]) -> None:
        """From now on every message goes to on_message, on a thread of the link's; on_gone is
        called there once when the other end is gone, or this one closed."""
        self._reader = KeptThread("rank link", partial(self._read, on_message, on_gone))

    def send(self, message: bytes) -> None:
        """Waits while the other end is far behind. ConnectionError when it is gone; ValueError for
        a message that is too large."""
        if len(message) > MAX_BYTES:
            raise ValueError(f"a message has {len(message)} bytes, more than {MAX_BYTES}")
        with self._sending:
            try:
                self._end.sendall(HEAD.pack(len(message)) + message)
            except OSError as error:
                raise ConnectionError(f"the other rank is gone: {error}") from error

    def close(self) -> None:
        """The other end reads what was sent. Idempotent; not on the link's own thread."""
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
    """Rank 0's links to each other rank, which calls `join_link` of the same name meanwhile.
    TimeoutError names one that does not."""
    return {rank: RankLink(end) for rank, end in gather(group, name).items()}


def join_link(group: RankGroup, name: str) -> RankLink:
    """Another rank's link to rank 0."""
    return RankLink(reach(group, name))
