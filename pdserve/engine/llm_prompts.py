"""Reads the inputs of `LLM`: prompts as texts, token ids or dicts, one or many, and their sampling
parameters.

Knows no engine. Used by `engine.llm`.
"""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypedDict

from pdserve.protocol.sampling_params import SamplingParams
from pdserve.text.long_texts import first_token_ids
from pdserve.text.tokenizer import Tokenizer


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


Prompt = str | Sequence[int] | TokensPrompt


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Make a list of prompts from one or many: text, token ids, or dicts with prompt_token_ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and isinstance(items[0], Integral) else items


def params_for(
    default: SamplingParams,
    batch: Sequence[Any],
    params: SamplingParams | Sequence[SamplingParams] | None,
) -> list[SamplingParams]:
    """Returns sampling parameters for each prompt. ValueError if their number or type is wrong."""
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * len(batch)
    each = list(params)
    if not all(isinstance(p, SamplingParams) for p in each):
        raise ValueError(
            "sampling_params must be a SamplingParams, or a list of them, one per prompt"
        )
    if len(each) != len(batch):
        raise ValueError(
            f"sampling_params has {len(each)} entries for {len(batch)} prompts: give one for all, "
            "or one per prompt"
        )
    return each


def tokenise(
    tokenizer: Tokenizer | None, prompt: Prompt, first: int | None = None
) -> tuple[str | None, list[int]]:
    """Returns the prompt's text, if it is one, and its ids. first: maximum number of ids to return.
    ValueError if it is not a prompt."""
    if isinstance(prompt, Mapping):
        if set(prompt) != {"prompt_token_ids"}:
            raise ValueError(
                f"a prompt's dict must hold only prompt_token_ids, not {sorted(prompt)}"
            )
        return None, _plain_ids(prompt["prompt_token_ids"])[:first]
    if not isinstance(prompt, str):
        return None, _plain_ids(prompt)[:first]
    if tokenizer is None:
        raise ValueError(
            "a text prompt needs a tokenizer: give token ids, or create LLM with a tokenizer"
        )
    if first is not None:
        return prompt, first_token_ids(tokenizer, prompt, True, first)
    return prompt, tokenizer.encode(prompt)


def _plain_ids(ids: Any) -> list[int]:
    """Returns plain integers from a list, tuple or array of integers."""
    if isinstance(ids, Iterable):
        items = list(ids)
        kinds = set(map(type, items))
        if all(issubclass(kind, Integral) and kind is not bool for kind in kinds):
            return list(map(int, items))
    raise ValueError(
        "prompt must be text, a list of token ids or {'prompt_token_ids': [...]}, not "
        f"{ids!r:.80}"
    )
