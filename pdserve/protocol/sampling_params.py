"""How the tokens of a request are drawn: `SamplingParams`, the limits of each field, and the
checks.

vLLM's names and defaults. Knows no request, tokenizer or model: a token id is compared with a
vocabulary only by `SamplingParams.check_vocab`.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pdserve.protocol.logit_rules import check_rules

MAX_SEED = 2**63 - 1

# One small body must not cost everybody else time. vLLM's table of biases holds as many
# (MAX_NUM_LOGIT_BIAS_TOKENS).
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_CHARS_IN_ALL = 8192  # the tables of `text.stop` take about a microsecond each


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """How the tokens of a request are drawn; the names and defaults are vLLM's. Every field is
    validated by name.

    n: choices per prompt. temperature: 0 (below 1e-5) is greedy. top_p, top_k (0 or -1: off),
    min_p: filters, applied in the order top_k, top_p, min_p after the temperature.
    repetition_penalty: over prompt and output; presence_penalty, frequency_penalty: over the
    output. logit_bias: added to the logits of at most MAX_LOGIT_BIAS token ids. logit_rules: other
    rules by name (`protocol.logit_rules`) and their settings. seed: None lets the receiver draw
    one. stop: at most MAX_STOPS strings that end the text, of at most MAX_STOP_CHARS characters
    each and MAX_STOP_CHARS_IN_ALL together; stop_token_ids (at most MAX_STOP_TOKEN_IDS) end the
    tokens. ignore_eos: go on past end-of-sequence. min_tokens: no stop token before. max_tokens:
    None means as many as fit the engine that generates them. logprobs, prompt_logprobs: how many
    alternatives to report a position, besides the chosen one (0: the chosen one only; None:
    nothing), of the distribution before any of the above.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    logit_rules: dict[str, Any] | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
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
        """Those of a request that says nothing, for a model with these defaults
        (`models.generation_defaults`). ValueError names the one that cannot be.
        """
        try:
            return cls(**defaults)
        except ValueError as error:
            raise ValueError(
                f"generation_config.json: {error}; mend the file, or set model.generation_config "
                "to 'none'"
            ) from error

    def with_seed(self, seed: int) -> "SamplingParams":
        """A copy with this seed that is not checked again: a call of thousands of prompts makes one
        for each."""
        drawn = copy.copy(self)
        msgspec.structs.force_setattr(drawn, "seed", seed)
        return drawn

    def with_rules(self, rules: Mapping[str, Any]) -> "SamplingParams":
        """A copy with these logit rules too. ValueError when one is there already, or is wrong."""
        given = self.logit_rules or {}
        for name in rules:
            if name in given:
                raise ValueError(f"logit_rules holds {name} already: ask for it once")
        return msgspec.structs.replace(self, logit_rules={**given, **rules})

    def check_vocab(self, vocab_size: int) -> None:
        """ValueError when a token id lies outside the vocabulary."""
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


# name -> (lowest, highest, None allowed)
INTEGERS: dict[str, tuple[int, int, bool]] = {
    "n": (1, 1 << 16, False),
    "top_k": (-1, 1 << 31, False),
    "seed": (-(1 << 63), MAX_SEED, True),
    "min_tokens": (0, 1 << 31, False),
    "max_tokens": (1, 1 << 31, True),
    "logprobs": (0, 1 << 20, True),
    "prompt_logprobs": (0, 1 << 20, True),
}

# name -> (lowest, highest, lowest itself allowed)
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
    """Each once. How many there are is looked at first: a list of millions must not be walked
    through."""
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
    """Each once, as `_checked_stops`."""
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
