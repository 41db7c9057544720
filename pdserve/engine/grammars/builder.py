"""Builds grammars in threads, before their requests reach the engine, and remembers them.

    asked --text known--> the same build as before
      '--> queued --a thread is free--> building --> built | refused (both are remembered)

Nobody waits for ever. A build that is not done at its deadline fails only its own request, and may
still help a later one. Large texts have a thread of their own, so that small ones do not wait for
them. The threads of small texts also take copies of a built grammar through forced tokens. Knows no
engine. An engine has one builder and calls it from one thread; `wake` is called from others.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pdserve.engine.grammars.grammar import Grammar, GrammarEngine
from pdserve.engine.grammars.replay import replay

NUM_THREADS = 2  # for small texts; there is one more for large ones
SMALL_TEXT = 16 << 10  # characters; nearly all schemas and tools are shorter
NUM_KEPT = 256
KEPT_BYTES = 32 << 20  # total length of remembered texts
# Libraries recurse over grammars with 2.4 KB per level, and a text of MAX_GRAMMAR_BYTES may chain
# 28,000 rules. A stack overflow would end the process. Only the used part of a stack takes memory.
STACK_BYTES = 256 << 20
FIELD = "logit_rules: grammar"


class GrammarLate(Exception):
    """A build did not even begin before its deadline, so the request may be retried elsewhere. The
    message says so."""


@dataclass
class BuildTotals:
    """Running totals since start."""

    num_asked: int = 0
    num_known: int = 0
    num_built: int = 0
    build_seconds: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)  # refused requests by reason


@dataclass(eq=False)
class _Build:
    """The state of one text's build."""

    future: "Future[Grammar]"
    began: float | None = None  # monotonic seconds; None while it is queued


@dataclass(eq=False)
class GrammarOrder:
    """A grammar that a request waits for."""

    text: str
    forced: tuple[tuple[int, ...], ...]
    stop_token_ids: tuple[int, ...]
    deadline: float  # monotonic seconds
    build: _Build
    replayed: "Future[None] | None" = None


class GrammarBuilder:
    """Builds and remembers grammars.

    - load: makes the grammar engine, in a thread, when it is first needed.
    - build_s: seconds that a request waits for its grammar at most.
    """

    def __init__(
        self,
        load: Callable[[], GrammarEngine],
        build_s: float = 5.0,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.totals = BuildTotals()
        self._build_s = build_s
        self._wake = wake
        self._clock = clock
        self._lock = threading.Lock()  # of totals
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammars")
        self._large = ThreadPoolExecutor(1, "large grammars")
        self._load = load
        self._loading: Future[GrammarEngine] | None = None
        self._builds: OrderedDict[str, _Build] = OrderedDict()
        self._bytes = 0

    def begin(self) -> None:
        """Load the engine now."""
        assert self._engine is not None

    @property
    def is_loaded(self) -> bool:
        """True if `name` has an answer at once."""
        return self._loading is not None and self._loading.done()

    def name(self) -> str:
        """The grammar engine's name, such as "llguidance 1.9.1"; "" if there is none. Waits until
        the engine is loaded."""
        return self._engine.result().name if self._engine.exception() is None else ""

    def order(
        self,
        text: str,
        forced: Sequence[tuple[int, ...]] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> GrammarOrder:
        """Begin to build a grammar, unless it is known, and to take copies of it through the tokens
        that choices already have. `take` has the result when `is_due`.

        stop_token_ids: tokens that, like the ends of sequence, may come where the grammar accepts.
        """
        build = self._builds.get(text)
        self.totals.num_asked += 1
        if build is None:
            build = self._begin(text)
        else:
            self.totals.num_known += 1
            self._builds.move_to_end(text)
        wanted = tuple(dict.fromkeys(tokens for tokens in forced if tokens))
        deadline = self._clock() + self._build_s
        return GrammarOrder(text, wanted, tuple(stop_token_ids), deadline, build)

    def is_due(self, order: GrammarOrder) -> bool:
        """True if `take` has an answer."""
        if not order.build.future.done():
            return self._clock() >= order.deadline
        if not order.forced or order.build.future.exception() is not None:
            return True
        if order.replayed is None:
            grammar = order.build.future.result()
            order.replayed = _submit(self._threads, _replay_all, order, grammar)
            order.replayed.add_done_callback(lambda _: self._wake())
        return order.replayed.done() or self._clock() >= order.deadline

    def take(self, order: GrammarOrder) -> Grammar:
        """Returns the prototype. ValueError names the parameter, what is wrong with it and the
        cure. GrammarLate means that the grammar is not at fault."""
        build = order.build.future
        if not build.done() or not (order.replayed is None or order.replayed.done()):
            raise self._late(order)
        error = build.exception()
        if error is not None:
            self._count("invalid" if self._engine.exception() is None else "no-tokenizer")
            raise ValueError(str(error))
        if order.replayed is not None and (error := order.replayed.exception()) is not None:
            self._count("replay")
            raise ValueError(str(error))
        return build.result()

    def build(self, text: str) -> Grammar:
        """Wait for a grammar without forced tokens. Raises the same errors as `take`."""
        order = self.order(text)
        try:
            order.build.future.exception(max(0.0, order.deadline - self._clock()))
        except TimeoutError:
            raise self._late(order) from None
        return self.take(order)

    @property
    def _engine(self) -> "Future[GrammarEngine]":
        if self._loading is None:
            self._loading = _submit(self._threads, self._load)
        return self._loading

    def close(self) -> None:
        """Begin nothing more. A build that is running continues to its end."""
        for threads in (self._threads, self._large):
            threads.shutdown(wait=False, cancel_futures=True)

    def _late(self, order: GrammarOrder) -> Exception:
        began = order.build.began
        if began is None:
            self._count("queue")
            return GrammarLate(
                f"{FIELD} waited {self._build_s:g} s while other grammars were built"
            )
        self._count("deadline")
        return ValueError(
            f"{FIELD} took longer than engine.grammar_build_s ({self._build_s:g} s) to build: "
            "simplify it, or raise engine.grammar_build_s"
        )

    def _begin(self, text: str) -> _Build:
        build = _Build(Future())
        self._builds[text] = build
        self._bytes += len(text)
        while len(self._builds) > NUM_KEPT or (self._bytes > KEPT_BYTES and len(self._builds) > 1):
            old, _ = self._builds.popitem(last=False)
            self._bytes -= len(old)
        threads = self._threads if len(text) <= SMALL_TEXT else self._large
        _submit(threads, self._run, self._engine, text, build)
        return build

    def _run(self, loading: "Future[GrammarEngine]", text: str, build: _Build) -> None:
        """Build one text. Runs on a thread."""
        error = loading.exception()  # waits for it
        if error is None:
            build.began = self._clock()
            self._build(loading.result(), text, build)
        else:
            message = f"{FIELD} cannot be used with this model's tokenizer: {error}"
            build.future.set_exception(ValueError(message))
        self._wake()

    def _build(self, engine: GrammarEngine, text: str, build: _Build) -> None:
        began = time.perf_counter()
        try:
            grammar = engine.build(text)
        # A library in Rust raises BaseException when it panics, and its thread must go on.
        except BaseException as error:
            reason = str(error).rstrip(".")
            build.future.set_exception(
                ValueError(f"{FIELD} cannot be built: {reason}; mend or simplify it")
            )
        else:
            build.future.set_result(grammar)
        with self._lock:
            self.totals.num_built += 1
            self.totals.build_seconds += time.perf_counter() - began

    def _count(self, reason: str) -> None:
        self.totals.errors[reason] = self.totals.errors.get(reason, 0) + 1


def _submit(threads: ThreadPoolExecutor, work: Callable[..., Any], *args: Any) -> "Future[Any]":
    """Run it on one of the threads. A thread is started here when it is first needed."""
    before = threading.stack_size(STACK_BYTES)
    try:
        return threads.submit(work, *args)
    finally:
        threading.stack_size(before)


def _replay_all(order: GrammarOrder, grammar: Grammar) -> None:
    """ValueError if the grammar rejects tokens that a choice has."""
    endings = frozenset((*order.stop_token_ids, *grammar.eos_token_ids))
    for tokens in order.forced:
        rejected = replay(grammar.copy(), tokens, endings)
        if rejected is not None:
            raise ValueError(
                f"{FIELD} does not allow forced token {tokens[rejected]} at position {rejected}: "
                "the tokens were sampled with another grammar or tokenizer"
            )
