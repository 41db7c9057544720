"""The processes of an engine's ranks on this node, held so that they can be ended in whatever state
they are: Ray asks a process to end itself, and one that is frozen does not hear it.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable


class EngineProcesses:
    """pids: of living processes. One that has ended since is not taken for another of its
    number."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._descriptors = [os.pidfd_open(pid) for pid in pids]

    def kill(self, wait_s: float) -> bool:
        """At once. Whether they are gone within wait_s, and their GPU memory with them."""
        for descriptor in self._descriptors:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        until = time.monotonic() + wait_s
        return all(_has_ended(each, until) for each in self._descriptors)


def _has_ended(descriptor: int, until: float) -> bool:
    look = select.poll()
    look.register(descriptor, select.POLLIN)
    return bool(look.poll(max(until - time.monotonic(), 0.0) * 1000))
