"""How the tokens of a request are drawn: `SamplingParams`, the limits of each field, and the
checks.

Names and defaults are vLLM's. Knows no request, tokenizer or model: only
`SamplingParams.check_vocab` compares a token id with a vocabulary.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pdserve.protocol.logit_rules import check_rules

MAX_SEED = 2**63 - 1

# These limits keep one small body from slowing down everybody else. The limit for biases is the
# size of vLLM's table (MAX_NUM_LOGIT_BIAS_TOKENS).
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_CHARS_IN_ALL = 8192  # `text.stop` needs about a microsecond per character


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """How the tokens of a request are drawn; names and defaults are vLLM's.

    Every field is validated by name. The filters are applied after the temperature, in the order
    top_k, top_p, min_p.
    """

    n: int = 1  # Number of choices per prompt.
    temperature: float = 1.0  # 0, or anything below 1e-5, is greedy.
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 turns it off.
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # Counts tokens of the prompt and the output.
    presence_penalty: float = 0.0  # Counts tokens of the output.
    frequency_penalty: float = 0.0  # Counts tokens of the output.
    logit_bias: dict[int, float] | None = None  # Added to logits; at most MAX_LOGIT_BIAS token ids.
    # Settings of other rules, by the rule's name (`protocol.logit_rules`).
    logit_rules: dict[str, Any] | None = None
    seed: int | None = None  # None lets the receiver draw one.
    # At most MAX_STOPS strings that end the text, of at most MAX_STOP_CHARS characters each and
    # MAX_STOP_CHARS_IN_ALL together.
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()  # At most MAX_STOP_TOKEN_IDS tokens that end a choice.
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False  # Goes on after the end-of-sequence token.
    min_tokens: int = 0  # No stop token is drawn before this many tokens.
    max_tokens: int | None = 16  # None means as many as fit the engine that generates them.
    # Number of alternatives to report per position, besides the chosen token, before any of the
    # above is applied. 0 reports only the chosen token, None nothing.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_integers(self)
        _check_numbers(self)
        _check_booleans(self)
        if self.stop != ():
            msgspec.structs.force_setattr(self, "stop", _checked_stops(self.stop))
        if self.stop_token_ids != ():
            msgspec.structs.force_setattr(
                self, "stop_token_ids", _checked_stop_ids(self.stop_token_ids)
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            )
        if self.logit_bias is not None:
            _check_bias(self.logit_bias)
        if self.logit_rules is not None:
            check_rules(self.logit_rules)

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @classmethod
    def from_defaults(cls, defaults: Mapping[str, Any]) -> "SamplingParams":
        """Returns the parameters of a request that sets none, for a model with these defaults
        (`models.generation_defaults`). Raises a ValueError that names a wrong default."""
        try:
            return cls(**defaults)
        except ValueError as error:
            raise ValueError(
                f"generation_config.json: {error}; fix the file, or set model.generation_config "
                "to 'none'"
            ) from error

    def with_seed(self, seed: int) -> "SamplingParams":
        """Returns a copy with this seed.

        The copy is not checked again, because a call of thousands of prompts makes one for each.
        """
        drawn = copy.copy(self)
        msgspec.structs.force_setattr(drawn, "seed", seed)
        return drawn

    def with_processors(self, processors: Sequence[Any]) -> "SamplingParams":
        """Returns a copy to which these logits_processors apply before its own."""
        changed = copy.copy(self)
        rules = self.logit_rules or {}
        both = [*processors, *rules.get("logits_processors", ())]
        msgspec.structs.force_setattr(changed, "logit_rules", rules | {"logits_processors": both})
        return changed

    def with_rules(self, rules: Mapping[str, Any]) -> "SamplingParams":
        """Returns a copy with these logit rules too. Raises ValueError if one is already set, or is
        wrong."""
        given = self.logit_rules or {}
        for name in rules:
            if name in given:
                raise ValueError(f"logit_rules holds {name} already: ask for it once")
        return msgspec.structs.replace(self, logit_rules={**given, **rules})

    def check_vocab(self, vocab_size: int) -> None:
        """Raises ValueError if a token id lies outside the vocabulary."""
        if self.logit_rules is not None:
            check_rules(self.logit_rules, vocab_size)
        for name, ids in (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise ValueError(
                        f"{name} holds token id {token}, but the vocabulary ends at "
                        f"{vocab_size - 1}"
                    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


# Name -> (lowest, highest, whether None is allowed).
INTEGERS: dict[str, tuple[int, int, bool]] = {
    "n": (1, 1 << 16, False),
    "top_k": (-1, 1 << 31, False),
    "seed": (-(1 << 63), MAX_SEED, True),
    "min_tokens": (0, 1 << 31, False),
    "max_tokens": (1, 1 << 31, True),
    "logprobs": (0, 1 << 20, True),
    "prompt_logprobs": (0, 1 << 20, True),
}

# Name -> (lowest, highest, whether the lowest itself is allowed).
NUMBERS: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, 100.0, False),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
}


def _check_integers(params: SamplingParams) -> None:
    for name, (low, high, optional) in INTEGERS.items():
        value = getattr(params, name)
        if value is None and optional:
            continue
        if not _is_int(value) or not low <= value <= high:
            raise ValueError(f"{name} must be an integer in [{low}, {high}], not {value!r}")


def _check_numbers(params: SamplingParams) -> None:
    for name, (low, high, closed) in NUMBERS.items():
        value = getattr(params, name)
        if not _is_number(value) or value > high or value < low or (value == low and not closed):
            raise ValueError(
                f"{name} must be a number in {'[' if closed else '('}{low:g}, {high:g}], not "
                f"{value!r}"
            )


def _check_booleans(params: SamplingParams) -> None:
    for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
        if not isinstance(getattr(params, name), bool):
            raise ValueError(f"{name} must be true or false, not {getattr(params, name)!r}")


def _checked_stops(given: Any) -> tuple[str, ...]:
    """Returns each stop string once.

    Their number is checked first: a list of millions must not be walked through.
    """
    stops = (given,) if isinstance(given, str) else () if given is None else given
    if not _is_list(stops):
        raise ValueError(
            f"stop must be a non-empty string or a list of non-empty strings, not {given!r}"
        )
    if len(stops) > MAX_STOPS:
        raise ValueError(
            f"stop must hold at most {MAX_STOPS} strings, not {len(stops)}: send fewer"
        )
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError(
            f"stop must be a non-empty string or a list of non-empty strings, not {given!r}"
        )
    lengths = [len(stop) for stop in stops]
    if max(lengths, default=0) > MAX_STOP_CHARS or sum(lengths) > MAX_STOP_CHARS_IN_ALL:
        raise ValueError(
            f"stop must hold strings of at most {MAX_STOP_CHARS} characters, "
            f"{MAX_STOP_CHARS_IN_ALL} in all, not "
            f"{max(lengths)} and {sum(lengths)}: send fewer or shorter ones"
        )
    return tuple(dict.fromkeys(stops))


def _checked_stop_ids(given: Any) -> tuple[int, ...]:
    """Returns each id once, like `_checked_stops`."""
    ids = () if given is None else given
    if not _is_list(ids):
        raise ValueError(f"stop_token_ids must be a list of token ids >= 0, not {given!r}")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise ValueError(
            f"stop_token_ids must hold at most {MAX_STOP_TOKEN_IDS} ids, not {len(ids)}: send fewer"
        )
    if not all(_is_int(token) and token >= 0 for token in ids):
        raise ValueError(f"stop_token_ids must be a list of token ids >= 0, not {given!r}")
    return tuple(dict.fromkeys(ids))


def _check_bias(given: Any) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"logit_bias must map token ids to numbers, not {given!r}")
    bias: dict[Any, Any] = given
    if len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(
            f"logit_bias must hold at most {MAX_LOGIT_BIAS} token ids, not {len(bias)}: send fewer"
        )
    for token, value in bias.items():
        if not _is_int(token) or token < 0 or not _is_number(value) or not -100 <= value <= 100:
            raise ValueError(
                f"logit_bias must map token ids >= 0 to numbers in [-100, 100], not {token!r}: "
                f"{value!r}"
            )
