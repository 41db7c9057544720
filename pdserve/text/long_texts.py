"""The first or last token ids of a text that may be much longer than they are.

Tokenising takes 200 to 400 bytes of memory per character. So only the beginning or the end of a
long text is tokenised, with some tokens to spare. A cut within a word changes only the tokens next
to the cut. `LLM` and routers use this module.
"""

from collections.abc import Callable

from pdserve.text.tokenizer import Tokenizer

# A part of a long text is tokenised first: PROBE_CHARS characters for each token that is wanted,
# and at least LEAST_PROBE characters.
PROBE_CHARS = 4
LEAST_PROBE = 8192
# A whole text may have up to this many tokens fewer than a part of it that ends within a word.
CUT_TOKENS = 512


def last_token_ids(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, most: int
) -> list[int]:
    """Returns the last `most` token ids of a text. Raises ValueError if it is not valid
    Unicode."""
    part = _enough(tokenizer, text, most, lambda size: text[-size:])
    return tokenizer.encode_last(part, most, add_special_tokens)


def first_token_ids(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, most: int
) -> list[int]:
    """Returns the first `most` token ids of a text, including the special tokens around it. Raises
    ValueError if it is not valid Unicode."""
    part = _enough(tokenizer, text, most, lambda size: text[:size])
    return tokenizer.encode_first(part, most, add_special_tokens)


def _enough(tokenizer: Tokenizer, text: str, most: int, part_of: Callable[[int], str]) -> str:
    """Returns a part of the text that has tokens to spare, or the whole text."""
    size = max(LEAST_PROBE, PROBE_CHARS * (most + CUT_TOKENS))
    while size < len(text) and tokenizer.count(part_of(size), False) < most + CUT_TOKENS:
        size *= 2
    return part_of(size)
