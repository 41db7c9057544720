"""Whether a grammar can be used: built once in a process of its own, and remembered.

    asked --seen before--> the verdict
      '--> a process builds it --answers in time--> the verdict
                                 '--too slow, or it died--> ended; the next one starts a new process

Nothing that a grammar holds can stop or end the process that asks. Thread-safe; callers with an
event loop ask in a thread. Knows no requests. Called by `grammar_of`.
"""

import atexit
import contextlib
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import msgspec

import pdserve
from pdserve.text.grammars.probe import Finding

SECONDS = 5.0  # that a grammar may take; 1 ms is usual
START_SECONDS = 60.0  # a process imports for 0.3 s; much longer where the machine is busy
NUM_PROCESSES = 2
NUM_VERDICTS = 4096
_MODULE = "pdserve.text.grammars.probe"


class GrammarChecker:
    """seconds: that one grammar may take. num_processes: that build at the same time; each starts
    when it is first needed."""

    def __init__(self, seconds: float = SECONDS, num_processes: int = NUM_PROCESSES) -> None:
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        for _ in range(num_processes):
            self._idle.put(_Process(seconds))
        self._num_processes = num_processes
        self._verdicts: OrderedDict[bytes, Finding] = OrderedDict()
        self._lock = threading.Lock()
        self.num_built = 0

    def unenforced(self, grammar: str, field: str) -> tuple[str, ...]:
        """The keywords of JSON schemas that the grammar leaves out. Raises ValueError, which begins
        with `field`, when it cannot be used."""
        finding = self._finding(grammar)
        if finding.error:
            raise ValueError(
                f"{field} cannot be used as a grammar: {finding.error.rstrip('.')}; mend or "
                "simplify it"
            )
        return finding.unenforced

    def close(self) -> None:
        """End the processes, after what they build now. They start again when they are needed."""
        processes = [self._idle.get() for _ in range(self._num_processes)]
        for process in processes:
            process.end()
            self._idle.put(process)

    def _finding(self, grammar: str) -> Finding:
        key = blake2b(grammar.encode(), digest_size=16).digest()
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                return self._verdicts[key]
        with self._process() as process:
            finding = process.find(grammar)
        with self._lock:
            self.num_built += 1
            self._verdicts[key] = finding
            while len(self._verdicts) > NUM_VERDICTS:
                self._verdicts.popitem(last=False)
        return finding

    @contextlib.contextmanager
    def _process(self) -> Iterator["_Process"]:
        process = self._idle.get()
        try:
            yield process
        finally:
            self._idle.put(process)


@lru_cache(maxsize=1)
def shared_checker() -> GrammarChecker:
    """The one of this process."""
    checker = GrammarChecker()
    atexit.register(checker.close)
    return checker


class _Process:
    """One process; of one thread at a time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._child: subprocess.Popen[bytes] | None = None

    def find(self, grammar: str) -> Finding:
        try:
            child = self._started()
            data = grammar.encode()
            assert child.stdin is not None
            child.stdin.write(len(data).to_bytes(4, "big") + data)
            child.stdin.flush()
            return msgspec.msgpack.decode(self._frame(child, self._seconds), type=Finding)
        except TimeoutError:
            self.end()
            return Finding(f"it takes longer than {self._seconds:g} s", ())
        except (EOFError, BrokenPipeError):
            self.end()
            return Finding("it is too large, or nested too deeply", ())
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        child = self._child
        self._child = None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self.end()
        root = str(Path(pdserve.__file__).parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._child = child = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a panic's backtrace shows what a client sent
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        try:
            self._frame(child, START_SECONDS)
        except (EOFError, TimeoutError) as error:
            self.end()
            raise RuntimeError(
                f"the process that checks grammars does not start: `{sys.executable} -m {_MODULE}` "
                "says why"
            ) from error
        return child

    def _frame(self, child: subprocess.Popen[bytes], seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        size = int.from_bytes(self._read(child, 4, deadline), "big")
        return self._read(child, size, deadline)

    def _read(self, child: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
        assert child.stdout is not None
        number = child.stdout.fileno()
        data = b""
        while len(data) < size:
            left = deadline - time.monotonic()
            poll = select.poll()
            poll.register(number, select.POLLIN)
            if left <= 0 or not poll.poll(1000 * left):
                raise TimeoutError
            more = os.read(number, size - len(data))
            if not more:
                raise EOFError
            data += more
        return data
