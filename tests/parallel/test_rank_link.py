"""Messages between two ranks: whole, in order, from any thread; an end that is gone is noticed."""

import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.waiting import until

from pdserve.parallel.rank_link import RankLink


@pytest.fixture
def ends() -> Iterator[tuple[RankLink, RankLink]]:
    here, there = (RankLink(end) for end in socket.socketpair())
    yield here, there
    here.close()
    there.close()


def test_messages_of_several_threads_come_whole_and_each_in_order(
    ends: tuple[RankLink, RankLink],
) -> None:
    here, there = ends
    heard: list[bytes] = []
    there.read(heard.append, lambda: None)

    def send(name: int) -> list[bytes]:
        chance = random.Random(name)
        sent = [bytes([name]) + chance.randbytes(chance.choice([0, 3, 70_000])) for _ in range(60)]
        for message in sent:
            here.send(message)
        return sent

    with ThreadPoolExecutor(3) as threads:
        sent = list(threads.map(send, range(3)))
    until(lambda: len(heard) == 180)
    for name in range(3):
        assert [message for message in heard if message[0] == name] == sent[name]


def test_an_end_that_is_gone_is_told_and_named(ends: tuple[RankLink, RankLink]) -> None:
    here, there = ends
    gone = threading.Event()
    heard: list[bytes] = []
    here.read(heard.append, gone.set)
    there.send(b"last")
    there.close()
    assert gone.wait(5) and heard == [b"last"]
    with pytest.raises(ConnectionError, match="the other rank is gone"):
        for _ in range(100):
            here.send(bytes(10_000))


def test_a_message_that_is_too_large_is_refused(
    ends: tuple[RankLink, RankLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.parallel.rank_link.MAX_BYTES", 10)
    with pytest.raises(ValueError, match="a message has 11 bytes, more than 10"):
        ends[0].send(bytes(11))
