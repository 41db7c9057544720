"""Brings steps from rank 0 to ranks on other nodes, over TCP. Used by `step_channel`.

message: [ length ][ bytes ]
"""

import socket
import struct
import time
from collections.abc import Mapping

from pdserve.parallel.rank_sockets import RankGone, read_exactly

HEAD = struct.Struct("=Q")


class StreamWriter:
    """Rank 0's end. ends: sockets to the other ranks. Whoever made them closes them."""

    def __init__(self, ends: Mapping[int, socket.socket], deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._ends = dict(ends)
        for end in self._ends.values():
            end.settimeout(deadline_s)

    def send(self, message: bytes) -> None:
        """Send to all readers; see StepSender."""
        whole = HEAD.pack(len(message)) + message
        for rank, end in self._ends.items():
            try:
                end.sendall(whole)
            except OSError as error:
                if isinstance(error, TimeoutError) and not error.errno:  # the socket's, not TCP's
                    raise TimeoutError(
                        f"rank {rank} has not read a step within {self._deadline_s:g} s"
                    ) from None
                raise RankGone(rank) from None


class StreamReader:
    """Another rank's end. spin_s: seconds it looks before it sleeps, which costs a core during that
    time."""

    def __init__(self, end: socket.socket, spin_s: float) -> None:
        self._end = end
        self._spin_s = spin_s

    def receive(self) -> bytes:
        """Wait for the next message; see StepReceiver."""
        self._spin()
        try:
            [size] = HEAD.unpack(read_exactly(self._end, HEAD.size))
            return bytes(read_exactly(self._end, size))
        except (EOFError, OSError):
            raise RankGone(0) from None

    def close(self) -> None:
        """Do nothing, because there is only the socket, which others close."""

    def _spin(self) -> None:
        until = time.perf_counter() + self._spin_s
        while time.perf_counter() < until:
            try:
                self._end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                continue
            except OSError:
                return  # the read that follows raises it again
