"""Steps from one writer to several readers, on its node and beyond: every message whole, in order,
to all; sleepers wake; who is gone is named."""

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from pdserve.parallel import step_ring
from pdserve.parallel.rank_sockets import RankGone
from pdserve.parallel.step_channel import StepReceiver, StepSender

PATIENCE_S = 20.0
ROOM_BYTES = 1 << 12


def far_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection with little room."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as there:
        for end in (listening, there):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM_BYTES)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM_BYTES)
        there.connect(listening.getsockname())
        here, _ = listening.accept()
        return here, socket.socket(fileno=there.detach())


PAIRS = {"near": socket.socketpair, "far": far_pair}


@contextmanager
def channel(
    *where: str, spins: bool = False, deadline_s: float = 5.0
) -> Iterator[tuple[StepSender, list[StepReceiver]]]:
    """Make a channel. where: of each reader, "near" or "far"."""
    pairs = [PAIRS[place]() for place in where]
    sender = StepSender({rank: here for rank, (here, _) in enumerate(pairs, 1)}, deadline_s)
    receivers = [StepReceiver(there, spins) for _, there in pairs]
    try:
        yield sender, receivers
    except BaseException:
        sender.hang_up()  # whoever still reads ends
        raise
    else:
        sender.close()
        for receiver in receivers:
            receiver.close()


@pytest.fixture(autouse=True)
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_ring, "DATA_BYTES", ROOM_BYTES)
    monkeypatch.setattr(step_ring, "PIECE_BYTES", 1 << 10)


wherever = pytest.mark.parametrize("where", PAIRS)


@pytest.mark.parametrize("spins", [False, True])
def test_every_message_comes_whole_and_in_order(spins: bool) -> None:
    """Several times round the ring, messages larger than a piece among them, while readers are
    sometimes slow."""
    chance = random.Random(7)
    messages = [chance.randbytes(chance.choice([0, 1, 7, 8, 900, 1024, 5000])) for _ in range(400)]

    def read(receiver: StepReceiver, seed: int) -> list[bytes]:
        chance = random.Random(seed)
        found = []
        for _ in messages:
            if chance.random() < 0.02:
                time.sleep(0.003)
            found.append(receiver.receive())
        return found

    with (
        ThreadPoolExecutor(3) as readers,
        channel("near", "far", "near", spins=spins) as (sender, receivers),
    ):
        reading = [readers.submit(read, receiver, i) for i, receiver in enumerate(receivers)]
        for message in messages:
            if chance.random() < 0.05:
                time.sleep(0.002)  # they fall asleep
            sender.send(message)
        assert all(found.result(PATIENCE_S) == messages for found in reading)


@wherever
def test_a_sleeping_reader_costs_nothing_and_wakes_at_once(where: str) -> None:
    with ThreadPoolExecutor(1) as reader, channel(where) as (sender, [receiver]):
        before = time.process_time()
        coming = reader.submit(lambda: (receiver.receive(), time.perf_counter()))
        time.sleep(0.5)
        assert time.process_time() - before < 0.05
        sent = time.perf_counter()
        sender.send(b"x")
        message, at = coming.result(5)
        assert message == b"x" and at - sent < 0.1


@wherever
def test_a_reader_hears_that_the_writer_is_gone(where: str) -> None:
    with channel(where) as (sender, [receiver]):
        sender.send(b"last")
        sender.hang_up()
        assert receiver.receive() == b"last"
        with pytest.raises(RankGone, match="rank 0"):
            receiver.receive()


@wherever
def test_the_writer_names_a_reader_that_is_gone(where: str) -> None:
    with channel("near", where) as (sender, [first, second]):
        second.end.close()
        with pytest.raises(RankGone, match="rank 2"):
            for _ in range(100):
                sender.send(bytes(100))
                first.receive()


@wherever
def test_a_reader_that_stands_still_is_named_in_time(where: str) -> None:
    said = r"rank 2 has (read no step for|not read a step within) 0\.2 s"
    with (
        channel("near", where, deadline_s=0.2) as (sender, [first, _]),
        pytest.raises(TimeoutError, match=said),
    ):
        for _ in range(100):
            sender.send(bytes(100))
            first.receive()


@wherever
def test_a_watch_tells_of_the_first_that_goes(where: str) -> None:
    gone: list[int] = []
    heard = threading.Event()

    def on_gone(rank: int) -> None:
        gone.append(rank)
        heard.set()

    with channel("near", where) as (sender, [_, second]):
        sender.watch(on_gone)
        time.sleep(0.05)
        assert not gone
        second.end.close()
        assert heard.wait(1.0) and gone == [2]


def test_a_watch_that_is_stopped_says_nothing() -> None:
    gone: list[int] = []
    with channel("near") as (sender, _):
        sender.watch(gone.append)
    time.sleep(0.05)
    assert not gone


def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with channel("near", "far") as (sender, receivers):
        sender.watch(lambda rank: None)
        sender.send(b"x")
        assert [receiver.receive() for receiver in receivers] == [b"x", b"x"]
    assert len(os.listdir("/proc/self/fd")) == before
