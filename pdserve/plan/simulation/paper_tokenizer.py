"""A tokenizer on paper: every token is the same letter. A simulation sends and gets token ids only.

It has only those parts of a tokenizer that a router uses for an answer.
"""

from collections.abc import Mapping
from types import MappingProxyType


class _Letters:
    def is_byte(self, token_id: int) -> bool:
        return False

    def is_empty(self, token_id: int) -> bool:
        return True


class PaperTokenizer:
    pieces = _Letters()
    special_ids: frozenset[int] = frozenset()
    added_tokens: Mapping[int, str] = MappingProxyType({})
    template = None
    longest_token = 1
