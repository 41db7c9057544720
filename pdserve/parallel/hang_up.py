"""A thread that learns at once when a process at the other end of a socket has died, whatever the
other threads wait for."""

import os
import select
import socket
import threading
from collections.abc import Callable, Mapping


class HangUpWatch:
    """sockets: by rank; others may read them. on_gone: is called once, from the thread, with the
    rank whose socket hung up first."""

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
        self._thread = threading.Thread(target=self._watch, name="rank watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Nothing is called any more once this has returned. Once, and not from on_gone."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)

    def _watch(self) -> None:
        ready = {number for number, _ in self._poll.poll()}
        if self._stop not in ready:
            self._on_gone(min(self._ranks[number] for number in ready))
