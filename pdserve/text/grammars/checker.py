"""Grammars that can be used: made and built once in a process of their own, and remembered.

    asked --seen before--> the verdict
      '--> a process builds it --answers in time--> the verdict
                                 '--too slow, or it died--> ended; the next one starts a new process

Nothing that a grammar holds can stop or end the process that asks. Thread-safe; callers with an
event loop ask in a thread. Called by the router's grammars and by `LLM.generate`.
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

SECONDS = 5.0  # that a grammar may take; 1 ms is usual
START_SECONDS = 60.0  # a process imports for 0.3 s; much longer where the machine is busy
NUM_PROCESSES = 2
NUM_VERDICTS = 4096
SLOW_SECONDS = 60.0  # a grammar that took too long is not built again before
VERDICT_BYTES = 64 << 20
MAX_QUESTION_BYTES = 16 * MAX_BYTES  # what is longer is not even sent; JSON may write a byte as six
_MODULE = "pdserve.text.grammars.probe"


@dataclass(frozen=True)
class Grammar:
    """text: one grammar as llguidance takes it: Lark, or JSON with several. unenforced: keywords of
    JSON schemas that the request uses and the grammar leaves out."""

    text: str
    unenforced: tuple[str, ...] = ()


class GrammarChecker:
    """seconds: that one grammar may take. num_processes: that build at the same time; each starts
    when it is first needed."""

    def __init__(self, seconds: float = SECONDS, num_processes: int = NUM_PROCESSES) -> None:
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        for _ in range(num_processes):
            self._idle.put(_Process(seconds))
        self._num_processes = num_processes
        self._num_bytes = 0  # of the grammars in _verdicts
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._lock = threading.Lock()
        self.num_built = 0

    def made(
        self,
        structured: StructuredRequest,
        prefix: ReasoningPrefix = NO_REASONING,
        call_rules: tuple[str, ...] = (),
    ) -> Grammar:
        """The grammar of what a request asks for, after the reasoning that may stand before it.
        call_rules: of calls that may come instead (`tools.call_rules`).
        Raises ValueError, which begins with the field, when there is none that can be used; with
        `strict` also when a keyword of its schema cannot be enforced."""
        return _grammar(self._finding(Make(structured, prefix, call_rules), structured.field))

    def unenforced(self, grammar: str, field: str) -> tuple[str, ...]:
        """The keywords of JSON schemas that a grammar leaves out. Raises ValueError, which begins
        with `field`, when it cannot be used."""
        return _grammar(self._finding(Check(grammar, field), field)).unenforced

    def close(self) -> None:
        """End the processes, after what they build now. They start again when they are needed."""
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
            raise ValueError(f"{field} is no JSON ({error}): send plain values") from error
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
            if not found.error:  # a text that can be used is not built again, whatever its field
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
    """`GrammarChecker.made` by the checker that the process shares, unless another is given. Takes
    a millisecond or two, and SECONDS at most once its turn has come."""
    return (checker or shared_checker()).made(structured, prefix, call_rules)


def _key_of(grammar: str) -> bytes:
    return blake2b(grammar.encode(), digest_size=16, person=b"text").digest()


def _grammar(finding: Finding) -> Grammar:
    if finding.error:
        raise ValueError(finding.error)
    return Grammar(finding.text, finding.unenforced)


@lru_cache(maxsize=1)
def shared_checker() -> GrammarChecker:
    """The one of this process."""
    checker = GrammarChecker()
    atexit.register(checker.close)
    return checker


@dataclass(frozen=True, slots=True)
class _Verdict:
    """until: monotonic seconds; the machine may have been busy when a grammar took too long."""

    finding: Finding
    until: float = math.inf


class _Process:
    """One process; of one thread at a time."""

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
