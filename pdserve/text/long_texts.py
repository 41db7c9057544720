"""The first or last token ids of a text that may be much longer than they are.

Tokenising takes 200 to 400 bytes of memory per character, so of a long text only an end is
tokenised that has tokens to spare: a cut within a word changes only the tokens next to the cut.
Used by `LLM` and by routers.
"""

from collections.abc import Callable

from pdserve.text.tokenizer import Tokenizer

# Of a text that may be too long, a part is tokenised first: PROBE_CHARS characters for each token
# that is wanted, and at least LEAST_PROBE.
PROBE_CHARS = 4
LEAST_PROBE = 8192
# A whole text may have this many tokens fewer than a part of it, which may end within a word.
CUT_TOKENS = 512


def last_token_ids(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, most: int
) -> list[int]:
    """The last token ids of a text. ValueError when it is no valid Unicode."""
    part = _enough(tokenizer, text, most, lambda size: text[-size:])
    return tokenizer.encode_last(part, most, add_special_tokens)


def first_token_ids(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, most: int
) -> list[int]:
    """The first token ids of a text; the special tokens that stand around it are among them.
    ValueError when it is no valid Unicode."""
    part = _enough(tokenizer, text, most, lambda size: text[:size])
    return tokenizer.encode_first(part, most, add_special_tokens)


def _enough(tokenizer: Tokenizer, text: str, most: int, part_of: Callable[[int], str]) -> str:
    """A part of the text that has tokens to spare, or all of it."""
    size = max(LEAST_PROBE, PROBE_CHARS * (most + CUT_TOKENS))
    while size < len(text) and tokenizer.count(part_of(size), False) < most + CUT_TOKENS:
        size *= 2
    return part_of(size)
