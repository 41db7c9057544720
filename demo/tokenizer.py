"""Trains the demo model's byte-level BPE tokenizer on generated text and writes it in Hugging Face
format.

Digits are tokens of their own. The tokenizer puts <|bos|> in front, as Llama's does. The chat
template writes it itself, so rendered chats are encoded with `add_special_tokens=False`. This
module knows the text generators, but not the model. It is run by hand: `python -m demo.tokenizer`.
The result is shipped in demo/pdserve-demo.
"""

import argparse
import json
import random
import re
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from demo.data import (
    ASSISTANT,
    BOS,
    CALL,
    CALL_END,
    END,
    EOS,
    RESULT,
    RESULT_END,
    SYSTEM,
    THINK,
    THINK_END,
    USER,
)
from demo.documents import document

VOCAB_SIZE = 1792
MAX_LENGTH = 2048
DELIMITERS = [CALL, CALL_END, RESULT, RESULT_END, THINK, THINK_END]
SPECIAL_TOKENS = [BOS, EOS, SYSTEM, USER, ASSISTANT, END, *DELIMITERS]
# Splits text into single digits (so that numbers can be copied and added), words with their leading
# space, runs of marks, and spaces.
SPLIT = r"\p{N}| ?\p{L}+|[^\s\p{L}\p{N}]+|\s"
MODEL_DIR = Path(__file__).parent / "pdserve-demo"

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- set tools_text %}
{%- if tools %}
{{- 'You may call these functions:\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' ~ (tool | tojson) }}
{%- endfor %}
{{- '\\n</tools>' }}
{%- endif %}
{%- endset %}
{%- if tools and (not messages or messages[0]['role'] not in ['system', 'developer']) %}
{{- '<|system|>' ~ tools_text ~ '<|end|>' }}
{%- endif %}
{%- for message in messages %}
{%- set role = message['role'] %}
{%- set content = message['content'] if message['content'] is string else '' %}
{%- if role in ['system', 'developer'] %}
{{- '<|system|>' ~ content }}
{%- if loop.first and tools %}
{{- ('\\n\\n' if content else '') ~ tools_text }}
{%- endif %}
{{- '<|end|>' }}
{%- elif role == 'user' %}
{{- '<|user|>' ~ content ~ '<|end|>' }}
{%- elif role == 'assistant' %}
{%- if '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|assistant|>' ~ content }}
{%- for call in message['tool_calls'] or [] %}
{%- if content or not loop.first %}
{{- '\\n' }}
{%- endif %}
{%- set function = call['function'] if call['function'] else call %}
{{- '<tool_call>\\n{"name": ' ~ (function['name'] | tojson) ~ ', "arguments": ' }}
{{- function['arguments'] if function['arguments'] is string else function['arguments'] | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- elif role == 'tool' %}
{{- '\\n' if loop.previtem and loop.previtem['role'] == 'tool' else '<|user|>' }}
{{- '<tool_response>\\n' ~ content ~ '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem['role'] != 'tool' %}
{{- '<|end|>' }}
{%- endif %}
{%- else %}
{{- raise_exception("role must be 'system', 'developer', 'user', 'assistant' or 'tool', not '" ~ role ~ "'") }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' ~ ('<think>\\n' if enable_thinking else '') }}
{%- endif %}
"""


def train_tokenizer(seed: int = 0, num_documents: int = 12000) -> Tokenizer:
    """Trains a tokenizer of VOCAB_SIZE entries on `num_documents` documents. Special tokens come
    first (ids 0-11)."""
    specials = "|".join(map(re.escape, SPECIAL_TOKENS))
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
    texts = (document(rng, 250, 0.5, skills_share=0.5) for _ in range(num_documents))
    # Otherwise the trainer would also learn the letters of special tokens.
    parts = (part for text in texts for part in re.split(specials, text))
    tokenizer.train_from_iterator(parts, trainer)
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
        "extra_special_tokens": SPECIAL_TOKENS[2:],
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Returns the id of a token. Raises ValueError if it is not in the vocabulary."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(
            f"{token!r} is not one token of this tokenizer: train it again with python -m "
            "demo.tokenizer"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="train the demo tokenizer")
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    save_tokenizer(train_tokenizer(), parser.parse_args().out)


if __name__ == "__main__":
    main()
