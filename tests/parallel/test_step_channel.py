"""The ring from one writer to several readers: every message whole, in order, to all; sleepers
wake; who is gone is named."""

import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from pdserve.parallel import step_channel
from pdserve.parallel.step_channel import ChannelClosed, StepReceiver, StepSender

PATIENCE_S = 20.0


@contextmanager
def channel(
    num_readers: int, spins: bool = False, deadline_s: float = 5.0
) -> Iterator[tuple[StepSender, list[StepReceiver]]]:
    sender = StepSender(num_readers, deadline_s)
    with ThreadPoolExecutor(num_readers) as readers:
        made = [
            readers.submit(StepReceiver, sender.address, rank, spins)
            for rank in range(1, num_readers + 1)
        ]
        sender.accept(lambda: None, 10.0)
        receivers = [receiver.result() for receiver in made]
    try:
        yield sender, receivers
    except BaseException:
        sender.hang_up()  # whoever still reads ends
        raise
    else:
        sender.close()
        for receiver in receivers:
            receiver.close()


@pytest.mark.parametrize("spins", [False, True])
def test_every_message_comes_whole_and_in_order(
    spins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several times round a small ring, messages larger than a piece among them, while readers are
    sometimes slow."""
    monkeypatch.setattr(step_channel, "DATA_BYTES", 1 << 12)
    monkeypatch.setattr(step_channel, "PIECE_BYTES", 1 << 10)
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

    with ThreadPoolExecutor(3) as readers, channel(3, spins) as (sender, receivers):
        reading = [readers.submit(read, receiver, i) for i, receiver in enumerate(receivers)]
        for message in messages:
            if chance.random() < 0.05:
                time.sleep(0.002)  # they fall asleep
            sender.send(message)
        assert all(found.result(PATIENCE_S) == messages for found in reading)


def test_a_sleeping_reader_costs_nothing_and_wakes_at_once() -> None:
    with ThreadPoolExecutor(1) as reader, channel(1) as (sender, [receiver]):
        before = time.process_time()
        coming = reader.submit(lambda: (receiver.receive(), time.perf_counter()))
        time.sleep(0.5)
        assert time.process_time() - before < 0.05
        sent = time.perf_counter()
        sender.send(b"x")
        message, at = coming.result(5)
        assert message == b"x" and at - sent < 0.1


def test_a_reader_hears_that_the_writer_is_gone() -> None:
    with channel(1) as (sender, [receiver]):
        sender.send(b"last")
        sender.hang_up()
        assert receiver.receive() == b"last"
        with pytest.raises(ChannelClosed, match="rank 0"):
            receiver.receive()


def test_the_writer_names_a_reader_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_channel, "DATA_BYTES", 1 << 12)
    with channel(2) as (sender, [first, second]):
        second.bell.close()
        with pytest.raises(ChannelClosed, match="rank 2"):
            for _ in range(100):
                sender.send(bytes(100))
                first.receive()


def test_a_reader_that_stands_still_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_channel, "DATA_BYTES", 1 << 12)
    said = r"rank 2 has read no step for 0\.2 s"
    with (
        channel(2, deadline_s=0.2) as (sender, [first, _]),
        pytest.raises(TimeoutError, match=said),
    ):
        for _ in range(100):
            sender.send(bytes(100))
            first.receive()


def test_a_watch_tells_of_the_first_that_goes() -> None:
    gone: list[int] = []
    heard = threading.Event()

    def on_gone(rank: int) -> None:
        gone.append(rank)
        heard.set()

    with channel(2) as (sender, [_, second]):
        sender.watch(on_gone)
        time.sleep(0.05)
        assert not gone
        second.bell.close()
        assert heard.wait(1.0) and gone == [2]


def test_a_watch_that_is_stopped_says_nothing() -> None:
    gone: list[int] = []
    with channel(1) as (sender, _):
        sender.watch(gone.append)
    time.sleep(0.05)
    assert not gone


def test_readers_that_do_not_come_are_named() -> None:
    sender = StepSender(2, 5.0)
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(StepReceiver, sender.address, 1, False)
        with pytest.raises(TimeoutError, match="rank 2 did not connect"):
            sender.accept(lambda: None, 0.3)
        coming.result().close()
    sender.close()


def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with channel(2) as (sender, receivers):
        sender.watch(lambda rank: None)
        sender.send(b"x")
        assert [receiver.receive() for receiver in receivers] == [b"x", b"x"]
    assert len(os.listdir("/proc/self/fd")) == before
