"""Makes a model folder that can be served from only a config.json, with a tokenizer that has a
short word for every id.

The router needs a tokenizer to write text. This one is byte-level, so that any prompt can be read.
Its 256 bytes come first. All other ids are words without merges, which are about as long as real
tokens and are never produced by encoding. benchmarks/targets/measure.py uses it.
"""

import itertools
import json
import shutil
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPACE = "Ġ"  # a space in the byte-level alphabet


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Makes a tokenizer of `vocab_size` distinct tokens. Raises ValueError below 256."""
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
    """Returns `model` if it has a tokenizer. Otherwise returns `scratch` with the model's
    config.json and a stand-in tokenizer."""
    if (model / "tokenizer.json").is_file():
        return model
    shutil.copy(model / "config.json", scratch)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    make_tokenizer(vocab_size).save(str(scratch / "tokenizer.json"))
    return scratch
