"""A process that builds grammars (`probe`), as the process that asks sees it.

    ended --start--> ready --answer--> building --in time--> ready
                                          '--too late, or it died--> ready: a new fork builds

It has a parent, which has imported everything and never builds, and forks the one that does. So a
build can be ended and the next one begun within milliseconds. Only one thread at a time may use it.
`checker` calls this module.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

import pdserve
from pdserve.text.grammars.probe import FORK, Finding

START_SECONDS = 60.0  # the parent imports for 0.3 s, and much longer on a busy machine
END_SECONDS = 5.0
_MODULE = "pdserve.text.grammars.probe"


class BuildProcess:
    """Answers the questions of `probe`, one after the other. `nice` is added to its niceness."""

    def __init__(self, nice: int = 0) -> None:
        self._nice = nice
        self._parent: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None  # to the parent
        self._build: socket.socket | None = None  # to the fork that builds
        self._is_ready = False

    @property
    def pid(self) -> int | None:
        """The parent's; None: it has not begun."""
        return None if self._parent is None else self._parent.pid

    def begin(self) -> None:
        """Starts the parent if it does not run. Does not wait for it."""
        if self._parent is not None and self._parent.poll() is None:
            return
        self.end()
        root = str(Path(pdserve.__file__).parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._control, theirs = socket.socketpair()
        with theirs:
            self._parent = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(self._nice)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a panic's backtrace would show a client's text
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            )

    def start(self) -> None:
        """Starts the parent if it does not run, and waits until it has imported everything. Raises
        RuntimeError if it cannot be started."""
        self.begin()
        if self._is_ready:
            return
        assert self._control is not None
        try:
            _receive(self._control, 1, time.monotonic() + START_SECONDS)
        except (EOFError, TimeoutError) as error:
            self.end()
            raise RuntimeError(
                "the process that checks grammars does not start: run "
                f"`{sys.executable} -m {_MODULE}` to see why"
            ) from error
        self._control.settimeout(None)
        self._is_ready = True

    def answer(self, data: bytes, seconds: float, cpu_seconds: float = 0.0) -> Finding:
        """Returns the answer to an encoded question.

        Raises TimeoutError if that takes longer than `seconds`, and EOFError if the process dies
        over it, or needs more CPU time than `cpu_seconds` (0: any). Then its build has been ended.
        Raises RuntimeError like `start`.
        """
        deadline = time.monotonic() + seconds
        build = self._build or self._forked()
        try:
            head = len(data).to_bytes(4, "big") + int(1000 * cpu_seconds).to_bytes(4, "big")
            _send(build, head + data, deadline)
            size = int.from_bytes(_receive(build, 4, deadline), "big")
            return msgspec.json.decode(_receive(build, size, deadline), type=Finding)
        except BaseException:
            self._forked()
            raise

    def end(self) -> None:
        """Ends the parent, and so the build, if they run. They can be started again."""
        for end in (self._build, self._control):
            if end is not None:
                end.close()
        if self._parent is not None:
            if not self._is_ready:
                self._parent.kill()
            try:
                self._parent.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._parent.kill()
                self._parent.wait()
        self._parent = self._control = self._build = None
        self._is_ready = False

    def _forked(self) -> socket.socket:
        """Lets the parent fork one that builds, and end the one before. Returns its socket."""
        if self._build is not None:
            self._build.close()
        for _ in range(2):
            self.start()
            assert self._control is not None
            self._build, theirs = socket.socketpair()
            try:
                with theirs:
                    socket.send_fds(self._control, [FORK], [theirs.fileno()])
                _receive(self._build, 1, time.monotonic() + START_SECONDS)
                return self._build
            except (OSError, EOFError):  # somebody killed the parent
                self.end()
        raise RuntimeError("the process that checks grammars does not stay")


def _send(to: socket.socket, data: bytes, deadline: float) -> None:
    to.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        to.sendall(data)
    except ConnectionError as error:
        raise EOFError from error


def _receive(of: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        of.settimeout(left)
        try:
            more = of.recv(size - len(data))
        except ConnectionError as error:
            raise EOFError from error
        if not more:
            raise EOFError
        data += more
    return data
