"""The TCP sockets of this process, found from outside the library that owns them: lists where it
listens, and cuts connections.

Used by `nixl_agent.sever`, because neither NIXL nor UCX ends a read in flight. Tried over TCP, with
the link cut in the middle of 64 MiB: the handle was released, `remove_remote_agent` was called, or
both. Each time the rest landed when the link came back. Towards a host that falls silent, TCP
itself gives up only after a quarter of an hour. Shutting down the socket solves both. UCX reads its
end, fails the endpoint and closes it, and the kernel refuses what still comes. Knows no peers.
"""

import os
import socket
from collections.abc import Collection, Iterator

Address = tuple[str, int]


def _tcp_sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of each socket, which is closed after the loop's turn. Sockets that are
    closed or replaced meanwhile are left out."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(entry)))
        except OSError:
            continue
        with found:
            if (
                found.family in (socket.AF_INET, socket.AF_INET6)
                and found.type == socket.SOCK_STREAM
            ):
                yield found


def listening() -> set[Address]:
    """Returns the addresses that peers may connect to."""
    return {
        found.getsockname()[:2]
        for found in _tcp_sockets()
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def sever(addresses: Collection[Address]) -> int:
    """Shut down every connection whose other end is one of these. Returns their number."""
    count = 0
    for found in _tcp_sockets():
        try:
            if found.getpeername()[:2] in addresses:
                found.shutdown(socket.SHUT_RDWR)
                count += 1
        except OSError:  # it listens, or its other end is already gone
            continue
    return count
