"""Brings an engine's steps from rank 0 to the other ranks: by a ring in memory on its node, and by
TCP beyond.

If an end finds its socket hung up, the other side has died. Knows only bytes, nothing of their
content.

    rank 0: StepSender -+- step_ring ---> StepReceiver of each rank on the node
                        +- step_stream -> StepReceiver of each rank on another
"""

import socket
from collections.abc import Callable, Mapping

from pdserve.parallel.hang_up import HangUpWatch
from pdserve.parallel.rank_sockets import is_near
from pdserve.parallel.step_ring import RingReader, RingWriter
from pdserve.parallel.step_stream import StreamReader, StreamWriter

SPIN_S = 200e-6


class StepSender:
    """Rank 0's end. ends: its sockets to the other ranks, by rank (see rank_sockets.gather); the
    channel owns them from now on. Each rank makes a StepReceiver of the other end."""

    def __init__(self, ends: Mapping[int, socket.socket], deadline_s: float) -> None:
        self._ends = dict(ends)
        self._watch: HangUpWatch | None = None
        near = {rank: end for rank, end in ends.items() if is_near(end)}
        far = {rank: end for rank, end in ends.items() if rank not in near}
        try:
            self._stream = StreamWriter(far, deadline_s)
            self._ring = RingWriter(near, deadline_s) if near else None
        except BaseException:
            self.hang_up()
            raise

    def watch(self, on_gone: Callable[[int], None]) -> None:
        """Call on_gone when a rank dies; see HangUpWatch."""
        self._watch = HangUpWatch(self._ends, on_gone)

    def send(self, message: bytes) -> None:
        """Send to all ranks, in order. RankGone if one of them is gone; TimeoutError if one does
        not read for `deadline_s`."""
        self._stream.send(message)  # first, because its way is longer
        if self._ring is not None:
            self._ring.send(message)

    def hang_up(self) -> None:
        """Let readers notice that this end is gone, after they have read what was sent."""
        for end in self._ends.values():
            end.close()

    def close(self) -> None:
        """Hang up. From now on nobody is told of readers that go. Call it once."""
        if self._watch is not None:
            self._watch.stop()
        self.hang_up()
        if self._ring is not None:
            self._ring.close()


class StepReceiver:
    """Another rank's end. end: its socket to rank 0; the channel owns it from now on. spins: look
    for a while before sleeping, which costs a core during that time."""

    def __init__(self, end: socket.socket, spins: bool) -> None:
        self.end = end
        spin_s = SPIN_S if spins else 0.0
        make = RingReader if is_near(end) else StreamReader
        self._reader: RingReader | StreamReader = make(end, spin_s)

    def receive(self) -> bytes:
        """Wait for the next message. RankGone if rank 0 is gone."""
        return self._reader.receive()

    def close(self) -> None:
        self.end.close()
        self._reader.close()
