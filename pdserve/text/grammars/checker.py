"""Makes grammars and checks that they can be used, in processes of their own; remembers verdicts.

    asked --seen before--> the verdict
      '--> the line --> a process builds it --in time--> the verdict
                                              '--too slow, or it died--> that build is ended

No content of a grammar can block or end the process that asks, and none keeps others waiting:
`line` says which grammar is next. Who asks gets an answer within SECONDS, wherever the time went.
A build that began late goes on without its request, and its verdict helps the next one.

This module is thread-safe. The router's grammars use `ask`, which does not block, and
`LLM.generate` the methods that do.
"""

import atexit
import logging
import math
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import msgspec

from pdserve.text.grammars.limits import MAX_BYTES
from pdserve.text.grammars.line import GrammarsBusy, Job, Line, Rule
from pdserve.text.grammars.probe import Check, Finding, Make, Question, cannot_be_used
from pdserve.text.grammars.process import BuildProcess
from pdserve.text.grammars.reasoning import NO_REASONING, ReasoningPrefix
from pdserve.text.grammars.structured import StructuredRequest

logger = logging.getLogger(__name__)

SECONDS = 5.0  # time limit of an answer; 1 ms is usual
BUILD_SHARE = 0.9  # share of it that a build may take; the rest is for the way there and back
QUICK_CPU_SECONDS = 0.1  # what the process for quick ones gives a grammar
QUICK_SECONDS = 1.5  # the same on a busy machine
NUM_VERDICTS = 4096
SLOW_SECONDS = 60.0  # a grammar that took too long is not built again for this long
VERDICT_BYTES = 64 << 20
# processes that serve have priority, and so do quick builds over long ones
_NICE = {Rule.OLDEST: 5, Rule.SMALLEST: 5, Rule.QUICK: 2}
MAX_QUESTION_BYTES = 16 * MAX_BYTES  # longer questions are not sent; JSON may write a byte as six


@dataclass(frozen=True)
class Grammar:
    """A grammar that can be used.

    - text: One grammar as llguidance takes it: Lark, or JSON with several grammars.
    - unenforced: Keywords of JSON schemas that the request uses and the grammar leaves out.
    """

    text: str
    unenforced: tuple[str, ...] = ()


class GrammarChecker:
    """Checks grammars in three processes of its own, one for each Rule of the line.

    - seconds: Time limit of an answer.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.num_built = 0
        self._num_bytes = 0  # size of the grammars in _verdicts
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._lock = threading.Lock()  # of the verdicts and what counts them
        self._starting = threading.Lock()  # of the line, the processes and the threads
        self._line = Line()
        self._processes = {rule: BuildProcess(nice) for rule, nice in _NICE.items()}
        self._threads: list[threading.Thread] = []

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
        `strict` it also raises if a keyword of the schema cannot be enforced. Raises GrammarsBusy
        if there was no time for it.
        """
        return self._awaited(Make(structured, prefix, call_rules))

    def unenforced(self, grammar: str, field: str) -> tuple[str, ...]:
        """Returns the keywords of JSON schemas that a grammar leaves out. Raises ValueError, which
        begins with `field`, if the grammar cannot be used, and GrammarsBusy like `made`."""
        return self._awaited(Check(grammar, field)).unenforced

    @property
    def is_started(self) -> bool:
        """True if `start` has been called."""
        return bool(self._threads)

    def start(self) -> None:
        """Starts the processes, and waits until they can answer: 0.3 s. Does nothing if they run.
        Raises RuntimeError if they cannot be started."""
        if self.is_started:
            return
        with self._starting:
            if self._threads:
                return
            try:
                for process in self._processes.values():
                    process.begin()
                for process in self._processes.values():
                    process.start()
            except BaseException:
                self._end_processes()
                raise
            threads = [
                threading.Thread(
                    target=self._serve,
                    args=(self._line, rule, process),
                    name=f"grammars-{rule.value}",
                    daemon=True,
                )
                for rule, process in self._processes.items()
            ]
            for thread in threads:
                thread.start()
            self._threads = threads

    def close(self) -> None:
        """Ends the processes after their current builds. They start again when they are needed."""
        with self._starting:
            self._line.close()
            for thread in self._threads:
                thread.join()
            self._threads = []
            self._end_processes()
            self._line = Line()

    def known(self, question: Question) -> Finding | None:
        """Returns the answer to a question, if it is remembered. Raises ValueError like `ask`."""
        return self._remembered(_keys_of(question, _encoded(question)))

    def ask(self, question: Question) -> "Future[Finding]":
        """Returns the future answer to a question, which is done if it is remembered.

        Waits for nothing. If the future is not done, call `start`, wait for `seconds` at most, then
        cancel it and raise `busy`. The answer may be GrammarsBusy too. Raises ValueError, which
        begins with the field, for what is no JSON.
        """
        data = _encoded(question)
        keys = _keys_of(question, data)
        if (found := self._remembered(keys)) is not None:
            known: Future[Finding] = Future()
            known.set_result(found)
            return known
        return self._line.ask(keys[0], data, _field_of(question))

    def busy(self, question: Question) -> GrammarsBusy:
        """Returns the error of a question that was not answered in time."""
        return GrammarsBusy(
            f"{_field_of(question)}: other grammars took the {self.seconds:g} s that this one had "
            "to be checked: try again in a moment"
        )

    def _awaited(self, question: Question) -> Grammar:
        future = self.ask(question)
        if not future.done():
            self.start()
        try:
            return grammar_in(future.result(self.seconds))
        except TimeoutError as error:
            future.cancel()
            raise self.busy(question) from error

    def _serve(self, line: Line, rule: Rule, process: BuildProcess) -> None:
        """Builds what the line gives by this rule, until it is closed. Runs on a thread."""
        while (job := line.take(rule)) is not None:
            try:
                verdict = self._verdict(job, rule, process)
            except Exception as error:
                logger.exception("a grammar was not checked")
                line.fail(job, error)
                continue
            if verdict is None:
                line.put_back(job)
            else:
                self._note(job, verdict)
                line.answer(job, verdict.finding)

    def _verdict(self, job: Job, rule: Rule, process: BuildProcess) -> "_Verdict | None":
        """Builds the job's grammar. None: it takes longer than this process has time for."""
        is_quick = rule is Rule.QUICK
        limit = BUILD_SHARE * self.seconds
        try:
            if is_quick:
                finding = process.answer(job.data, QUICK_SECONDS, QUICK_CPU_SECONDS)
            else:
                finding = process.answer(job.data, limit)
            return _Verdict(finding)
        except (TimeoutError, EOFError) as error:
            if is_quick:
                return None
            if isinstance(error, EOFError):
                why = "it is too large, or nested too deeply"
                return _Verdict(Finding(cannot_be_used(job.field, why)))
            slow = cannot_be_used(job.field, f"it takes longer than {limit:g} s")
            return _Verdict(Finding(slow), time.monotonic() + SLOW_SECONDS)

    def _end_processes(self) -> None:
        for process in self._processes.values():
            process.end()

    def _remembered(self, keys: list[bytes]) -> Finding | None:
        with self._lock:
            for key in keys:
                known = self._verdicts.get(key)
                if known is not None and time.monotonic() < known.until:
                    self._verdicts.move_to_end(key)
                    return known.finding
        return None

    def _note(self, job: Job, verdict: "_Verdict") -> None:
        with self._lock:
            self.num_built += 1
            self._remember(job.key, verdict)
            if not verdict.finding.error:  # a usable text is not built again under another field
                self._remember(_key_of(verdict.finding.text), verdict)

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


def checked_grammar(
    structured: StructuredRequest,
    checker: GrammarChecker | None = None,
    prefix: ReasoningPrefix = NO_REASONING,
    call_rules: tuple[str, ...] = (),
) -> Grammar:
    """Calls `GrammarChecker.made` of the given checker, or of the one that this process shares.
    It usually takes one or two milliseconds, and at most SECONDS."""
    return (checker or shared_checker()).made(structured, prefix, call_rules)


def grammar_in(finding: Finding) -> Grammar:
    """Returns the grammar that was found. Raises ValueError, which begins with the field, if it
    cannot be used."""
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


def _field_of(question: Question) -> str:
    return question.field if isinstance(question, Check) else question.structured.field


def _encoded(question: Question) -> bytes:
    field = _field_of(question)
    try:
        data = msgspec.json.encode(question)
    except UnicodeEncodeError as error:
        raise ValueError(f"{field} holds half a surrogate pair: send valid Unicode") from error
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{field} is not JSON ({error}): send plain values") from error
    if len(data) > MAX_QUESTION_BYTES:
        raise ValueError(f"{field} takes {len(data)} bytes, and may have {MAX_BYTES}: shorten it")
    return data


def _keys_of(question: Question, data: bytes) -> list[bytes]:
    """Returns the keys under which an answer may be remembered."""
    keys = [blake2b(data, digest_size=16).digest()]
    return [*keys, _key_of(question.grammar)] if isinstance(question, Check) else keys


def _key_of(grammar: str) -> bytes:
    return blake2b(grammar.encode(), digest_size=16, person=b"text").digest()
