"""Holds the processes of an engine's ranks on this node, so that they can be killed in any state.

Ray asks a process to end itself, and a frozen process does not hear that.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable


class EngineProcesses:
    """Handles of living processes, given by `pids`.

    If a process has ended since and its number was given to another one, the other one is not
    touched.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._descriptors = [os.pidfd_open(pid) for pid in pids]

    def kill(self, wait_s: float) -> bool:
        """Kills the processes at once. Returns True if they are gone within wait_s, and their GPU
        memory too."""
        for descriptor in self._descriptors:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        until = time.monotonic() + wait_s
        return all(_has_ended(each, until) for each in self._descriptors)


def _has_ended(descriptor: int, until: float) -> bool:
    look = select.poll()
    look.register(descriptor, select.POLLIN)
    return bool(look.poll(max(until - time.monotonic(), 0.0) * 1000))
