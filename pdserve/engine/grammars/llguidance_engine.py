"""Implements the protocols of `grammar` with llguidance. Texts are Lark, or what
`llguidance.LLMatcher.grammar_from_json_schema` and its sisters return.

Every call that takes long releases the GIL. Knows no requests. Made by `builder`, in a thread.
"""

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pdserve.engine.grammars.grammar import GrammarFailed
from pdserve.text.tokenizer import Tokenizer

_SHOWN = 500  # characters of an error that are shown
_SMOKE = 'start: "a" | "b"'


class LLGuidanceEngine:
    """A GrammarEngine with llguidance's default limits, which end a build after about a second."""

    def __init__(self, tokenizer_json: str, eos_token_ids: Sequence[int]) -> None:
        """ValueError if llguidance cannot use the tokenizer: it is tried on a small grammar."""
        self.name = f"llguidance {importlib.metadata.version('llguidance')}"
        self.eos_token_ids = tuple(eos_token_ids)
        self._tokenizer = LLTokenizer(tokenizer_json, eos_token=list(eos_token_ids) or None)
        # verbose errors would put text that a client sent into the log
        self._limits = LLParserLimits(verbose_errors=False)
        self.build(_SMOKE)

    @classmethod
    def load(cls, folder: str | Path, eos_token_ids: Sequence[int]) -> "LLGuidanceEngine":
        """Read the tokenizer of a folder in Hugging Face format. eos_token_ids: the model's; those
        of the tokenizer are added. ValueError if tokenizer.json is missing or cannot be used."""
        tokenizer = Tokenizer.load(folder)
        ids = dict.fromkeys((*eos_token_ids, *tokenizer.eos_token_ids))
        return cls((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"), tuple(ids))

    def build(self, text: str) -> "LLGuidanceGrammar":
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        grammar = LLGuidanceGrammar(matcher, self.eos_token_ids)
        if matcher.is_error():
            raise ValueError(_shown(matcher.get_error()))
        mask = np.zeros(-(-self._tokenizer.vocab_size // 32), dtype=np.uint32)
        try:
            # this call also fills what all copies share
            grammar.fill(mask)
        except GrammarFailed as error:
            raise ValueError(str(error)) from error
        if not mask.any() and not grammar.is_accepting():
            raise ValueError("nothing can match it")
        return grammar


class LLGuidanceGrammar:
    """A Grammar. Its matcher never gets an end of sequence: the caller decides when it ends."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: tuple[int, ...]) -> None:
        self.eos_token_ids = eos_token_ids
        self._matcher = matcher

    def copy(self) -> "LLGuidanceGrammar":
        return LLGuidanceGrammar(self._matcher.deep_copy(), self.eos_token_ids)

    def advance(self, token_id: int) -> bool:
        # the matcher would count an end of sequence among the tokens that it takes
        return (
            token_id not in self.eos_token_ids and self._matcher.try_consume_tokens([token_id]) == 1
        )

    def is_accepting(self) -> bool:
        return self._matcher.is_accepting()

    def fill(self, mask: np.ndarray) -> None:
        mask.fill(0)
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            # "nothing can follow" is not a failure: the mask stays empty
            error = self._matcher.get_error()
            if "NoExtension" in error:
                return
            raise GrammarFailed(_shown(error))
        own = np.frombuffer(bits, dtype=np.uint32)[: len(mask)]
        mask[: len(own)] = own
        for token in self.eos_token_ids:
            if token < 32 * len(mask):
                mask[token // 32] &= ~np.uint32(1 << token % 32)


def _shown(error: str) -> str:
    """Returns the first line that says something."""
    if error.startswith("panic"):
        return "it is too large"
    lines = [line.strip() for line in error.split("<state>")[0].splitlines() if line.strip()]
    return (lines[0] if lines else "it cannot be read")[:_SHOWN]
