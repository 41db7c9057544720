"""Checks that a call's parameters are within this router's limits, before any worker hears of it.

Plain functions that raise ApiError, which names the parameter and a cure. SamplingParams checks
more by itself, and `router.admission` what depends on the moment. Called by
`router.request.service`, and by `router.http.app` before a prompt is made.
"""

from dataclasses import dataclass

from pdserve.configs.router import RouterConfig
from pdserve.protocol.logit_rules import check_served
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.errors import ApiError, room_error, value_error
from pdserve.router.request.prompts import Lengths

# Far above what anyone needs. Without it one body could keep the event loop busy for minutes.
MAX_CHOICES = 8192
# Entries of logit_bias and stop_token_ids, times choices: each choice has a copy at a worker.
MAX_EDITS = 1 << 20
# Log-probabilities of prompt tokens in an answer. Each takes 13 bytes here, and 50 to 70 in JSON.
MAX_SCORES = 1 << 19
MAX_SALT_CHARS = 256
MAX_SESSION_CHARS = 256
MAX_PRIORITY = 2**31 - 1  # the least one is -MAX_PRIORITY


@dataclass(frozen=True, slots=True)
class Names:
    """The client's names for fields, for errors."""

    # The field with the prompt.
    prompt: str = "prompt"
    # The field that limits the answer's length; "" if the client did not send it.
    max_tokens: str = "max_tokens"
    # The field with the number of alternatives that are shown for a generated token.
    logprobs: str = "logprobs"


PLAIN_NAMES = Names()  # the names of SamplingParams


def check_scheduling(priority: int, cache_salt: str, session_id: str) -> None:
    """Raises ApiError (400) if one of them is out of range or too long."""
    if abs(priority) > MAX_PRIORITY:
        message = (
            f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}, the lowest runs first, not "
            f"{priority}"
        )
        raise ApiError(message, param="priority")
    if len(cache_salt) > MAX_SALT_CHARS:
        message = (
            f"cache_salt must have at most {MAX_SALT_CHARS} characters, not {len(cache_salt)}: "
            "send a hash of it"
        )
        raise ApiError(message, param="cache_salt")
    if len(session_id) > MAX_SESSION_CHARS:
        message = (
            f"x-session-id: a session's id must have at most {MAX_SESSION_CHARS} characters, not "
            f"{len(session_id)}: send a hash of it"
        )
        raise ApiError(message, param="x-session-id")


def check_scores(sampling: SamplingParams, num_tokens: int) -> None:
    """Raises ApiError (400) if there are too many log-probabilities of prompts.

    Every choice repeats those of its prompt.
    """
    if sampling.prompt_logprobs is None:
        return
    count = num_tokens * sampling.n * (sampling.prompt_logprobs + 1)
    if count > MAX_SCORES:
        message = (
            f"prompt_logprobs (or logprobs with echo): {count} log-probabilities of prompt tokens, "
            "more than "
            f"{MAX_SCORES} (tokens x choices x alternatives): ask for fewer, or of shorter prompts"
        )
        raise ApiError(message, param="prompt_logprobs")


def check_room(
    sampling: SamplingParams, open_ended: bool, num_prompt: int, limit: int, names: Names
) -> None:
    """Raises ApiError (400) if no worker has room for the longest prompt and its answer."""
    max_tokens = 1 if open_ended else sampling.max_tokens or 1
    for asked, value in ((names.max_tokens, max_tokens), ("min_tokens", sampling.min_tokens)):
        if num_prompt + value > limit:
            raise room_error(limit, num_prompt, value, names.prompt, asked)


def kept_tokens(asked: int, sampling: SamplingParams, open_ended: bool, lengths: Lengths) -> int:
    """Returns the number of tokens to which truncate_prompt_tokens cuts a prompt.

    -1 asks for as many as leave room for the answer. Raises ApiError (400) if it is out of range.
    """
    if asked == -1 and not lengths.limits.least_answer:
        return lengths.max_tokens
    if asked == -1:
        answer = max(1 if open_ended else sampling.max_tokens or 1, sampling.min_tokens)
        return max(1, min(lengths.max_tokens, lengths.limits.max_tokens - answer))
    if not 1 <= asked <= lengths.max_tokens:
        message = (
            f"truncate_prompt_tokens must be -1 or from 1 to {lengths.max_tokens}, the longest "
            f"prompt that this server takes, not {asked}"
        )
        raise ApiError(message, param="truncate_prompt_tokens")
    return asked


def check_num_choices(config: RouterConfig, n: int, num_prompts: int = 1) -> None:
    """Raises ApiError (400) if n choices of each prompt are more than this router takes."""
    if n > config.max_n:
        message = (
            f"n must be at most {config.max_n}, not {n}: ask for fewer choices, or raise "
            "router.max_n"
        )
        raise ApiError(message, param="n")
    if n * num_prompts > MAX_CHOICES:
        message = (
            f"n ({n}) times the number of prompts ({num_prompts}) must be at most {MAX_CHOICES}: "
            "spread them over several requests"
        )
        raise ApiError(message, param="n" if num_prompts == 1 else "prompt")


def check_call(
    config: RouterConfig, sampling: SamplingParams, num_prompts: int, names: Names, vocab_size: int
) -> None:
    """Raises ApiError (400) if there is no prompt, if a list of ids is too long for this number of
    choices or names ids beyond the vocabulary, if too many log-probabilities are asked for, or for
    logit rules that this server does not have."""
    if not num_prompts:
        raise ApiError(
            f"{names.prompt} is empty: send a text, a list of token ids, or a list of these",
            param=names.prompt,
        )
    bias = sampling.logit_bias or {}
    num_choices = sampling.n * num_prompts
    num_ids = len(bias) + len(sampling.stop_token_ids)
    if num_ids * num_choices > MAX_EDITS:
        name = "logit_bias" if len(bias) > len(sampling.stop_token_ids) else "stop_token_ids"
        message = (
            f"{name}: logit_bias and stop_token_ids hold {num_ids} ids for each of {num_choices} "
            f"choices, and may hold {MAX_EDITS} for all of them: send fewer ids, or spread the "
            "choices over several requests"
        )
        raise ApiError(message, param=name)
    asked = ((names.logprobs, sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs))
    for name, value in asked:
        if value is not None and value > config.max_logprobs:
            message = (
                f"{name} ({value}) must not exceed {config.max_logprobs}: ask for fewer, or raise "
                "router.max_logprobs"
            )
            raise ApiError(message, param=name)
    try:
        sampling.check_vocab(vocab_size)
        check_served(sampling.logit_rules)
    except ValueError as error:
        raise value_error(error, SamplingParams.__struct_fields__) from error
