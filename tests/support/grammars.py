"""A GrammarEngine of the tests whose builds take as long as the test says, and a grammar for the
demo model."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher
from support.tiny_models import DEMO

from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.engine.grammars.builder import GrammarBuilder
from pdserve.engine.grammars.grammar import Grammar, GrammarFailed
from pdserve.engine.grammars.make import grammar_builder
from pdserve.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Tom", "Mira"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def json_grammar() -> str:
    """Returns the grammar of SCHEMA, without white space between its parts."""
    return LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})


def assert_follows_schema(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"name", "age", "tags"}
    assert value["name"] in ("Tom", "Mira") and 0 <= value["age"] <= 999
    assert len(value["tags"]) <= 3 and all(isinstance(tag, bool) for tag in value["tags"])


def demo_builder(folder: Path = DEMO, **config: float) -> GrammarBuilder:
    return grammar_builder(ModelConfig(path=str(folder)), EngineConfig(**config))


def demo_tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


class ListedGrammar:
    """Allows at each position the tokens that a list has for it, and accepts behind the last."""

    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, allowed: list[list[int]], position: int = 0) -> None:
        self._allowed = allowed
        self._position = position

    def copy(self) -> "ListedGrammar":
        return ListedGrammar(self._allowed, self._position)

    def advance(self, token_id: int) -> bool:
        if self.is_accepting() or token_id not in self._allowed[self._position]:
            return False
        self._position += 1
        return True

    def is_accepting(self) -> bool:
        return self._position == len(self._allowed)

    def fill(self, mask: np.ndarray) -> None:
        mask.fill(0)
        if not self.is_accepting():
            for token in self._allowed[self._position]:
                mask[token // 32] |= np.uint32(1 << token % 32)

    def fill_all(
        self, grammars: Sequence[Grammar], masks: np.ndarray
    ) -> list[GrammarFailed | None]:
        failures: list[GrammarFailed | None] = []
        for grammar, mask in zip(grammars, masks, strict=True):
            try:
                grammar.fill(mask)
                failures.append(None)
            except GrammarFailed as failure:
                failures.append(failure)
        return failures


class ListedGrammars:
    """Builds grammars from JSON lists of lists of token ids. A text that begins with "!" waits for
    `go`, and "?" raises."""

    name = "listed 1"

    def __init__(self) -> None:
        self.go = threading.Event()
        self.built: list[str] = []

    def build(self, text: str) -> ListedGrammar:
        self.built.append(text)
        if text.startswith("!"):
            assert self.go.wait(60), "the test never lets it go on"
        if text.startswith("?"):
            raise ValueError("it has a question mark.")
        return ListedGrammar(json.loads(text.lstrip("!")))
