"""The logit rules that requests ask for by name (`SamplingParams.logit_rules`), one row for each.

This is the torch-free half of a rule: the checks that routers make before any work is done. The
other half, which changes logits, is the class that the row names, under
pdserve.engine.sampling.rules. Several rows may name one class.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# These limits keep one request from slowing down the steps of all others.
MAX_ALLOWED_TOKEN_IDS = 1 << 18
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 8192  # for all bad words together
MAX_DELIMITER_TOKENS = 64
MAX_BUDGET = 1 << 31
MAX_GRAMMAR_BYTES = 1 << 18


@dataclass(frozen=True)
class RuleKind:
    """One kind of logit rule.

    - `rule`: "module:class" under pdserve.engine.sampling.rules.
    - `check`: takes a request's settings and the size of the vocabulary (None if unknown). Its
      ValueError says what is wrong and what to do, without the rule's name.
    - `field`: the parameter of an HTTP body that holds the settings, if there is one.
    - `is_offline`: True if only `LLM` takes the rule.
    - `schema`: JSON schema of the settings, as far as one can express it.
    """

    rule: str
    check: Callable[[Any, int | None], None]
    field: str | None = None
    is_offline: bool = False
    schema: Mapping[str, Any] | None = None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _check_ids(ids: Any, vocab_size: int | None, most: int) -> None:
    if not _is_list(ids) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"must be a list of token ids >= 0 and not empty, not {ids!r:.80}")
    if len(ids) > most:
        raise ValueError(f"must hold at most {most} token ids, not {len(ids)}: send fewer")
    if vocab_size is not None and max(ids) >= vocab_size:
        raise ValueError(f"holds token id {max(ids)}, but the vocabulary ends at {vocab_size - 1}")


def _check_allowed(ids: Any, vocab_size: int | None) -> None:
    _check_ids(ids, vocab_size, MAX_ALLOWED_TOKEN_IDS)


def _check_bad_words(words: Any, vocab_size: int | None) -> None:
    if not _is_list(words) or not words:
        raise ValueError(
            f"must be a list of lists of token ids and not empty, not {words!r:.80}: give the "
            "tokens of each sequence"
        )
    if len(words) > MAX_BAD_WORDS:
        raise ValueError(
            f"must hold at most {MAX_BAD_WORDS} sequences, not {len(words)}: send fewer"
        )
    left = MAX_BAD_WORD_TOKENS
    for place, ids in enumerate(words):
        try:
            _check_ids(ids, vocab_size, MAX_BAD_WORD_TOKENS)
        except ValueError as error:
            raise ValueError(f"has a sequence {place} that {error}") from error
        left -= len(ids)
    if left < 0:
        raise ValueError(
            f"must hold at most {MAX_BAD_WORD_TOKENS} token ids in all, not "
            f"{MAX_BAD_WORD_TOKENS - left}: send fewer or shorter sequences"
        )


def _check_budget(settings: Any, vocab_size: int | None) -> None:
    if not isinstance(settings, Mapping) or set(settings) - {"tokens", "end", "start"}:
        raise ValueError(f"must be an object with tokens, end and start, not {settings!r:.80}")
    tokens = settings.get("tokens")
    if type(tokens) is not int or not 0 <= tokens <= MAX_BUDGET:
        raise ValueError(f"has tokens {tokens!r}: give an integer in [0, {MAX_BUDGET}]")
    for name in ("end", "start"):
        ids = settings.get(name)
        if name == "start" and ids is None:  # the prompt already ends inside reasoning
            continue
        try:
            _check_ids(ids, vocab_size, MAX_DELIMITER_TOKENS)
        except ValueError as error:
            raise ValueError(f"has {name!r} that {error}") from error


def _check_grammar(text: Any, vocab_size: int | None) -> None:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"must be the text of a grammar and not empty, not {text!r:.80}: give what "
            "llguidance's grammar_from functions return, or Lark"
        )
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError("holds half a surrogate pair: send valid Unicode") from error
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise ValueError(f"has {num_bytes} bytes, but may have {MAX_GRAMMAR_BYTES}: shorten it")


def _check_processors(processors: Any, vocab_size: int | None) -> None:
    if not _is_list(processors) or not processors or not all(map(callable, processors)):
        raise ValueError(
            f"must be a list of callables, and only in LLM.generate, not {processors!r:.80}: "
            "over HTTP, use a grammar, allowed_token_ids, bad_words or logit_bias"
        )


def _ids(most: int) -> dict[str, Any]:
    """Returns the JSON schema of a list of token ids."""
    return {
        "type": "array",
        "items": {"type": "integer", "minimum": 0},
        "minItems": 1,
        "maxItems": most,
    }


BAD_WORDS = {
    "type": "array",
    "items": _ids(MAX_BAD_WORD_TOKENS),
    "minItems": 1,
    "maxItems": MAX_BAD_WORDS,
}
DELIMITER = _ids(MAX_DELIMITER_TOKENS)
BUDGET = {
    "type": "object",
    "properties": {
        "tokens": {"type": "integer", "minimum": 0, "maximum": MAX_BUDGET},
        "end": DELIMITER,
        "start": {"anyOf": [DELIMITER, {"type": "null"}]},
    },
    "required": ["tokens", "end"],
    "additionalProperties": False,
}
TOKEN_MASK = "token_mask:TokenMask"

# Rules are applied in this order: masks come after everything that changes numbers.
RULES: dict[str, RuleKind] = {
    "logits_processors": RuleKind(
        "logits_processors:LogitsProcessors", _check_processors, is_offline=True
    ),
    "allowed_token_ids": RuleKind(
        TOKEN_MASK, _check_allowed, field="allowed_token_ids", schema=_ids(MAX_ALLOWED_TOKEN_IDS)
    ),
    "bad_words": RuleKind(TOKEN_MASK, _check_bad_words, schema=BAD_WORDS),
    "thinking_budget": RuleKind(TOKEN_MASK, _check_budget, schema=BUDGET),
    "grammar": RuleKind(TOKEN_MASK, _check_grammar),
}


def asks_mask(asked: Mapping[str, Any] | None) -> bool:
    """True if a request has a rule that says which tokens may be drawn."""
    return asked is not None and any(
        name in RULES and RULES[name].rule == TOKEN_MASK for name in asked
    )


def check_served(asked: Mapping[str, Any] | None) -> None:
    """Raises a ValueError that names a rule which no served engine can apply."""
    for name in asked or ():
        if RULES[name].is_offline:
            raise ValueError(
                f"logit_rules: {name} works only in LLM.generate, because functions cannot be sent "
                "to workers: use a grammar, allowed_token_ids, bad_words or logit_bias, or add a "
                "logit rule (CONTRIBUTING.md)"
            )


def check_rules(asked: Any, vocab_size: int | None = None) -> None:
    """Raises a ValueError that names the rule which is unknown, or whose settings are wrong."""
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
