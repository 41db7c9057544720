"""A Hugging Face tokenizer folder without transformers: encode, decode, chat template, special
tokens.

Reads tokenizer.json, tokenizer_config.json, chat_template.jinja and the eos ids of
generation_config.json. Needs only `tokenizers` and jinja2, so a process without torch can use it
(transformers' AutoTokenizer imports torch). Knows no requests and no streams: `text.detokenize`
turns single tokens into text. Called by the router and by the offline `LLM`.
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

# Batches would start a thread for each core of the machine. The library reads this at each call.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Unicode's canonical composition makes one character out of at most this many.
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
    """One loaded tokenizer. Immutable after loading; its methods may be called from several
    threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
        kind: str = "PreTrainedTokenizerFast",
    ) -> None:
        """backend: truncation and padding are switched off. special_tokens: name, as in templates
        -> text. kind: transformers' class of it, for those who ask."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.kind = kind
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.template = ChatTemplate(chat_template) if chat_template is not None else None

    @classmethod
    def load(cls, path: str | Path, chat_template: str | None = None) -> "Tokenizer":
        """Read a folder in Hugging Face format. chat_template: stands for the folder's own.
        ValueError: no folder, no tokenizer.json, or a broken file."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"tokenizer path {str(path)!r} holds no tokenizer.json: give a local folder in "
                "Hugging Face format; a slow tokenizer is converted by transformers' "
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
        """Highest token id plus one, added tokens included (the model's own vocabulary may be
        padded beyond it)."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def longest_token(self) -> int:
        """The most characters of a text that one token stands for: a text of more than
        `longest_token * n` characters has more than n tokens."""
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        return longest if self._backend.normalizer is None else COMPOSED_CHARS * longest

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """Text of each token that was added to the vocabulary, by id, whether it is special or not:
        delimiters such as <tool_call> are among them."""
        return {
            token_id: token.content
            for token_id, token in self._backend.get_added_tokens_decoder().items()
        }

    @cached_property
    def pieces(self) -> BytePieces | TextPieces:
        """What each single token contributes to a text; shared by all incremental detokenizers."""
        return make_pieces(self._backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. ValueError when the text is no valid Unicode. Releases the GIL, except for
        about 15 ns per token at the end."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of each text, as by `encode`; the GIL is released once for all of them."""
        return [encoding.ids for encoding in self._encodings(texts, add_special_tokens)]

    def encode_last(self, text: str, most: int, add_special_tokens: bool = True) -> list[int]:
        """The ids of `encode`, of which the text's own are cut to the last ones where there are
        more than `most`. Special tokens that stand around a text stay."""
        return self._encode_cut(text, most, add_special_tokens, "left")[-most:]

    def encode_first(self, text: str, most: int, add_special_tokens: bool = True) -> list[int]:
        """The ids of `encode`, of which the text's own are cut to the first ones where there are
        more than `most`. Special tokens that stand around a text stay."""
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
        """How many ids `encode` would give; makes none."""
        return len(self._encodings([text], add_special_tokens)[0])

    def _encodings(
        self, texts: Sequence[str], add_special_tokens: bool
    ) -> list[tokenizers.Encoding]:
        """The library's `encode` holds the GIL, which stops every other thread; this call does
        not."""
        try:
            return self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except (TypeError, UnicodeError) as error:
            raise ValueError(
                "the text holds a lone surrogate, which is no valid Unicode: send valid UTF-8"
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some ids. Releases the GIL, which the library's `decode` does not."""
        [text] = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    def vocabulary_texts(self, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary writes it, such as "Ġfox"; "" where an id is unknown."""
        return [self._backend.id_to_token(token_id) or "" for token_id in ids]

    def description(self) -> dict[str, Any]:
        """What tokenizer_config.json would say of it, JSON-ready: class, special tokens (null where
        there is none), added tokens and chat template."""
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
        """The bytes one token stands for in the middle of a text; empty when the id is unknown."""
        return self.pieces.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """One token as readable text; bytes that are no complete character show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation. continue_final_message: it ends where the last
        message's content does. ValueError: no template, bad messages, or the template refuses
        them."""
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
        """Token ids of a conversation; the template writes its own special tokens. Raises as
        `render_chat`."""
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
    """Name -> text; a token is a string or an AddedToken's dict."""
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
    """The tokenizer's eos and those of generation_config.json (without one, config.json), as in
    transformers."""
    source = folder / "generation_config.json"
    value = _read_json(source if source.is_file() else folder / "config.json").get("eos_token_id")
    ids = [] if value is None else list(value) if isinstance(value, list) else [value]
    own = backend.token_to_id(specials["eos_token"]) if "eos_token" in specials else None
    return ids if own is None else [own, *ids]


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja wins over the config's; of several named ones the one called
    "default"."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
