"""Messages of bytes between rank 0 and each other, both ways, whole and in order: what the step
channel is not for.

Over a stream socket, with a thread that reads; any thread may send. Knows nothing of what is in the
messages.
"""

import contextlib
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pdserve.background.threads import KeptThread
from pdserve.parallel.bring_up import PHASE_DEADLINE_S, RankGroup

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


def host_links(group: RankGroup, name: str) -> dict[int, RankLink]:
    """Rank 0's links to each other rank, which calls `join_link` of the same name meanwhile.
    TimeoutError names one that does not."""
    links: dict[int, RankLink] = {}
    with (
        tempfile.TemporaryDirectory(prefix="pdserve-") as folder,  # only this user can enter it
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening,
    ):
        address = str(Path(folder) / "links")
        listening.bind(address)
        listening.listen(group.dims.world_size)
        listening.settimeout(0.05)
        group.agree(_phase(name), address)
        deadline = time.monotonic() + PHASE_DEADLINE_S
        while missing := set(range(1, group.dims.world_size)) - links.keys():
            group.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {min(missing)} did not link up in time")
            with contextlib.suppress(TimeoutError):
                end, _ = listening.accept()
                end.settimeout(1.0)
                [rank] = HEAD.unpack(end.recv(HEAD.size, socket.MSG_WAITALL))
                end.settimeout(None)
                links[rank] = RankLink(end)
    return links


def join_link(group: RankGroup, name: str) -> RankLink:
    """Another rank's link to rank 0."""
    address = group.agree(_phase(name))[0]
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.connect(address)
    end.sendall(HEAD.pack(group.dims.rank))
    return RankLink(end)


def _phase(name: str) -> str:
    return f"link for {name}"
