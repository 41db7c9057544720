"""The way of an engine's steps from rank 0 to the others on its node: a ring in memory that all of
them map, and a Unix socket to each.

A message is published to all readers by one aligned write of 8 bytes. A reader that has nothing to
do looks for a while and then sleeps at its socket, where it is woken. Who finds its socket hung up
knows that the other side has died. Knows bytes alone, nothing of what is in them.

    ring:  [ published | read by 1, sleeps 1 | read by 2, sleeps 2 | ... ][ data, a circle ]
    piece: [ length, and whether more follow ][ bytes, filled up to 8 ]
"""

import contextlib
import mmap
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pdserve.parallel.hang_up import HangUpWatch

LINE = 8  # words of 8 bytes between what two processes write
WORD = 8
HEADER_BYTES = 4096
DATA_BYTES = 16 << 20
PIECE_BYTES = 1 << 20
MORE = 1 << 62
SPIN_S = 200e-6
WAIT_S = 50e-6  # a writer that waits for a slow reader looks again after so long
HELLO = struct.Struct("=I")
MAX_READERS = HEADER_BYTES // WORD // LINE - 1

_fence_lock = threading.Lock()


def _fence() -> None:
    """Nothing moves across: neither compiler nor processor reorders around a lock."""
    with _fence_lock:
        pass


class ChannelClosed(ConnectionError):
    """The process at the other end is gone. rank: which."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"the process of rank {rank} is gone")
        self.rank = rank


class _Ring:
    """The memory, as words and bytes."""

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


def _read_word(rank: int) -> int:
    return rank * LINE


def _sleep_word(rank: int) -> int:
    return rank * LINE + 1


class StepSender:
    """Rank 0's end; ranks 1 to num_readers listen. address: what they connect to, a Unix socket in
    a folder that only this user can enter."""

    def __init__(self, num_readers: int, deadline_s: float) -> None:
        if not 0 < num_readers <= MAX_READERS:
            raise ValueError(f"num_readers must be from 1 to {MAX_READERS}, not {num_readers}")
        self._deadline_s = deadline_s
        self._ranks = range(1, num_readers + 1)
        self._descriptor = os.memfd_create("pdserve-steps", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, HEADER_BYTES + DATA_BYTES)
        self._ring = _Ring(self._descriptor)
        self._published = 0
        self._folder = tempfile.TemporaryDirectory(prefix="pdserve-")
        self.address = str(Path(self._folder.name) / "steps")
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(self.address)
        self._listening.listen(num_readers)
        self._bells: dict[int, socket.socket] = {}
        self._watch: HangUpWatch | None = None

    def accept(self, check: Callable[[], None], deadline_s: float) -> None:
        """Wait for all readers. check: is called meanwhile, and may raise. TimeoutError names those
        that did not come."""
        deadline = time.monotonic() + deadline_s
        self._listening.settimeout(0.05)
        while missing := set(self._ranks) - self._bells.keys():
            check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {min(missing)} did not connect within {deadline_s:g} s")
            with contextlib.suppress(TimeoutError):
                bell, _ = self._listening.accept()
                bell.settimeout(max(deadline - time.monotonic(), 0.1))
                [rank] = HELLO.unpack(bell.recv(HELLO.size, socket.MSG_WAITALL))
                socket.send_fds(bell, [b"."], [self._descriptor])
                bell.setblocking(False)
                self._bells[rank] = bell
        self._listening.close()
        self._folder.cleanup()
        os.close(self._descriptor)

    def watch(self, on_gone: Callable[[int], None]) -> None:
        """See HangUpWatch."""
        self._watch = HangUpWatch(self._bells, on_gone)

    def send(self, message: bytes) -> None:
        """To all readers, in order. ChannelClosed when one of them is gone; TimeoutError when one
        reads nothing for `deadline_s`."""
        rest = memoryview(message)
        while True:
            piece, rest = rest[:PIECE_BYTES], rest[PIECE_BYTES:]
            self._publish(piece, more=bool(rest))
            if not rest:
                return

    def hang_up(self) -> None:
        """Readers hear that this end is gone, once they have read what was sent."""
        for bell in self._bells.values():
            bell.close()

    def close(self) -> None:
        """Hang up. Nobody is told of readers that go from now on. Once."""
        if self._watch is not None:
            self._watch.stop()
        self.hang_up()
        if self._listening.fileno() >= 0:  # not all have come
            self._listening.close()
            self._folder.cleanup()
            os.close(self._descriptor)
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
        for rank in self._ranks:
            if words[_sleep_word(rank)]:
                words[_sleep_word(rank)] = 0
                self._ring_bell(rank)

    def _wait_for_room(self, size: int) -> None:
        until = time.monotonic() + self._deadline_s
        while self._published + size - self._least_read() > DATA_BYTES:
            self._look_for_the_dead()
            if time.monotonic() > until:
                read = {int(self._ring.words[_read_word(rank)]): rank for rank in self._ranks}
                raise TimeoutError(
                    f"rank {read[min(read)]} has read no step for {self._deadline_s:g} s"
                )
            time.sleep(WAIT_S)

    def _least_read(self) -> int:
        return min(int(self._ring.words[_read_word(rank)]) for rank in self._ranks)

    def _ring_bell(self, rank: int) -> None:
        try:
            self._bells[rank].send(b"!")
        except BlockingIOError:
            pass  # it has not read the last ones: it is awake
        except OSError:
            raise ChannelClosed(rank) from None

    def _look_for_the_dead(self) -> None:
        for rank, bell in self._bells.items():
            try:
                if bell.recv(1) == b"":
                    raise ChannelClosed(rank)
            except BlockingIOError:
                continue
            except OSError:
                raise ChannelClosed(rank) from None


class StepReceiver:
    """The end of rank `rank`. spins: whether it looks for a while before it sleeps, which costs a
    core that while."""

    def __init__(self, address: str, rank: int, spins: bool) -> None:
        self._rank = rank
        self._spin_s = SPIN_S if spins else 0.0
        self.bell = self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._bell.connect(address)
        self._bell.sendall(HELLO.pack(rank))
        _, [descriptor], _, _ = socket.recv_fds(self._bell, 1, 1)
        self._ring = _Ring(descriptor)
        os.close(descriptor)
        self._read = 0

    def receive(self) -> bytes:
        """The next message; waits for it. ChannelClosed when rank 0 is gone."""
        pieces = []
        more = True
        while more:
            piece, more = self._next_piece()
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        self._bell.close()
        self._ring.close()

    def _next_piece(self) -> tuple[bytes, bool]:
        if not self._is_there():
            self._wait()
        head = int.from_bytes(self._ring.take(self._read, WORD), "little")
        size = head & ~MORE
        piece = self._ring.take(self._read + WORD, size)
        self._read += WORD + size + -size % WORD
        _fence()
        self._ring.words[_read_word(self._rank)] = self._read
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
        asleep = _sleep_word(self._rank)
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
                raise ChannelClosed(0)
