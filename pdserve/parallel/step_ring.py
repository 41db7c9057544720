"""Brings steps from rank 0 to the others on its node, through a ring in memory that all of them map
and a Unix socket to each.

One aligned write of 8 bytes publishes a message to all readers. A reader that has nothing to do
looks for a while, and then sleeps at its socket, where it is woken. Used by `step_channel`.

    ring:  [ published | read by 1st, it sleeps | read by 2nd, it sleeps | ... ][ data, a circle ]
    piece: [ length, and whether more follow ][ bytes, filled up to 8 ]
"""

import mmap
import os
import socket
import threading
import time
from collections.abc import Mapping

import numpy as np

from pdserve.parallel.rank_sockets import RankGone

LINE = 8  # distance in words of 8 bytes between what two processes write
WORD = 8
HEADER_BYTES = 4096
DATA_BYTES = 16 << 20
PIECE_BYTES = 1 << 20
MORE = 1 << 62
WAIT_S = 50e-6  # seconds between looks of a writer that waits for a slow reader
MAX_READERS = HEADER_BYTES // WORD // LINE - 1

_fence_lock = threading.Lock()


def _fence() -> None:
    """Stop the compiler and the processor from reordering: neither moves anything across a lock."""
    with _fence_lock:
        pass


class _Ring:
    """The ring's memory, as words and bytes."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, HEADER_BYTES + DATA_BYTES)
        self.words: np.ndarray = np.frombuffer(self._map, np.uint64, HEADER_BYTES // WORD)
        self._data = memoryview(self._map)[HEADER_BYTES:]

    def close(self) -> None:
        self.words = np.zeros(0, np.uint64)
        self._data.release()
        self._map.close()

    def put(self, at: int, data: bytes | memoryview) -> None:
        start = at % DATA_BYTES
        first = min(len(data), DATA_BYTES - start)
        self._data[start : start + first] = data[:first]
        self._data[: len(data) - first] = data[first:]

    def take(self, at: int, size: int) -> bytes:
        start = at % DATA_BYTES
        first = min(size, DATA_BYTES - start)
        head = bytes(self._data[start : start + first])
        return head if first == size else head + bytes(self._data[: size - first])


def _read_word(place: int) -> int:
    return place * LINE


def _sleep_word(place: int) -> int:
    return place * LINE + 1


class RingWriter:
    """Rank 0's end. bells: sockets to the other ranks, through which they get the ring. Whoever
    made them closes them."""

    def __init__(self, bells: Mapping[int, socket.socket], deadline_s: float) -> None:
        if len(bells) > MAX_READERS:
            raise ValueError(
                f"engine.tensor_parallel asks for {len(bells) + 1} ranks on a node: choose at most "
                f"{MAX_READERS + 1}"
            )
        self._deadline_s = deadline_s
        self._bells = dict(bells)
        self._ranks = dict(enumerate(bells, start=1))  # by place in the ring
        self._published = 0
        descriptor = os.memfd_create("pdserve-steps", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, HEADER_BYTES + DATA_BYTES)
            self._ring = _Ring(descriptor)
            self._give(descriptor)
        finally:
            os.close(descriptor)

    def _give(self, descriptor: int) -> None:
        for place, rank in self._ranks.items():
            try:
                socket.send_fds(self._bells[rank], [bytes([place])], [descriptor])
            except OSError:
                self._ring.close()
                raise RankGone(rank) from None
            self._bells[rank].setblocking(False)

    def send(self, message: bytes) -> None:
        """Send to all readers; see StepSender."""
        rest = memoryview(message)
        while True:
            piece, rest = rest[:PIECE_BYTES], rest[PIECE_BYTES:]
            self._publish(piece, more=bool(rest))
            if not rest:
                return

    def close(self) -> None:
        self._ring.close()

    def _publish(self, piece: memoryview, more: bool) -> None:
        words = self._ring.words
        size = WORD + len(piece) + -len(piece) % WORD
        if self._published + size - self._least_read() > DATA_BYTES:
            self._wait_for_room(size)
        head = len(piece) | (MORE if more else 0)
        self._ring.put(self._published, head.to_bytes(WORD, "little"))
        self._ring.put(self._published + WORD, piece)
        self._published += size
        _fence()
        words[0] = self._published
        _fence()
        for place, rank in self._ranks.items():
            if words[_sleep_word(place)]:
                words[_sleep_word(place)] = 0
                self._ring_bell(rank)

    def _wait_for_room(self, size: int) -> None:
        until = time.monotonic() + self._deadline_s
        while self._published + size - self._least_read() > DATA_BYTES:
            self._look_for_the_dead()
            if time.monotonic() > until:
                slowest = min(self._ranks, key=self._read_by)
                raise TimeoutError(
                    f"rank {self._ranks[slowest]} has read no step for {self._deadline_s:g} s"
                )
            time.sleep(WAIT_S)

    def _least_read(self) -> int:
        return min(map(self._read_by, self._ranks))

    def _read_by(self, place: int) -> int:
        return int(self._ring.words[_read_word(place)])

    def _ring_bell(self, rank: int) -> None:
        try:
            self._bells[rank].send(b"!")
        except BlockingIOError:
            pass  # it has not read earlier bells, so it is awake
        except OSError:
            raise RankGone(rank) from None

    def _look_for_the_dead(self) -> None:
        for rank, bell in self._bells.items():
            try:
                if bell.recv(1) == b"":
                    raise RankGone(rank)
            except BlockingIOError:
                continue
            except OSError:
                raise RankGone(rank) from None


class RingReader:
    """Another rank's end, over its socket to rank 0. spin_s: seconds it looks before it sleeps,
    which costs a core during that time."""

    def __init__(self, bell: socket.socket, spin_s: float) -> None:
        self._bell = bell
        self._spin_s = spin_s
        place, descriptors, _, _ = socket.recv_fds(bell, 1, 1)
        if not descriptors:
            raise RankGone(0)
        [self._place] = place
        self._ring = _Ring(descriptors[0])
        os.close(descriptors[0])
        self._read = 0

    def receive(self) -> bytes:
        """Wait for the next message; see StepReceiver."""
        pieces = []
        more = True
        while more:
            piece, more = self._next_piece()
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        self._ring.close()

    def _next_piece(self) -> tuple[bytes, bool]:
        if not self._is_there():
            self._wait()
        head = int.from_bytes(self._ring.take(self._read, WORD), "little")
        size = head & ~MORE
        piece = self._ring.take(self._read + WORD, size)
        self._read += WORD + size + -size % WORD
        _fence()
        self._ring.words[_read_word(self._place)] = self._read
        return piece, head != size

    def _is_there(self) -> bool:
        published = int(self._ring.words[0])
        _fence()
        return published > self._read

    def _wait(self) -> None:
        until = time.perf_counter() + self._spin_s
        while time.perf_counter() < until:
            if self._is_there():
                return
            os.sched_yield()
        asleep = _sleep_word(self._place)
        while True:
            self._ring.words[asleep] = 1
            _fence()
            if self._is_there():
                self._ring.words[asleep] = 0
                return
            try:
                heard = self._bell.recv(64)
            except OSError:
                heard = b""
            if not heard:
                raise RankGone(0)
