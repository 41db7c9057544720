"""Holds each request that asks for a grammar until the grammar is built; other requests go on
meanwhile.

    Submit --> BUILDING --built, forced tokens allowed--> on to the phase that it is for
               BUILDING --refused, or not there at the deadline--> its attempt fails
    Prepare --> only begins the build, so that the grammar is there when the Submit comes

The engine and the other phases do not know of a request before that. Knows the builder, whose
threads do the work; no engine. Driven by worker.loop on its one thread.
"""

import math
import time
from dataclasses import dataclass
from typing import Literal

import msgspec

from pdserve.engine.grammars.builder import FIELD, GrammarBuilder, GrammarLate, GrammarOrder
from pdserve.engine.grammars.grammar import Grammar
from pdserve.protocol.commands import Submit
from pdserve.protocol.prompt_work import prompt_work
from pdserve.protocol.request_key import RequestKey


@dataclass(frozen=True)
class Refused:
    """Why a request cannot go on; `kind` is as in `Failed`."""

    kind: Literal["invalid", "internal"]
    message: str


@dataclass(eq=False)
class _Waiting:
    """A request that has waited since `since`, in monotonic seconds."""

    submit: Submit
    order: GrammarOrder
    since: float


def grammar_text(submit: Submit) -> str | None:
    """Returns the grammar that a request asks for, or None."""
    return (submit.sampling.logit_rules or {}).get("grammar")


class GrammarPhase:
    """Holds waiting requests. `builder` is None in an engine that has no tokenizer."""

    def __init__(self, builder: GrammarBuilder | None) -> None:
        self._builder = builder
        self._waiting: dict[RequestKey, _Waiting] = {}

    @property
    def name(self) -> str:
        """Name of what builds grammars here, for Hello; "" if nothing does."""
        return self._builder.name() if self._builder is not None else ""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def queued_work(self, pair_tokens: float) -> float:
        """Work (protocol.prompt_work) of the prompts that will be computed here once their grammars
        are built."""
        return sum(
            prompt_work(len(waiting.submit.prompt_token_ids), 0, pair_tokens)
            for waiting in self._waiting.values()
            if waiting.submit.ticket is None
        )

    @property
    def due(self) -> float:
        """Monotonic time at which `poll` has something to do even if no build ends."""
        return min((waiting.order.deadline for waiting in self._waiting.values()), default=math.inf)

    def submit(self, submit: Submit) -> None:
        """Keeps a request until `poll` returns it. Raises ValueError if no grammar can be built."""
        text = grammar_text(submit)
        assert text is not None, "a request without a grammar has nothing to wait for"
        if self._builder is None:
            raise ValueError(f"{FIELD} needs a tokenizer, and this worker has none: leave it out")
        forced = tuple(start.forced for start in submit.starts)
        order = self._builder.order(text, forced, submit.sampling.stop_token_ids)
        self._waiting[submit.key] = _Waiting(submit, order, time.monotonic())

    def prepare(self, submit: Submit) -> None:
        """Begins to build the grammar for a Submit that will follow."""
        text = grammar_text(submit)
        if text is not None and self._builder is not None:
            self._builder.order(text)

    def poll(self) -> list[tuple[Submit, Grammar | Refused]]:
        """Returns the requests that need not wait any more, in the order in which they came."""
        builder = self._builder
        if builder is None or not self._waiting:
            return []
        done = [each for each in self._waiting.values() if builder.is_due(each.order)]
        answers: list[tuple[Submit, Grammar | Refused]] = []
        for waiting in done:
            del self._waiting[waiting.submit.key]
            submit = waiting.submit.aged(time.monotonic() - waiting.since)
            try:
                answers.append((submit, builder.take(waiting.order)))
            except ValueError as error:
                answers.append((submit, Refused("invalid", str(error))))
            except GrammarLate as error:
                answers.append((submit, Refused("internal", str(error))))
        return answers

    def cancel(self, key: RequestKey, choices: tuple[int, ...] | None) -> bool:
        """Stops a request that waits here, or leaves out some of its choices. Returns True if it
        was here."""
        waiting = self._waiting.get(key)
        if waiting is None:
            return False
        starts = (
            ()
            if choices is None
            else tuple(s for s in waiting.submit.starts if s.choice not in choices)
        )
        if starts:
            waiting.submit = msgspec.structs.replace(waiting.submit, starts=starts)
        else:
            del self._waiting[key]
        return True

    def keys(self) -> set[RequestKey]:
        """Returns the requests that wait for their grammar."""
        return set(self._waiting)

    def close(self) -> None:
        if self._builder is not None:
            self._builder.close()
