"""Threads that notice at once when another process dies, whatever the other threads wait for."""

import contextlib
import os
import select
import socket
from collections.abc import Callable, Mapping

from pdserve.background.threads import KeptThread


class HangUpWatch:
    """Watches sockets for a hang-up. sockets: by rank; others may read them. on_gone: called once,
    from the thread, with the first rank whose socket hung up."""

    def __init__(
        self, sockets: Mapping[int, socket.socket], on_gone: Callable[[int], None]
    ) -> None:
        self._stop = os.eventfd(0)
        self._poll = select.poll()
        self._poll.register(self._stop, select.POLLIN)
        self._ranks = {end.fileno(): rank for rank, end in sockets.items()}
        for number in self._ranks:
            self._poll.register(number, select.POLLRDHUP)
        self._on_gone = on_gone
        self._thread = KeptThread("rank watch", self._watch)

    def stop(self) -> None:
        """End the thread. After the return nothing is called any more. Call it once, and not from
        on_gone."""
        os.eventfd_write(self._stop, 1)
        self._thread.finish()
        os.close(self._stop)

    def _watch(self) -> None:
        ready = {number for number, _ in self._poll.poll()}
        if self._stop not in ready:
            self._on_gone(min(self._ranks[number] for number in ready))


def end_with(parent: int, descriptor: int) -> None:
    """From now on, end this process when process `parent` ends, or when the descriptor's other end
    is closed. Both are watched, because that end may live on in other children of the parent."""
    look = select.poll()
    look.register(descriptor, select.POLLHUP)
    with contextlib.suppress(ProcessLookupError):
        look.register(os.pidfd_open(parent), select.POLLIN)

    def watch() -> None:
        if os.getppid() == parent:
            look.poll()
        os._exit(1)

    KeptThread("parent watch", watch)
