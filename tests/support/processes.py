"""Child processes of the tests: none outlives the test run, whatever ends it; frozen ones really
stand still; those of any process are found."""

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path


def die_with_parent(parent: int) -> None:
    """Call first in a child. parent: its pid as the parent knows it.

    The kernel watches the parent's *thread* that started the child: start children from a thread
    that stays.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def freeze(pid: int) -> None:
    """SIGSTOP; returns when every thread has stopped, which on a busy machine takes a while."""
    os.kill(pid, signal.SIGSTOP)
    while any(_state(task) not in "TZ" for task in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.001)


def children(pid: int) -> list[int]:
    """Returns the processes that this one has started. What ends meanwhile may be left out."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (task / "children").read_text().split())
    return found


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]
