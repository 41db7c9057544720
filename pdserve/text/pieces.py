"""Pieces: what one token adds to a text, independent of its neighbours. Incremental detokenisation
is built on this table.

- Byte-level BPE (GPT-2, Llama 3, Qwen): A token is a run of bytes. Only UTF-8 ties neighbours
  together.
- Sentencepiece and WordPiece decoders: A token is text. The first token of a sequence loses its
  leading space, and a run of `<0xNN>` byte tokens is one unit.

A decoder of any other kind is refused and not guessed. `text.tokenizer` and `text.detokenize` call
this module.
"""

import json
from collections.abc import Sequence
from typing import Any

import tokenizers


class BytePieces:
    """Pieces of a byte-level decoder. The text of a sequence is the UTF-8 decoding of the joined
    bytes of its tokens."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._cache: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._cache.get(token_id)
        if piece is None:
            piece = self._cache[token_id] = _byte_level_bytes(
                self._backend.id_to_token(token_id) or ""
            )
        return piece

    def whole_text(self, token_id: int) -> str | None:
        """Returns the token's text, or None if its bytes are not whole characters, which is
        rare."""
        try:
            return self._texts[token_id]
        except KeyError:
            text = self._texts[token_id] = _decoded(self.token_bytes(token_id))
            return text


class TextPieces:
    """Pieces of a text decoder. A token's piece is the text that it adds after an ordinary token,
    the anchor."""

    def __init__(self, backend: tokenizers.Tokenizer, byte_fallback: bool) -> None:
        self._backend = backend
        self._byte_fallback = byte_fallback
        self._anchor = _find_anchor(backend)
        self._anchor_length = len(self.decode([self._anchor]))
        self._cache: dict[int, str] = {}

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def is_byte(self, token_id: int) -> bool:
        return (
            self._byte_fallback and _fallback_byte(self._backend.id_to_token(token_id)) is not None
        )

    def is_empty(self, token_id: int) -> bool:
        """True if the decoder ignores the token. Such a token does not count as the first one of a
        sequence."""
        return not self._backend.id_to_token(token_id)

    def inner(self, ids: Sequence[int]) -> str:
        """Returns the text of these tokens when other tokens precede them."""
        return self.decode([self._anchor, *ids])[self._anchor_length :]

    def piece(self, token_id: int) -> str:
        piece = self._cache.get(token_id)
        if piece is None:
            piece = self._cache[token_id] = self.inner([token_id])
        return piece

    def token_bytes(self, token_id: int) -> bytes:
        byte = _fallback_byte(self._backend.id_to_token(token_id)) if self._byte_fallback else None
        return self.piece(token_id).encode() if byte is None else bytes([byte])


def make_pieces(backend: tokenizers.Tokenizer) -> BytePieces | TextPieces:
    """Makes the pieces of a tokenizer. Raises ValueError if its decoder is of no known kind."""
    stages = _stages(json.loads(backend.to_str())["decoder"])
    kinds = [stage["type"] for stage in stages]
    if kinds == ["ByteLevel"]:
        return BytePieces(backend)
    for stage in stages:
        if stage["type"] not in {
            "Metaspace",
            "Replace",
            "ByteFallback",
            "Fuse",
            "Strip",
            "WordPiece",
        }:
            raise ValueError(
                f"the tokenizer's decoder {stage['type']!r} cannot be streamed: ByteLevel, "
                "Metaspace, WordPiece and sequences of Replace, ByteFallback, Fuse, Strip can"
            )
        if stage["type"] == "Strip" and stage["stop"]:
            raise ValueError(
                "the tokenizer's decoder strips the end of a text, which cannot be streamed"
            )
    return TextPieces(backend, byte_fallback="ByteFallback" in kinds)


def _stages(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [stage for inner in decoder["decoders"] for stage in _stages(inner)]
    return [decoder]


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's table, character -> byte. A printable byte is written as itself, the others
    as the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """Returns a token's bytes as the ByteLevel decoder does. A token with a character outside the
    alphabet stands for its own UTF-8."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _fallback_byte(token: str | None) -> int | None:
    if token is None or len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _find_anchor(backend: tokenizers.Tokenizer) -> int:
    """Finds a token that decodes to itself: plain letters, without space, special meaning or
    bytes."""
    specials = {token.content for token in backend.get_added_tokens_decoder().values()}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    plain = [t for t in vocabulary if t.isalnum() and t.isascii() and t not in specials]
    for token in sorted(plain, key=lambda t: (len(t), t)):
        if backend.decode([vocabulary[token]], skip_special_tokens=False) == token:
            return vocabulary[token]
    raise ValueError("the tokenizer's vocabulary has no plain word, so its text cannot be streamed")
