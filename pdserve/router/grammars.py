"""Grammars and forbidden words of requests, made in threads so that the event loop never waits.

    asked --no worker enforces grammars--> 400
      '--> a place in line --> a thread makes and checks it --> logit rules, or 400

Knows no HTTP. Called by `router.request.service`.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pdserve.router.errors import ApiError, grammar_error
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.metrics import RouterMetrics
from pdserve.text.grammars.checker import (
    NUM_PROCESSES,
    GrammarChecker,
    checked_grammar,
    shared_checker,
)
from pdserve.text.grammars.reasoning import NO_REASONING, ReasoningPrefix
from pdserve.text.grammars.structured import StructuredRequest
from pdserve.text.tokenizer import Tokenizer

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_WAITING = 256  # grammars that wait for a thread
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_NAMED = 16  # keywords in a header
# keywords that have a label of their own in the metric; clients may write any
_LABELS = frozenset(
    {"not", "if", "then", "else", "oneOf", "contains", "minContains", "maxContains", "uniqueItems"}
    | {"propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "format"}
    | {"unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef", "nullable"}
)
_PLAIN = re.compile(r"[\w$@.:/+-]{1,64}", re.ASCII)


@dataclass(frozen=True)
class Rules:
    """settings: logit rules by name. unenforced: keywords of the request's JSON schema that are
    not enforced, fit for a header."""

    settings: dict[str, Any] = field(default_factory=dict)
    unenforced: tuple[str, ...] = ()


class Grammars:
    """checker: by default the one that the process shares."""

    def __init__(
        self, fleet: Fleet, metrics: RouterMetrics, checker: GrammarChecker | None = None
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._checker = checker
        self._threads = ThreadPoolExecutor(NUM_PROCESSES, "grammars")
        self._num_waiting = 0

    async def rules(
        self,
        structured: StructuredRequest,
        prefix: ReasoningPrefix = NO_REASONING,
        call_rules: tuple[str, ...] = (),
    ) -> Rules:
        """The grammar as a logit rule. prefix: the reasoning that stands before what is asked for.
        call_rules: of calls that may come instead.
        Raises ApiError: 400 when it cannot be used, or when no worker enforces grammars; 429 when
        too many wait."""
        self.check_workers(structured.field)
        checker = self._checker or shared_checker()
        grammar = await self._in_thread(
            lambda: checked_grammar(structured, checker, prefix, call_rules)
        )
        return Rules({"grammar": grammar.text}, self._noted(grammar.unenforced, structured.field))

    async def tool_rules(
        self, make: Callable[[], str], unenforced: Sequence[str] = (), param: str = "tools"
    ) -> Rules:
        """As `rules`, for a grammar that `make` makes in a thread (`text.grammars.tools`): no rule
        when that is "". unenforced: keywords that are known not to be enforced."""
        text = await self._in_thread(make)
        if not text:
            return Rules()
        self.check_workers(param)
        checker = self._checker or shared_checker()
        found = await self._in_thread(lambda: checker.unenforced(text, param))
        return Rules({"grammar": text}, self._noted(sorted({*unenforced, *found}), param))

    async def check(self, text: str, param: str) -> None:
        """Raises ApiError as `rules` when this grammar cannot be used."""
        self.check_workers(param)
        checker = self._checker or shared_checker()
        await self._in_thread(lambda: checker.unenforced(text, param))

    def check_workers(self, param: str) -> None:
        """ApiError (400) when workers are there and none of those that decode enforces
        grammars."""
        workers = self._fleet.decode_workers
        if workers and not any(worker.enforces_grammars for worker in workers):
            message = (
                f"{param}: no worker of this cluster enforces grammars: install llguidance where "
                f"its workers run, or leave {param.split('.')[0]} out"
            )
            raise ApiError(message, param=param, code="unsupported_parameter")

    async def _in_thread(self, make: Callable[[], T]) -> T:
        if self._num_waiting >= MAX_WAITING:
            raise ApiError(
                f"{self._num_waiting} grammars wait to be checked: try again in a moment",
                status=429,
                kind="rate_limit_error",
                code="overloaded",
                retry_after=1,
            )
        self._num_waiting += 1
        try:
            return await asyncio.wrap_future(self._threads.submit(make))
        except ValueError as error:
            raise grammar_error(error) from error
        finally:
            self._num_waiting -= 1

    def _noted(self, names: Sequence[str], param: str) -> tuple[str, ...]:
        """Counted and logged; what a header may show of it."""
        if not names:
            return ()
        plain = [name.replace("format ", "format:", 1) for name in names]
        plain = [name if _PLAIN.fullmatch(name) else "(other)" for name in plain]
        labels = {name.split(":")[0] for name in plain}
        for label in {label if label in _LABELS else "other" for label in labels}:
            self._metrics.unenforced.labels(label).inc()
        shown = tuple(dict.fromkeys(plain))[:MAX_NAMED]
        logger.info("%s: the schema uses what is not enforced: %s", param, ", ".join(shown))
        return shown


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of the words, as vLLM makes them: of each at a text's start and, where that begins
    with another token and is no longer, after a space. Raises ApiError (400)."""
    if len(words) > MAX_BAD_WORDS or any(not 0 < len(w) <= MAX_BAD_WORD_CHARS for w in words):
        message = (
            f"bad_words must hold at most {MAX_BAD_WORDS} words of 1 to {MAX_BAD_WORD_CHARS} "
            "characters: send fewer, or shorter ones"
        )
        raise ApiError(message, param="bad_words")
    found: list[list[int]] = []
    for word in words:
        first = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        if not first:
            raise ApiError(
                f"bad_words holds {word!r}, which has no tokens: leave it out", param="bad_words"
            )
        found.append(list(first))
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if spaced[0] != first[0] and len(spaced) == len(first):
            found.append(list(spaced))
    return found
