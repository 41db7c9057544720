"""Grammars of forms and of tool calls for `LLM`, checked as routers check them. What they do not
enforce is logged once."""

import logging
from functools import lru_cache

from pdserve.text.grammars.checker import checked_grammar, shared_checker
from pdserve.text.grammars.reasoning import NO_REASONING, ReasoningPrefix
from pdserve.text.grammars.structured import StructuredRequest

logger = logging.getLogger(__name__)


def form_grammar(
    form: StructuredRequest,
    prefix: ReasoningPrefix = NO_REASONING,
    call_rules: tuple[str, ...] = (),
) -> str:
    """Returns the grammar of a form. Parameters and errors are those of `checked_grammar`."""
    grammar = checked_grammar(form, prefix=prefix, call_rules=call_rules)
    _warn(form.field, grammar.unenforced)
    return grammar.text


def check_calls(grammar: str) -> None:
    """Raises ValueError if the grammar of calls cannot be used."""
    _warn("tools", shared_checker().unenforced(grammar, "tools"))


@lru_cache(maxsize=1024)
def _warn(field: str, unenforced: tuple[str, ...]) -> None:
    """Logs a warning, the first time only."""
    if unenforced:
        names = ", ".join(unenforced)
        logger.warning("%s: the schema uses keywords that are not enforced: %s", field, names)
