"""Limits what a test may start, and checks that nothing of it outlives the test: pytest hooks, used
by conftest.py.

Tests that start processes are marked `processes`, and tests over Ray `ray`, so that `make
test-fast` leaves them out. Marks come from fixtures and helpers where those say enough (`mark`),
and otherwise from the test's file. A process that starts in a test without a mark fails it
(`Guard`). When a file's tests are over, its threads and processes must have ended, and the
environment must be as it was. Asyncio tasks must have ended when their loop is closed.
"""

import asyncio
import gc
import multiprocessing.process
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import children

PATIENCE_S = 5.0  # for threads and processes that have been told to end
TASK_PATIENCE_S = 1.0  # for tasks that need no more than their turns

RAY_FIXTURES = {"local_ray"}
RAY_HELPERS = {"support.raylets"}
PROCESS_HELPERS = {"support.hosts"}

# on a GPU, Triton starts an assembler for what it compiles
STARTING_MARKS = ("slow", "ray", "gpu", "multigpu")

NIXL = "nixl"  # in the id of a test: its peers are processes

# The first word of commands that any test may run.
COMMANDS_FOR_ALL = {"uname": "OpenAI's client asks once for the processor"}
IS_GPU_THERE = torch.cuda.is_available()  # where Triton runs compilers, in any test

# By the beginning of a thread's name, or of the module whose code it runs.
THREADS_THAT_STAY = {
    "tqdm_monitor": "tqdm has one for the whole process, and no way to end it",
    "short-prompts": "a router's executors end with the router, of which schemathesis keeps one",
    "long-prompts": "as above",
    "grammars": "as above",
    "ray.": "Ray's, for the one Ray of the session",
    "grpc.": "gRPC has one for all calls of the process; Serve makes such calls",
}
# By what its command line has.
PROCESSES_THAT_STAY = {
    "multiprocessing.forkserver": "one server for all engine hosts, which ends with the test run",
    "kernels.compiled": "one compiler of kernels for all tests, which ends with the test run",
    "multiprocessing.resource_tracker": "multiprocessing has one for the whole process",
    "/ray/": "the one Ray of the session",
    "ray::": "a worker of the one Ray of the session",
}
# Beginnings of names of variables that may change.
VARIABLES_THAT_CHANGE = {
    "PYTEST_CURRENT_TEST": "pytest's",
    "TORCHINDUCTOR_CACHE_DIR": "torch sets it when it first compiles something",
    "KMP_": "the OpenMP library of some builds of torch sets them when it begins",
    "NIXL_LOG_LEVEL": "benchmarks set it for the processes that they start",
    "RAY_": "Ray sets its own when it starts, and they hold for the session",
    "PYTHONBREAKPOINT": "as above",
    "PYTHONPATH": "tests/cluster: processes of the session's Ray find the fake engine there",
    "WORKER_JOURNAL": "tests/cluster: where engines of the session's Ray write",
}


def mark(item: pytest.Item) -> None:
    """Marks that a test's fixtures and its file's imports imply."""
    fixtures = set(getattr(item, "fixturenames", ()))
    helpers = {
        getattr(value, "__module__", "")
        for value in vars(getattr(item, "module", None) or object).values()
    }
    if fixtures & RAY_FIXTURES or helpers & RAY_HELPERS:
        item.add_marker(pytest.mark.ray)
    starts = helpers & PROCESS_HELPERS or any(map(item.get_closest_marker, STARTING_MARKS))
    if starts or NIXL in item.name.partition("[")[2]:
        item.add_marker(pytest.mark.processes)


class Guard:
    """Follows one test after the other; see the module. Made once, before any test."""

    def __init__(self) -> None:
        self._item: pytest.Item | None = None
        self._file: Path | None = None
        self._complaints: list[str] = []
        self._threads: dict[threading.Thread, str] = {}
        self._processes: set[int] = set()
        self._environment: dict[str, str] = {}
        self._wrap(subprocess.Popen, "_execute_child", lambda popen, command, *_: command)
        self._wrap(multiprocessing.process.BaseProcess, "start", lambda process: process.name)
        # a loop's end has no hook
        runners: Any = asyncio.runners
        cancel_all: Callable[[asyncio.AbstractEventLoop], None] = runners._cancel_all_tasks

        def look_and_cancel(loop: asyncio.AbstractEventLoop) -> None:
            tasks = asyncio.all_tasks(loop)
            if tasks:
                _, tasks = loop.run_until_complete(asyncio.wait(tasks, timeout=TASK_PATIENCE_S))
            self._complaints += [f"leaves an asyncio task: {task.get_coro()!r}" for task in tasks]
            cancel_all(loop)

        runners._cancel_all_tasks = look_and_cancel

    def _wrap(self, kind: type, method: str, name: Callable[..., Any]) -> None:
        """Before the method that starts a process, look whether the test may."""
        start = getattr(kind, method)

        def checked(self_: Any, *args: Any, **kwargs: Any) -> Any:
            item = self._item
            command = name(self_, *args)
            is_for_all = IS_GPU_THERE or (
                isinstance(command, list) and command[0] in COMMANDS_FOR_ALL
            )
            if item is not None and item.get_closest_marker("processes") is None and not is_for_all:
                said = f"starts a process ({command!r:.200}): mark it with @pytest.mark.processes"
                self._complaints.append(said)
                raise AssertionError(f"{item.nodeid} {said}")
            return start(self_, *args, **kwargs)

        setattr(kind, method, checked)

    def before(self, item: pytest.Item) -> None:
        if item.path != self._file:
            self._file = item.path
            self._threads = dict.fromkeys(threading.enumerate(), "")
            self._processes = set(_descendants(os.getpid()))
            self._environment = dict(os.environ)
        self._item = item
        self._complaints.clear()

    def after(self, item: pytest.Item, next_item: pytest.Item | None) -> None:
        """AssertionError names what a test, or a file whose last test this is, did and leaves."""
        self._item = None
        for thread in threading.enumerate():
            self._threads.setdefault(thread, item.name)
        complaints = list(self._complaints)
        if next_item is None or next_item.path != item.path:
            complaints += self._left()
        assert not complaints, f"{item.nodeid} " + "; ".join(complaints)

    def _left(self) -> list[str]:
        """Returns what the file's tests leave after they had time to end."""
        gc.collect()  # threads of an executor that nobody has any more end with it
        limit = time.monotonic() + PATIENCE_S
        while (
            left := [*self._threads_left(), *self._processes_left()]
        ) and time.monotonic() < limit:
            time.sleep(0.02)
        now = os.environ
        changed = [
            name
            for name in now.keys() | self._environment
            if now.get(name) != self._environment.get(name)
        ]
        expected = tuple(VARIABLES_THAT_CHANGE)
        return left + [
            f"changes the variable {name}" for name in changed if not name.startswith(expected)
        ]

    def _threads_left(self) -> list[str]:
        left = []
        for thread in threading.enumerate():
            seen = self._threads.get(thread, "nobody knows where")
            runs = (
                getattr(getattr(thread, "_target", None), "__module__", None)
                or type(thread).__module__
            )
            if seen and not any(
                said.startswith(tuple(THREADS_THAT_STAY)) for said in (thread.name, runs)
            ):
                left.append(
                    f"leaves the thread {thread.name}, which runs code of {runs}; seen first after "
                    f"{seen}"
                )
        return left

    def _processes_left(self) -> list[str]:
        multiprocessing.active_children()  # waits for those that have ended
        commands = {
            pid: _command(pid) for pid in _descendants(os.getpid()) if pid not in self._processes
        }
        left = {
            pid: said
            for pid, said in commands.items()
            if not any(part in said for part in PROCESSES_THAT_STAY)
        }
        return [f"leaves the process {pid}: {said:.200}" for pid, said in left.items()]


def _descendants(pid: int) -> list[int]:
    found = []
    for child in children(pid):
        found += [child, *_descendants(child)]
    return found


def _command(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            or "one that has ended"
        )
    except OSError:
        return "one that has ended"
