"""Shared parts of the tests of grammars: a small tokenizer, whole texts against a grammar, and
random walks through one."""

import random
from collections.abc import Iterable, Sequence
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from pdserve.text.answers.pieces import Item, SpecialToken
from pdserve.text.grammars.probe import matcher_of

EOS = 256


def accepts(grammar: str, text: str) -> bool:
    """Whether the grammar lets the whole text through, byte by byte, and may end there."""
    matcher = _matcher(grammar).deep_copy()
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@lru_cache(maxsize=16)
def _matcher(grammar: str) -> LLMatcher:
    return matcher_of(grammar)


class Vocabulary:
    """Bytes, some words, and special tokens. As llguidance wants a tokenizer."""

    def __init__(self, words: Iterable[str], special: Sequence[str] = ()) -> None:
        self.tokens = [bytes([value]) for value in range(256)] + [b"<eos>"]
        self.special = {name: len(self.tokens) + i for i, name in enumerate(special)}
        self.tokens += [name.encode() for name in special]
        self.special_token_ids = list(range(EOS, len(self.tokens)))
        self.words = {}
        for word in dict.fromkeys(words):
            self.words[len(self.tokens)] = word
            self.tokens.append(word.encode())
        self.eos_token_id = EOS
        self.bos_token_id = None
        self.llguidance = LLTokenizer(TokenizerWrapper(self), slices=[])

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def walk(
    grammar: str, vocabulary: Vocabulary, rng: random.Random, length: int = 150
) -> list[Item] | None:
    """One random answer that the grammar lets through; None when it finds no end in time. After
    `length` tokens it prefers what may lead to the end."""
    matcher = LLMatcher(vocabulary.llguidance, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    names = {number: name for name, number in vocabulary.special.items()}
    items: list[Item] = []
    held = b""
    for step in range(8 * length):
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
        allowed = [t for t in range(len(vocabulary.tokens)) if mask[t // 8] >> t % 8 & 1]
        token = _pick(allowed, vocabulary, rng, step > length, bool(held) and held[-1] > 127)
        if token == EOS:
            return [*items, held.decode()] if held else items
        assert matcher.consume_token(token)
        if token in names:
            items += [held.decode(), SpecialToken(names[token])]
            held = b""
        else:
            held += vocabulary.tokens[token]
    return None


def _pick(
    allowed: list[int], vocabulary: Vocabulary, rng: random.Random, hurries: bool, is_inside: bool
) -> int:
    assert allowed, "nothing may follow"
    if EOS in allowed and (hurries or rng.random() < 0.2):
        return EOS
    special = [t for t in allowed if t in vocabulary.special.values()]
    words = [t for t in allowed if t in vocabulary.words]
    plain = [t for t in allowed if 32 <= t < 127 or t == 10] or [t for t in allowed if t < EOS]
    if hurries:
        ends = [t for t in words if vocabulary.words[t].strip().startswith(("</", '"', "}", "]"))]
        if special or ends:
            return rng.choice(special or ends)
        ends = [t for t in plain if chr(t) in '"}]0\\']
        if ends and rng.random() < 0.7:
            return rng.choice(ends)
    groups = [group for group in (special, words, words, plain) if group]
    return rng.choice(rng.choice(groups) if groups else allowed)


def text_of(items: Sequence[Item]) -> str:
    return "".join(item if isinstance(item, str) else item.text for item in items)
