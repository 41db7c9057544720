"""Messages of bytes between two ranks, both ways, whole and in order: what the step channel is not
for.

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
                [size] = HEAD.unpack(self._exactly(HEAD.size))
                on_message(self._exactly(size))
        except (EOFError, OSError):
            on_gone()

    def _exactly(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            piece = self._end.recv(size - len(found))
            if not piece:
                raise EOFError
            found += piece
        return bytes(found)
