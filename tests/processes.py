"""Child processes of the tests: none outlives the test run, whatever ends it."""

import ctypes
import os
import signal


def die_with_parent(parent: int) -> None:
    """Call first in a child. parent: its pid as the parent knows it.

    The kernel watches the parent's *thread* that started the child: start children from a thread that stays.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
