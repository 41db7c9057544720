"""Incremental detokenisation: token ids in, the text that became certain out, in constant time per
token.

It only holds back text that a later token can still change: an incomplete UTF-8 character
(byte-level BPE) or a run of byte tokens (sentencepiece). The joined pieces equal `Tokenizer.decode`
of all tokens. This module knows no stop strings (`text.stop`). Each choice has one object. The
router and the offline `LLM` call it.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from pdserve.text.pieces import BytePieces, TextPieces
from pdserve.text.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class _Assembler(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        pieces = tokenizer.pieces
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._assembler: _Assembler = (
            _ByteAssembler(pieces) if isinstance(pieces, BytePieces) else _TextAssembler(pieces)
        )

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens make certain, which may be empty. It never has a
        U+FFFD that a later token would undo."""
        if len(token_ids) == 1:  # the usual case: one token per step
            return self._assembler.push(token_ids[0]) if token_ids[0] not in self._skipped else ""
        return "".join(
            [self._assembler.push(token) for token in token_ids if token not in self._skipped]
        )

    def flush(self) -> str:
        """Returns the held text when no token follows. An incomplete character becomes U+FFFD, as
        in `Tokenizer.decode`."""
        return self._assembler.flush()


class _ByteAssembler:
    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces
        self._decoder = _utf8_decoder("replace")
        self._holds_bytes = False

    def push(self, token_id: int) -> str:
        whole = self._pieces.whole_text(token_id)
        if whole is not None and not self._holds_bytes:
            return whole
        text = self._decoder.decode(self._pieces.token_bytes(token_id))
        self._holds_bytes = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self._holds_bytes = False
        return self._decoder.decode(b"", final=True)


class _TextAssembler:
    """Joins texts of tokens. Byte tokens are held until their run ends, because only the whole run
    decides between characters and U+FFFD."""

    def __init__(self, pieces: TextPieces) -> None:
        self._pieces = pieces
        self._first = True
        self._run: list[int] = []

    def push(self, token_id: int) -> str:
        if self._pieces.is_byte(token_id):
            self._run.append(token_id)
            return ""
        if self._pieces.is_empty(token_id):
            return ""
        text = self.flush()
        text += self._pieces.decode([token_id]) if self._first else self._pieces.piece(token_id)
        self._first = False
        return text

    def flush(self) -> str:
        if not self._run:
            return ""
        text = self._pieces.decode(self._run) if self._first else self._pieces.inner(self._run)
        self._first = False
        self._run = []
        return text
