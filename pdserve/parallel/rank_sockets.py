"""A stream socket between rank 0 and each other rank: Unix if they share a node's files, else TCP.

An idle TCP socket closes by itself about 15 seconds after its other node vanished. One that has
sent in vain is ended by the step's deadline. A client that connects without the secret word, which
rank 0 gives out at the ranks' store, is sent away.
"""

import contextlib
import secrets
import select
import socket
import struct
import tempfile
import time
from pathlib import Path

import msgspec

from pdserve.parallel.bring_up import PHASE_DEADLINE_S, RankGroup

HELLO = struct.Struct("=16sI")
HELLO_S = 1.0  # seconds for a client to say who it is
LOOK_S = 0.05
# Errors for a path that does not exist, is in a file system that nodes share, or is another user's.
NOT_NEAR = (FileNotFoundError, ConnectionRefusedError, PermissionError)
PROBE_S = 3  # whole seconds, because TCP counts in them
PROBES = 4


class RankGone(ConnectionError):
    """The process at the other end, of rank `rank`, is gone."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"the process of rank {rank} is gone")
        self.rank = rank


class _Address(msgspec.Struct, frozen=True):
    """Where rank 0 listens. path: of the Unix socket. word: 32 hexadecimal digits."""

    path: str
    host: str
    port: int
    word: str


def gather(group: RankGroup, name: str) -> dict[int, socket.socket]:
    """Make rank 0's sockets, by rank. Each other rank calls `reach` with the same name at the same
    time; a name must not be used twice. TimeoutError names a rank that does not."""
    host = group.rank0_host
    word = secrets.token_bytes(16)
    with (
        tempfile.TemporaryDirectory(prefix="pdserve-") as folder,  # only this user can enter it
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as near,
        socket.create_server((host, 0), backlog=group.dims.world_size) as far,
    ):
        near.bind(str(Path(folder) / "rank0"))
        near.listen(group.dims.world_size)
        group.agree(_phase(name), msgspec.to_builtins(_address(near, far, word)))
        return _accept_all(group, [near, far], word)


def reach(group: RankGroup, name: str) -> socket.socket:
    """Make another rank's socket to rank 0. OSError if it cannot be reached."""
    address = msgspec.convert(group.agree(_phase(name))[0], _Address)
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            end.connect(address.path)
        except NOT_NEAR:
            end.close()
            end = socket.create_connection((address.host, address.port), timeout=PHASE_DEADLINE_S)
            end.settimeout(None)
            _set_up(end)
        end.sendall(HELLO.pack(bytes.fromhex(address.word), group.dims.rank))
    except BaseException:
        end.close()
        raise
    return end


def _address(near: socket.socket, far: socket.socket, word: bytes) -> _Address:
    host, port = far.getsockname()[:2]
    return _Address(near.getsockname(), host, port, word.hex())


def is_near(end: socket.socket) -> bool:
    """True if the two sides share a node."""
    return end.family == socket.AF_UNIX


def read_exactly(end: socket.socket, size: int) -> bytearray:
    """Wait for `size` bytes. EOFError if the other side has hung up."""
    found = bytearray(size)
    rest = memoryview(found)
    while rest:
        if not (count := end.recv_into(rest)):
            raise EOFError
        rest = rest[count:]
    return found


def _accept_all(
    group: RankGroup, listening: list[socket.socket], word: bytes
) -> dict[int, socket.socket]:
    ends: dict[int, socket.socket] = {}
    deadline = time.monotonic() + PHASE_DEADLINE_S
    try:
        while missing := set(range(1, group.dims.world_size)) - ends.keys():
            group.check()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {min(missing)} did not connect within {PHASE_DEADLINE_S:g} s"
                )
            for one in select.select(listening, [], [], LOOK_S)[0]:
                end, _ = one.accept()
                if (rank := _rank_of(end, word)) in missing:
                    ends[rank] = end
                else:
                    end.close()
    except BaseException:
        for end in ends.values():
            end.close()
        raise
    return ends


def _rank_of(end: socket.socket, word: bytes) -> int:
    """The rank that has connected; -1 if it is no rank of ours."""
    end.settimeout(HELLO_S)
    with contextlib.suppress(OSError, EOFError):
        said, rank = HELLO.unpack(read_exactly(end, HELLO.size))
        if secrets.compare_digest(said, word):
            end.settimeout(None)
            _set_up(end)
            return int(rank)
    return -1


def _set_up(end: socket.socket) -> None:
    if is_near(end):
        return
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)


def _phase(name: str) -> str:
    return f"sockets for {name}"
