"""Trains the demo model's byte-level BPE tokenizer on generated text and writes it in Hugging Face
format.

Digits are tokens of their own; <|bos|> is put in front by the tokenizer (as Llama's does), and the
chat template writes it itself, so rendered chats are encoded with `add_special_tokens=False`. Knows
the text generators, not the model. Run by hand: `python -m demo.tokenizer`; the result is shipped
in demo/pdserve-demo.
"""

import argparse
import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from demo.data import ASSISTANT, BOS, END, EOS, SYSTEM, USER, document

VOCAB_SIZE = 1536
MAX_LENGTH = 2048
SPECIAL_TOKENS = [BOS, EOS, SYSTEM, USER, ASSISTANT, END]
# Digits one by one, so that numbers can be copied and added; words with their leading space; runs
# of marks; spaces.
SPLIT = r"\p{N}| ?\p{L}+|[^\s\p{L}\p{N}]+|\s"
MODEL_DIR = Path(__file__).parent / "pdserve-demo"

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] not in ['system', 'user', 'assistant'] %}
{{- raise_exception("role must be 'system', 'user' or 'assistant', not '" ~ message['role'] ~ "'") }}
{%- endif %}
{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- endif %}
"""


def train_tokenizer(seed: int = 0, num_documents: int = 12000) -> Tokenizer:
    """A tokenizer of VOCAB_SIZE entries, special tokens first (ids 0-5), trained on `num_documents`
    documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(seed)
    tokenizer.train_from_iterator((document(rng, 250, 0.5) for _ in range(num_documents)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, token_id(tokenizer, BOS))],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "extra_special_tokens": [SYSTEM, USER, ASSISTANT, END],
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must be in the vocabulary; ValueError if it is not."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(
            f"{token!r} is not one token of this tokenizer: make it anew with python -m "
            "demo.tokenizer"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="train the demo tokenizer")
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    save_tokenizer(train_tokenizer(), parser.parse_args().out)


if __name__ == "__main__":
    main()
