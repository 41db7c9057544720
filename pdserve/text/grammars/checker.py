"""Makes grammars and checks that they can be used, in processes of their own; remembers verdicts.

    asked --seen before--> the verdict
      '--> a process builds it --answers in time--> the verdict
                                 '--too slow, or it died--> ended; the next one starts a new process

No content of a grammar can block or end the process that asks. This module is thread-safe. Callers
with an event loop ask in a thread. The router's grammars and `LLM.generate` call it.
"""

import atexit
import contextlib
import math
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import msgspec

import pdserve
from pdserve.text.grammars.limits import MAX_BYTES
from pdserve.text.grammars.probe import Check, Finding, Make, Question, cannot_be_used
from pdserve.text.grammars.reasoning import NO_REASONING, ReasoningPrefix
from pdserve.text.grammars.structured import StructuredRequest

SECONDS = 5.0  # time limit of one grammar; 1 ms is usual
START_SECONDS = 60.0  # a process imports for 0.3 s, and much longer on a busy machine
NUM_PROCESSES = 2
NUM_VERDICTS = 4096
SLOW_SECONDS = 60.0  # a grammar that took too long is not built again for this long
VERDICT_BYTES = 64 << 20
MAX_QUESTION_BYTES = 16 * MAX_BYTES  # longer questions are not sent; JSON may write a byte as six
_MODULE = "pdserve.text.grammars.probe"


@dataclass(frozen=True)
class Grammar:
    """A grammar that can be used.

    - text: One grammar as llguidance takes it: Lark, or JSON with several grammars.
    - unenforced: Keywords of JSON schemas that the request uses and the grammar leaves out.
    """

    text: str
    unenforced: tuple[str, ...] = ()


class GrammarChecker:
    """Checks grammars in processes of its own.

    - seconds: Time limit of one grammar.
    - num_processes: Number of processes that build at the same time. Each starts when it is first
      needed.
    """

    def __init__(self, seconds: float = SECONDS, num_processes: int = NUM_PROCESSES) -> None:
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        for _ in range(num_processes):
            self._idle.put(_Process(seconds))
        self._num_processes = num_processes
        self._num_bytes = 0  # size of the grammars in _verdicts
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._lock = threading.Lock()
        self.num_built = 0

    def made(
        self,
        structured: StructuredRequest,
        prefix: ReasoningPrefix = NO_REASONING,
        call_rules: tuple[str, ...] = (),
    ) -> Grammar:
        """Returns the grammar of the form that a request asks for.

        - prefix: Reasoning that may stand before the form.
        - call_rules: Rules of calls that are allowed instead of the form (`tools.call_rules`).

        Raises ValueError, which begins with the field, if no usable grammar can be made. With
        `strict` it also raises if a keyword of the schema cannot be enforced.
        """
        return _grammar(self._finding(Make(structured, prefix, call_rules), structured.field))

    def unenforced(self, grammar: str, field: str) -> tuple[str, ...]:
        """Returns the keywords of JSON schemas that a grammar leaves out. Raises ValueError, which
        begins with `field`, if the grammar cannot be used."""
        return _grammar(self._finding(Check(grammar, field), field)).unenforced

    def close(self) -> None:
        """Ends the processes after their current builds. They start again when they are needed."""
        processes = [self._idle.get() for _ in range(self._num_processes)]
        for process in processes:
            process.end()
            self._idle.put(process)

    def _finding(self, question: Question, field: str) -> Finding:
        try:
            data = msgspec.json.encode(question)
        except UnicodeEncodeError as error:
            raise ValueError(f"{field} holds half a surrogate pair: send valid Unicode") from error
        except (ValueError, TypeError, RecursionError, OverflowError) as error:
            raise ValueError(f"{field} is not JSON ({error}): send plain values") from error
        if len(data) > MAX_QUESTION_BYTES:
            raise ValueError(
                f"{field} takes {len(data)} bytes, and may have {MAX_BYTES}: shorten it"
            )
        keys = [blake2b(data, digest_size=16).digest()]
        if isinstance(question, Check):
            keys.append(_key_of(question.grammar))
        with self._lock:
            for key in keys:
                known = self._verdicts.get(key)
                if known is not None and time.monotonic() < known.until:
                    self._verdicts.move_to_end(key)
                    return known.finding
        with self._process() as process:
            verdict = process.verdict(data, field)
        found = verdict.finding
        with self._lock:
            self.num_built += 1
            self._remember(keys[0], verdict)
            if not found.error:  # a usable text is not built again under another field
                self._remember(_key_of(found.text), verdict)
        return found

    def _remember(self, key: bytes, verdict: "_Verdict") -> None:
        self._forget(key)
        self._verdicts[key] = verdict
        self._num_bytes += len(verdict.finding.text)
        while len(self._verdicts) > NUM_VERDICTS or self._num_bytes > VERDICT_BYTES:
            self._forget(next(iter(self._verdicts)))

    def _forget(self, key: bytes) -> None:
        verdict = self._verdicts.pop(key, None)
        if verdict is not None:
            self._num_bytes -= len(verdict.finding.text)

    @contextlib.contextmanager
    def _process(self) -> Iterator["_Process"]:
        process = self._idle.get()
        try:
            yield process
        finally:
            self._idle.put(process)


def checked_grammar(
    structured: StructuredRequest,
    checker: GrammarChecker | None = None,
    prefix: ReasoningPrefix = NO_REASONING,
    call_rules: tuple[str, ...] = (),
) -> Grammar:
    """Calls `GrammarChecker.made` of the given checker, or of the one that this process shares.
    It usually takes one or two milliseconds, and at most SECONDS once its turn has come."""
    return (checker or shared_checker()).made(structured, prefix, call_rules)


def _key_of(grammar: str) -> bytes:
    return blake2b(grammar.encode(), digest_size=16, person=b"text").digest()


def _grammar(finding: Finding) -> Grammar:
    if finding.error:
        raise ValueError(finding.error)
    return Grammar(finding.text, finding.unenforced)


@lru_cache(maxsize=1)
def shared_checker() -> GrammarChecker:
    """Returns the checker that this process shares, which is made at the first call."""
    checker = GrammarChecker()
    atexit.register(checker.close)
    return checker


@dataclass(frozen=True, slots=True)
class _Verdict:
    """A finding, and how long it holds. The finding that a grammar took too long expires, because
    the machine may just have been busy."""

    finding: Finding
    until: float = math.inf  # time.monotonic() at which it expires


class _Process:
    """One process that builds grammars. Only one thread at a time may use it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._child: subprocess.Popen[bytes] | None = None

    def verdict(self, data: bytes, field: str) -> _Verdict:
        try:
            child = self._started()
            assert child.stdin is not None
            child.stdin.write(len(data).to_bytes(4, "big") + data)
            child.stdin.flush()
            return _Verdict(msgspec.json.decode(self._frame(child, self._seconds), type=Finding))
        except TimeoutError:
            self.end()
            why = f"it takes longer than {self._seconds:g} s"
            return _Verdict(Finding(cannot_be_used(field, why)), time.monotonic() + SLOW_SECONDS)
        except (EOFError, BrokenPipeError):
            self.end()
            return _Verdict(Finding(cannot_be_used(field, "it is too large, or nested too deeply")))
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
            stderr=subprocess.DEVNULL,  # a panic's backtrace would show a client's text
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        try:
            self._frame(child, START_SECONDS)
        except (EOFError, TimeoutError) as error:
            self.end()
            raise RuntimeError(
                "the process that checks grammars does not start: run "
                f"`{sys.executable} -m {_MODULE}` to see why"
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
