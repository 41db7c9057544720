"""Builds grammars in threads, before the engine hears of their requests, and remembers them.

    asked --text known--> the same build as before
      '--> queued --a thread is free--> building --> built | refused (both are remembered)

Nobody waits for ever: a build that is not there at its deadline fails its request alone, and may
still help a later one. Copies of a built grammar go through tokens that are forced in the same
threads. Knows no engine. One object an engine, asked from one thread; `wake` is called from others.
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

NUM_THREADS = 2
NUM_KEPT = 256
KEPT_BYTES = 32 << 20  # of texts
# Libraries recurse over grammars, 2.4 KB a level: a text of MAX_GRAMMAR_BYTES may chain 28,000
# rules, and a thread whose stack overflows ends the process. Only what is used of it takes memory.
STACK_BYTES = 256 << 20
FIELD = "logit_rules: grammar"


class GrammarLate(Exception):
    """A build was not even begun within its deadline: others may do it. The message says so."""


@dataclass
class BuildTotals:
    """Running totals since start. errors: refused requests by reason."""

    num_asked: int = 0
    num_known: int = 0
    num_built: int = 0
    build_seconds: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class _Build:
    """What is known of a text. began: monotonic seconds; None while it is queued."""

    future: "Future[Grammar]"
    began: float | None = None


@dataclass(eq=False)
class GrammarOrder:
    """A request's grammar on its way. deadline: monotonic seconds."""

    text: str
    forced: tuple[tuple[int, ...], ...]
    stop_token_ids: tuple[int, ...]
    deadline: float
    build: _Build
    replayed: "Future[None] | None" = None


class GrammarBuilder:
    """load: makes the engine, in a thread, when it is first needed. build_s: how long a request's
    grammar may take."""

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
        self._load = load
        self._loading: Future[GrammarEngine] | None = None
        self._builds: OrderedDict[str, _Build] = OrderedDict()
        self._bytes = 0

    def begin(self) -> None:
        """Load the engine now."""
        assert self._engine is not None

    def name(self) -> str:
        """The engine's, as in "llguidance 1.9.1"; "" where there is none. Waits for its load."""
        return self._engine.result().name if self._engine.exception() is None else ""

    def order(
        self,
        text: str,
        forced: Sequence[tuple[int, ...]] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> GrammarOrder:
        """Begin to build a grammar, unless it is known, and to take copies of it through the
        tokens that choices have already. stop_token_ids: beside the ends of sequence, those that
        may come where it accepts. `take` has the result when `is_due`."""
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
        """Whether `take` has an answer."""
        if not order.build.future.done():
            return self._clock() >= order.deadline
        if not order.forced or order.build.future.exception() is not None:
            return True
        if order.replayed is None:
            grammar = order.build.future.result()
            order.replayed = self._submit(_replay_all, order, grammar)
            order.replayed.add_done_callback(lambda _: self._wake())
        return order.replayed.done() or self._clock() >= order.deadline

    def take(self, order: GrammarOrder) -> Grammar:
        """The prototype. ValueError names the parameter, what is wrong with it and the cure;
        GrammarLate: it is not the grammar's fault."""
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
        """Wait for a grammar without forced tokens. Raises what `take` does."""
        order = self.order(text)
        try:
            order.build.future.exception(max(0.0, order.deadline - self._clock()))
        except TimeoutError:
            raise self._late(order) from None
        return self.take(order)

    @property
    def _engine(self) -> "Future[GrammarEngine]":
        if self._loading is None:
            self._loading = self._submit(self._load)
        return self._loading

    def _submit(self, work: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Run it on one of the threads, each of which is started here when it is first needed."""
        before = threading.stack_size(STACK_BYTES)
        try:
            return self._threads.submit(work, *args)
        finally:
            threading.stack_size(before)

    def close(self) -> None:
        """Begin nothing more. A build that is under way goes on to its end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _late(self, order: GrammarOrder) -> Exception:
        began = order.build.began
        if began is None:
            self._count("queue")
            return GrammarLate(
                f"{FIELD} waited for {self._build_s:g} s behind other grammars that are built"
            )
        self._count("deadline")
        return ValueError(
            f"{FIELD} took longer than engine.grammar_build_s ({self._build_s:g} s) to build: "
            "simplify it, or raise that"
        )

    def _begin(self, text: str) -> _Build:
        build = _Build(Future())
        self._builds[text] = build
        self._bytes += len(text)
        while len(self._builds) > NUM_KEPT or (self._bytes > KEPT_BYTES and len(self._builds) > 1):
            old, _ = self._builds.popitem(last=False)
            self._bytes -= len(old)
        self._submit(self._run, self._engine, text, build)
        return build

    def _run(self, loading: "Future[GrammarEngine]", text: str, build: _Build) -> None:
        """On a thread."""
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
        # a library in Rust raises BaseException where it panics, and its thread must go on
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


def _replay_all(order: GrammarOrder, grammar: Grammar) -> None:
    """ValueError when the grammar rejects tokens that a choice has."""
    endings = frozenset((*order.stop_token_ids, *grammar.eos_token_ids))
    for tokens in order.forced:
        rejected = replay(grammar.copy(), tokens, endings)
        if rejected is not None:
            raise ValueError(
                f"{FIELD} does not allow forced token {tokens[rejected]} at position {rejected}: "
                "the tokens were drawn by another grammar or tokenizer"
            )
