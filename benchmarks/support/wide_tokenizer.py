"""A byte-level BPE tokenizer with as many tokens as a large model's, trained on generated JSON and
code. Measurements of grammars use it if no real tokenizer can be downloaded.

    write_tokenizer(folder, 128_000)
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SYLLABLES = [a + b for a in "bcdfghjklmnprstvwz" for b in ("a", "e", "i", "o", "u", "an", "er")]
NUM_DOCUMENTS = 60_000
END = "<|end_of_text|>"


def write_tokenizer(folder: Path, vocab_size: int, seed: int = 0) -> None:
    """Writes tokenizer.json and tokenizer_config.json. This takes half a minute on 16 cores."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_documents(random.Random(seed)), trainer)
    assert tokenizer.get_vocab_size() == vocab_size, "the text has too few different words"
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _documents(draw: random.Random) -> Iterator[str]:
    words = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(200_000)]
    for number in range(NUM_DOCUMENTS):
        yield _json(draw, words) if number % 2 else _code(draw, words)


def _json(draw: random.Random, words: list[str]) -> str:
    def value(depth: int) -> object:
        kind = draw.randrange(6 if depth < 3 else 4)
        if kind == 0:
            return round(draw.uniform(-1e4, 1e4), draw.randint(0, 3))
        if kind < 3:
            return " ".join(draw.choices(words, k=draw.randint(1, 6)))
        if kind == 3:
            return draw.choice([True, False, None])
        if kind == 4:
            return [value(depth + 1) for _ in range(draw.randint(1, 4))]
        return {draw.choice(words): value(depth + 1) for _ in range(draw.randint(1, 5))}

    document = {draw.choice(words): value(0) for _ in range(draw.randint(2, 6))}
    return json.dumps(document, indent=draw.choice([None, None, 2, 4]))


def _code(draw: random.Random, words: list[str]) -> str:
    lines = []
    for _ in range(draw.randint(2, 6)):
        name, first, second = (draw.choice(words) for _ in range(3))
        lines.append(f"def {name}_{first}({first}, {second}=None):")
        lines.append(f"    {second} = {first}.{draw.choice(words)}({draw.randrange(1000)})")
        lines.append(f'    return [{second}["{draw.choice(words)}"] for {name} in {first}]\n')
    return "\n".join(lines)
