"""Makes grammars and forbidden words of requests. The event loop never waits for a build.

    asked --no worker enforces grammars--> 400
      '--> known, or a process makes and checks it --> logit rules, or 400, or 429

Knows no HTTP. Called by `router.request.service`.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdserve.router.errors import ApiError, grammar_error
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.metrics import RouterMetrics
from pdserve.router.permits import without_permit
from pdserve.text.grammars.checker import Grammar, GrammarChecker, grammar_in, shared_checker
from pdserve.text.grammars.line import GrammarsBusy
from pdserve.text.grammars.probe import Check, Make, Parts, Question
from pdserve.text.grammars.reasoning import NO_REASONING, ReasoningPrefix
from pdserve.text.grammars.structured import StructuredRequest
from pdserve.text.tokenizer import Tokenizer

# makes the parts of a grammar, of which one may be at fault
PartsMaker = Callable[[], Parts]

logger = logging.getLogger(__name__)

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

    async def rules(
        self,
        structured: StructuredRequest,
        prefix: ReasoningPrefix = NO_REASONING,
        call_rules: tuple[str, ...] = (),
        parts: PartsMaker | None = None,
    ) -> Rules:
        """Returns the grammar as a logit rule.

        - `prefix` is the reasoning before the requested form.
        - `call_rules` are the rules of calls that may come instead of it.
        - `parts` makes the parts of these rules. It runs in a thread, and only if the grammar is
          not known.

        Raises ApiError: 400 if the grammar cannot be used, or if no worker enforces grammars; 429
        if there was no time to check it.
        """
        self.check_workers(structured.field)
        grammar = await self._checked(Make(structured, prefix, call_rules), parts)
        return Rules({"grammar": grammar.text}, self._noted(grammar.unenforced, structured.field))

    async def tool_rules(
        self,
        text: str,
        parts: PartsMaker | None = None,
        param: str = "tools",
    ) -> Rules:
        """Does the same as `rules` for a grammar of tool calls (`text.grammars.tools`)."""
        self.check_workers(param)
        found = await self._checked(Check(text, param), parts)
        return Rules({"grammar": text}, self._noted(found.unenforced, param))

    async def check(self, text: str, param: str) -> None:
        """Raises ApiError like `rules` if this grammar cannot be used."""
        self.check_workers(param)
        await self._checked(Check(text, param))

    def check_workers(self, param: str) -> None:
        """Raises ApiError (400) if workers decode but none of those enforces grammars."""
        workers = self._fleet.decode_workers
        if workers and not any(worker.enforces_grammars for worker in workers):
            message = (
                f"{param}: no worker of this cluster enforces grammars: install llguidance where "
                f"its workers run, or leave {param.split('.')[0]} out"
            )
            raise ApiError(message, param=param, code="unsupported_parameter")

    async def _checked(self, question: Question, parts: PartsMaker | None = None) -> Grammar:
        checker = self._checker or shared_checker()
        try:
            if parts is not None and checker.known(question) is None:
                made = await asyncio.to_thread(parts)
                question = msgspec.structs.replace(question, parts=made)
            future = checker.ask(question)
            if future.done():
                return grammar_in(future.result())
            if not checker.is_started:
                await asyncio.to_thread(checker.start)
            try:
                async with without_permit(), asyncio.timeout(checker.seconds):
                    finding = await asyncio.wrap_future(future)
            except TimeoutError as error:
                raise checker.busy(question) from error
            return grammar_in(finding)
        except ValueError as error:
            raise grammar_error(error) from error
        except GrammarsBusy as error:
            raise ApiError(
                str(error),
                status=429,
                kind="rate_limit_error",
                code="overloaded",
                retry_after=1,
            ) from error

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
