"""Makes grammars and forbidden words of requests, in threads so that the event loop never waits.

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

MAX_WAITING = 256  # grammars that may wait for a thread
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_NAMED = 16  # keywords that a header may name
# keywords with a label of their own in the metric; all others share one, as clients may write any
_LABELS = frozenset(
    {"not", "if", "then", "else", "oneOf", "contains", "minContains", "maxContains", "uniqueItems"}
    | {"minProperties", "maxProperties", "pattern", "patternProperties", "anyOf", "multipleOf"}
    | {"propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "format"}
    | {"unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef", "nullable"}
)
_PLAIN = re.compile(r"[\w$@.:/+-]{1,64}", re.ASCII)


@dataclass(frozen=True)
class Rules:
    """The logit rules that a request's form adds to its sampling."""

    # Logit rules by name.
    settings: dict[str, Any] = field(default_factory=dict)
    # Keywords of the request's JSON schema that are not enforced, in a form fit for a header.
    unenforced: tuple[str, ...] = ()


class Grammars:
    """Makes and checks grammars. By default it uses the checker that the process shares."""

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
        """Returns the grammar as a logit rule.

        `prefix` is the reasoning before the requested form. `call_rules` are the rules of calls
        that may come instead of it. Raises ApiError: 400 if the grammar cannot be used, or if no
        worker enforces grammars; 429 if too many grammars wait.
        """
        self.check_workers(structured.field)
        checker = self._checker or shared_checker()
        grammar = await self._in_thread(
            lambda: checked_grammar(structured, checker, prefix, call_rules)
        )
        return Rules({"grammar": grammar.text}, self._noted(grammar.unenforced, structured.field))

    async def tool_rules(
        self, make: Callable[[], str], unenforced: Sequence[str] = (), param: str = "tools"
    ) -> Rules:
        """Does the same as `rules` for a grammar that `make` (`text.grammars.tools`) returns.

        `make` runs in a thread; if it returns "", there is no rule. `unenforced` are keywords that
        are known not to be enforced.
        """
        text = await self._in_thread(make)
        if not text:
            return Rules()
        self.check_workers(param)
        checker = self._checker or shared_checker()
        found = await self._in_thread(lambda: checker.unenforced(text, param))
        return Rules({"grammar": text}, self._noted(sorted({*unenforced, *found}), param))

    async def check(self, text: str, param: str) -> None:
        """Raises ApiError like `rules` if this grammar cannot be used."""
        self.check_workers(param)
        checker = self._checker or shared_checker()
        await self._in_thread(lambda: checker.unenforced(text, param))

    def check_workers(self, param: str) -> None:
        """Raises ApiError (400) if workers decode but none of those enforces grammars."""
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
        """Counts and logs keywords that are not enforced; returns those a header may show."""
        if not names:
            return ()
        plain = [name.replace("format ", "format:", 1) for name in names]
        plain = [name if _PLAIN.fullmatch(name) else "(other)" for name in plain]
        labels = {name.split(":")[0] for name in plain}
        for label in {label if label in _LABELS else "other" for label in labels}:
            self._metrics.unenforced.labels(label).inc()
        shown = tuple(dict.fromkeys(plain))[:MAX_NAMED]
        logger.info(
            "%s: the schema uses keywords that are not enforced: %s", param, ", ".join(shown)
        )
        return shown


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the token ids of the words, made as vLLM makes them.

    Each word is encoded as at the start of a text, and again after a space if that begins with
    another token and has the same number of tokens. Raises ApiError (400).
    """
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
