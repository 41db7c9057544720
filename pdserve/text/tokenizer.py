"""Reads a Hugging Face tokenizer folder without transformers: encode, decode, chat template,
special tokens.

It reads tokenizer.json, tokenizer_config.json, chat_template.jinja and the eos ids of
generation_config.json. It needs only `tokenizers` and jinja2, so a process without torch can use it
(transformers' AutoTokenizer imports torch). This module knows no requests and no streams.
`text.detokenize` turns single tokens into text. The router and the offline `LLM` call this module.
"""

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tokenizers

from pdserve.text.chat_template import ChatTemplate
from pdserve.text.pieces import BytePieces, TextPieces, make_pieces

# Batches would start one thread per core of the machine. The library reads this at every call.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Unicode's canonical composition joins at most this many characters into one.
COMPOSED_CHARS = 4

_NAMED_SPECIALS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """One loaded tokenizer. It is immutable after loading, and several threads may call its
    methods."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
        kind: str = "PreTrainedTokenizerFast",
    ) -> None:
        """Takes over a loaded backend.

        - backend: Tokenizer of the library. Its truncation and padding are switched off here.
        - special_tokens: Name, as in templates -> text.
        - kind: Name of the tokenizer's class in transformers, for `description`.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.kind = kind
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.template = ChatTemplate(chat_template) if chat_template is not None else None

    @classmethod
    def load(cls, path: str | Path, chat_template: str | None = None) -> "Tokenizer":
        """Reads a folder in Hugging Face format. `chat_template` replaces the folder's own. Raises
        ValueError if the folder or its tokenizer.json is missing, or if a file is broken."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"tokenizer path {str(path)!r} holds no tokenizer.json: give a local folder in "
                "Hugging Face format; to convert a slow tokenizer, use transformers' "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the bindings raise plain Exception
            raise ValueError(
                f"{file} is not a tokenizer that this version of `tokenizers` can read: {error}"
            ) from error
        config = _read_json(folder / "tokenizer_config.json")
        specials = _special_tokens(_read_json(folder / "special_tokens_map.json") | config)
        eos = _eos_token_ids(folder, backend, specials)
        kind = str(config.get("tokenizer_class") or "PreTrainedTokenizerFast")
        return cls(backend, specials, eos, chat_template or _chat_template(folder, config), kind)

    @cached_property
    def vocab_size(self) -> int:
        """Highest token id plus one, including added tokens. The model's own vocabulary may be
        padded beyond it."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def longest_token(self) -> int:
        """Largest number of characters that one token can stand for. A text of more than
        `longest_token * n` characters has more than n tokens."""
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        return longest if self._backend.normalizer is None else COMPOSED_CHARS * longest

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """Text of each token that was added to the vocabulary, by id. Tokens that are not special
        are included, and so are delimiters such as <tool_call>."""
        return {
            token_id: token.content
            for token_id, token in self._backend.get_added_tokens_decoder().items()
        }

    @cached_property
    def pieces(self) -> BytePieces | TextPieces:
        """The text that each single token contributes. All incremental detokenizers share it."""
        return make_pieces(self._backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text. Raises ValueError if the text is not valid Unicode.
        Releases the GIL, except for about 15 ns per token at the end."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Returns the token ids of each text, as `encode` does. The GIL is released once for all of
        them."""
        return [encoding.ids for encoding in self._encodings(texts, add_special_tokens)]

    def encode_last(self, text: str, most: int, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `encode`, cut to the last `most` ids if there are more. Special tokens
        around the text stay: only the text's own ids are cut."""
        return self._encode_cut(text, most, add_special_tokens, "left")[-most:]

    def encode_first(self, text: str, most: int, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `encode`, cut to the first `most` ids if there are more. Special
        tokens around the text stay: only the text's own ids are cut."""
        return self._encode_cut(text, most, add_special_tokens, "right")[:most]

    def _encode_cut(
        self, text: str, most: int, add_special_tokens: bool, cut_at: Literal["left", "right"]
    ) -> list[int]:
        [encoding] = self._encodings([text], False)
        added = self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        if len(encoding) + added > most:
            encoding.truncate(max(0, most - added), direction=cut_at)
        if added:
            encoding = self._backend.post_process(encoding, None, True)
        ids: list[int] = encoding.ids
        return ids

    def count(self, text: str, add_special_tokens: bool = True) -> int:
        """Returns the number of ids that `encode` would give, without making them."""
        return len(self._encodings([text], add_special_tokens)[0])

    def _encodings(
        self, texts: Sequence[str], add_special_tokens: bool
    ) -> list[tokenizers.Encoding]:
        """Encodes texts without holding the GIL. The library's `encode` holds it, which stops every
        other thread."""
        try:
            return self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except (TypeError, UnicodeError) as error:
            raise ValueError(
                "the text holds a lone surrogate, which is not valid Unicode: send valid UTF-8"
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of some ids. Releases the GIL, which the library's `decode` does not."""
        [text] = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    def vocabulary_texts(self, ids: Sequence[int]) -> list[str]:
        """Returns each token as the vocabulary writes it, such as "Ġfox". An unknown id gives
        ""."""
        return [self._backend.id_to_token(token_id) or "" for token_id in ids]

    def description(self) -> dict[str, Any]:
        """Returns the content of a tokenizer_config.json for this tokenizer, JSON-ready: class,
        special tokens (null if there is none), added tokens and chat template."""
        added = {
            str(token_id): {
                "content": token.content,
                "lstrip": token.lstrip,
                "normalized": token.normalized,
                "rstrip": token.rstrip,
                "single_word": token.single_word,
                "special": token.special,
            }
            for token_id, token in self._backend.get_added_tokens_decoder().items()
        }
        return {
            "tokenizer_class": self.kind,
            **{name: self.special_tokens.get(name) for name in _NAMED_SPECIALS},
            "added_tokens_decoder": added,
            "chat_template": self.template.source if self.template is not None else None,
        }

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token stands for in the middle of a text. An unknown id gives
        b""."""
        return self.pieces.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """Returns one token as readable text. Bytes of incomplete characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Returns the prompt text of a conversation. With `continue_final_message` it ends where
        the content of the last message ends. Raises ValueError if there is no template, if the
        messages are malformed, or if the template refuses them."""
        if self.template is None:
            raise ValueError(
                "this model's tokenizer has no chat template: use /v1/completions, or add "
                "chat_template.jinja"
            )
        variables: dict[str, Any] = self.special_tokens | kwargs
        return self.template.render(
            messages, add_generation_prompt, tools, variables, continue_final_message
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Returns the token ids of a conversation. The template writes its own special tokens.
        Raises what `render_chat` raises."""
        return self.encode(
            self.render_chat(messages, add_generation_prompt, **kwargs),
            add_special_tokens=False,
        )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file} must hold a JSON object, not {type(data).__name__}")
    return data


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens, name -> text. In the file a token is a string or an AddedToken's
    dict."""
    specials = {}
    for name in _NAMED_SPECIALS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            specials[name] = text
    return specials


def _eos_token_ids(
    folder: Path, backend: tokenizers.Tokenizer, specials: Mapping[str, str]
) -> list[int]:
    """Returns the eos ids of the tokenizer and of generation_config.json, as in transformers. If
    that file is missing, config.json is read."""
    source = folder / "generation_config.json"
    value = _read_json(source if source.is_file() else folder / "config.json").get("eos_token_id")
    ids = [] if value is None else list(value) if isinstance(value, list) else [value]
    own = backend.token_to_id(specials["eos_token"]) if "eos_token" in specials else None
    return ids if own is None else [own, *ids]


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Returns the chat template. chat_template.jinja wins over the template in the config. If the
    config has several named templates, the one called "default" is used."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
