"""A model folder that can be served, made of a config.json alone: a tokenizer that gives a short
word for every id.

The router needs a tokenizer to write text. Byte-level, so that any prompt can be read; its 256
bytes come first, all other ids are words without merges: about as long as real tokens, never
produced by encoding. Used by benchmarks/targets/measure.py.
"""

import itertools
import json
import shutil
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPACE = "Ġ"  # a space in the byte-level alphabet


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """vocab_size distinct tokens. ValueError below 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet):
        raise ValueError(
            f"a byte-level tokenizer needs at least {len(alphabet)} ids, not {vocab_size}"
        )
    letters = itertools.product(string.ascii_lowercase, repeat=4)
    words = (
        SPACE + "".join(word) for word in itertools.islice(letters, vocab_size - len(alphabet))
    )
    tokens = [*alphabet, *words]
    assert len(tokens) == vocab_size, "four letters are not enough for so many ids"
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def servable_folder(model: Path, scratch: Path) -> Path:
    """`model` if it has a tokenizer, else `scratch` with its config.json and a stand-in
    tokenizer."""
    if (model / "tokenizer.json").is_file():
        return model
    shutil.copy(model / "config.json", scratch)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    make_tokenizer(vocab_size).save(str(scratch / "tokenizer.json"))
    return scratch
