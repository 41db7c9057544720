"""Makes small real tokenizers with the tokenizers library: byte-level BPE, sentencepiece-like,
metaspace, WordPiece."""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's a dog's life, isn't it?",
    "Prefill workers compute the prompt; decode workers generate the tokens.",
    "Grüße aus Köln, naïve café, 你好世界, привет, 🙂🙃 emoji.",
] * 3

TEMPLATE = """{%- for message in messages %}
{%- if message.role == 'alien' %}{{ raise_exception('unknown role ' ~ message.role) }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% if not_thinking %}<none>{% endif %}{% endif %}"""


def byte_level_backend(*delimiters: str, special: bool = False) -> Tokenizer:
    """Makes a byte-level tokenizer with `delimiters` as further tokens. If `special`,
    skip_special_tokens hides them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|bos|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(
        [AddedToken("<tool>", normalized=False), AddedToken("naïve 词", normalized=False)]
    )
    backend.add_tokens([AddedToken(text, normalized=False, special=special) for text in delimiters])
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    return backend


def sentencepiece_backend() -> Tokenizer:
    """As Llama 2: byte fallback, leading space stripped once."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", "▁hello", "hello", "▁wor", "ld", "a", "b", "▁a", "▁▁", "é", "世", ".", "s"]:
        vocab[piece] = len(vocab)
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    stages = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(stages)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def metaspace_backend() -> Tokenizer:
    vocab = {
        piece: i
        for i, piece in enumerate(["<unk>", "▁", "▁hello", "hello", "x", "▁▁y", "é", "▁z▁"])
    }
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>"])
    return backend


def wordpiece_backend() -> Tokenizer:
    vocab = {
        piece: i
        for i, piece in enumerate(
            ["[UNK]", "play", "##ing", "##ed", ".", ",", "don", "'", "t", "n't", "é"]
        )
    }
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[UNK]"])
    return backend


def write_folder(folder: Path, backend: Tokenizer, **config: object) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
