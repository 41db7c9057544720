import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.backends import (
    byte_level_backend,
    metaspace_backend,
    sentencepiece_backend,
    wordpiece_backend,
)
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from pdserve.text.detokenize import IncrementalDetokenizer
from pdserve.text.tokenizer import Tokenizer

TOKENIZERS = {
    "byte_level": Tokenizer(byte_level_backend()),
    "sentencepiece": Tokenizer(sentencepiece_backend()),
    "metaspace": Tokenizer(metaspace_backend()),
    "wordpiece": Tokenizer(wordpiece_backend()),
}


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool, size: int = 1) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    pieces = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans(), size=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_any_ids_join_to_what_decode_says(
    name: str, data: st.DataObject, skip: bool, size: int
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert "".join(stream(tokenizer, ids, skip, size)) == tokenizer.decode(
        ids, skip_special_tokens=skip
    )


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@given(text=st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_unicode_streams_without_a_replacement_character(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids, True)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_incomplete_character_waits_and_then_appears_at_once() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    alphabet = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [alphabet[bytes([byte])] for byte in "🙂".encode()]
    assert stream(tokenizer, ids, True) == ["", "", "", "🙂", ""]
    assert stream(tokenizer, ids[:3], True) == ["", "", "", "\ufffd"]


def test_words_are_not_held_back() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    vocabulary = sentencepiece_backend().get_vocab()
    ids = [vocabulary[piece] for piece in ["▁hello", "▁wor", "ld"]]
    assert stream(tokenizer, ids, True) == ["hello", " wor", "ld", ""]


def test_constant_time_a_token() -> None:
    def seconds(count: int) -> float:
        """Measures this thread's CPU time, the least of three."""
        spent = []
        for _ in range(3):
            detokenizer = IncrementalDetokenizer(TOKENIZERS["sentencepiece"])
            started = time.thread_time()
            for _ in range(count):
                detokenizer.push([260])
            spent.append(time.thread_time() - started)
        return min(spent)

    # ten times the tokens; quadratic would be a hundred times the time
    assert seconds(40_000) < 25 * seconds(4_000)


@pytest.mark.parametrize(
    "make",
    [lambda: decoders.BPEDecoder(), lambda: decoders.CTC(), lambda: decoders.Strip(" ", 0, 1)],
)
def test_decoders_that_cannot_be_streamed_are_refused(make: Callable[[], decoders.Decoder]) -> None:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = make()
    with pytest.raises(ValueError, match="cannot be streamed"):
        IncrementalDetokenizer(Tokenizer(backend))
