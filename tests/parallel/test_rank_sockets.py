"""Rank 0 and the others find each other: on a node, beyond it, in time; strangers are sent away."""

import os
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from support.far_ranks import part_files

from pdserve.parallel import rank_sockets
from pdserve.parallel.bring_up import RankGroup
from pdserve.parallel.dims import ParallelDims
from pdserve.parallel.rank_sockets import HELLO, gather, is_near, reach, read_exactly

Ends = dict[int, socket.socket]


@dataclass
class Met:
    """Sockets that were connected. here: rank 0's sockets; there: the others', by rank."""

    here: Ends = field(default_factory=dict)
    there: Ends = field(default_factory=dict)

    def __enter__(self) -> "Met":
        return self

    def __exit__(self, *_: object) -> None:
        for end in (*self.here.values(), *self.there.values()):
            end.close()


def meet(size: int, come: frozenset[int] | None = None) -> Met:
    """All ranks, each in a thread; only those of `come` reach out."""
    host = RankGroup.host(ParallelDims(tp=size))

    def other(rank: int) -> socket.socket | None:
        group = RankGroup.join(ParallelDims(tp=size, rank=rank), host.address)
        if come is None or rank in come:
            return reach(group, "test")
        group.agree("sockets for test")
        return None

    met = Met()
    with ThreadPoolExecutor(size) as ranks:
        coming: dict[int, Future[socket.socket | None]] = {
            rank: ranks.submit(other, rank) for rank in range(1, size)
        }
        try:
            met.here = gather(host, "test")
        finally:
            for rank, end in coming.items():
                if (found := end.result()) is not None:
                    met.there[rank] = found
                    if not met.here:
                        found.close()
    return met


def check_talk(met: Met, *, near: bool) -> None:
    assert met.here.keys() == met.there.keys() == {1, 2}
    for rank, end in met.here.items():
        assert is_near(end) is is_near(met.there[rank]) is near
        end.sendall(bytes([rank]) * 3)
        assert read_exactly(met.there[rank], 3) == bytes([rank]) * 3
        met.there[rank].sendall(b"back")
        assert read_exactly(end, 4) == b"back"


def test_ranks_of_a_node_meet_at_a_file() -> None:
    with meet(3) as met:
        check_talk(met, near=True)


def test_ranks_that_share_no_files_meet_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    part_files(monkeypatch)
    with meet(3) as met:
        check_talk(met, near=False)
        for end in (*met.here.values(), *met.there.values()):
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            probes = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
            assert probes == rank_sockets.PROBES


def test_one_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_sockets, "PHASE_DEADLINE_S", 0.3)
    with pytest.raises(TimeoutError, match=r"rank 2 did not connect within 0\.3 s"):
        meet(3, come=frozenset({1}))


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n\r\n\r\n", HELLO.pack(bytes(16), 1)])
def test_strangers_are_sent_away(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds the port but not the word is no rank, and keeps none from coming."""
    part_files(monkeypatch)
    monkeypatch.setattr(rank_sockets, "HELLO_S", 0.1)
    port: list[int] = []
    address = rank_sockets._address

    def seen(near: socket.socket, far: socket.socket, word: bytes) -> rank_sockets._Address:
        port.append(far.getsockname()[1])
        stranger.start()
        time.sleep(0.1)  # it is first
        return address(near, far, word)

    answers: list[bytes] = []

    def knock() -> None:
        with socket.create_connection(("127.0.0.1", port[0])) as end:
            end.sendall(said)
            end.settimeout(5)
            try:
                answers.append(end.recv(1))
            except ConnectionResetError:  # it did not read all that was said
                answers.append(b"")

    stranger = threading.Thread(target=knock)
    monkeypatch.setattr(rank_sockets, "_address", seen)
    with meet(3) as met:
        check_talk(met, near=False)
    stranger.join()
    assert answers == [b""]


def test_nothing_is_left_open() -> None:
    with meet(2):
        pass
    before = len(os.listdir("/proc/self/fd"))
    with meet(2):
        pass
    assert len(os.listdir("/proc/self/fd")) == before
