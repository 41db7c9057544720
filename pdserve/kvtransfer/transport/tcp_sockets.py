"""The TCP sockets of this process, found from outside the library that owns them: where it listens,
and cutting connections.

For `nixl_agent.sever`. Neither NIXL nor UCX ends a read in flight. Tried over TCP, link cut in the
middle of 64 MiB: after the handle was released, after `remove_remote_agent`, and after both, the
rest landed when the link came back; and towards a host that fell silent TCP itself gives up after a
quarter of an hour only. A socket that is shut down ends both: UCX reads its end, fails the endpoint
and closes it, and the kernel refuses what still comes. Knows no peers.
"""

import os
import socket
from collections.abc import Collection, Iterator

Address = tuple[str, int]


def _tcp_sockets() -> Iterator[socket.socket]:
    """A duplicate of each, closed behind the loop's turn; what is closed or replaced meanwhile is
    left out."""
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
    """Addresses that peers may connect to."""
    return {
        found.getsockname()[:2]
        for found in _tcp_sockets()
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def sever(addresses: Collection[Address]) -> int:
    """Shut down every connection whose other end is one of these. How many there were."""
    count = 0
    for found in _tcp_sockets():
        try:
            if found.getpeername()[:2] in addresses:
                found.shutdown(socket.SHUT_RDWR)
                count += 1
        except OSError:  # listens, or its other end is gone already
            continue
    return count
