"""The logit rules that requests ask for by name (`SamplingParams.logit_rules`): a row for each.

This is a rule's torch-free half: what routers check before any work is done. Its other half, which
changes logits, is the class that the row names, under pdserve.engine.sampling.rules.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RuleKind:
    """rule: "module:class" under pdserve.engine.sampling.rules. check: of a request's settings and,
    where it is known, the size of the vocabulary (else None); ValueError says what is wrong with
    them and what to do, without the rule's name. field: the parameter of an HTTP body that holds
    the settings, where it has one of its own."""

    rule: str
    check: Callable[[Any, int | None], None]
    field: str | None = None


RULES: dict[str, RuleKind] = {}


def check_rules(asked: Any, vocab_size: int | None = None) -> None:
    """ValueError naming the rule that is not known, or whose settings are wrong."""
    if not isinstance(asked, Mapping):
        raise ValueError(f"logit_rules must map names of rules to their settings, not {asked!r}")
    for name, settings in asked.items():
        kind = RULES.get(name)
        if kind is None:
            known = ", ".join(sorted(RULES)) or "none"
            raise ValueError(f"logit_rules: there is no rule {name!r}; known: {known}")
        try:
            kind.check(settings, vocab_size)
        except ValueError as error:
            raise ValueError(f"logit_rules: {name} {error}") from error
