"""Implements the protocols of `grammar` with llguidance. Texts are Lark, or what
`llguidance.LLMatcher.grammar_from_json_schema` and its sisters return.

Every call that takes long releases the GIL. Knows no requests. Made by `builder`, in a thread.
"""

import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from pdserve.engine.grammars.grammar import Grammar, GrammarFailed
from pdserve.text.tokenizer import Tokenizer

_SHOWN = 500  # characters of an error that are shown
_NUM_THREADS = min(8, max(1, (os.cpu_count() or 1) // 2))  # of the library, for masks
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
        self._executor = LLExecutor(_NUM_THREADS)
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
        num_words = -(-self._tokenizer.vocab_size // 32)
        grammar = LLGuidanceGrammar(matcher, self.eos_token_ids, self._executor, num_words)
        if matcher.is_error():
            raise ValueError(_shown(matcher.get_error()))
        mask = np.zeros(num_words, dtype=np.uint32)
        try:
            # this call also fills what all copies share
            grammar.fill(mask)
        except GrammarFailed as error:
            raise ValueError(str(error)) from error
        if not mask.any() and not grammar.is_accepting():
            raise ValueError("nothing can match it")
        return grammar


class LLGuidanceGrammar:
    """A Grammar. Its matcher never gets an end of sequence: the caller decides when it ends.

    executor: computes many masks at once, without the GIL.
    num_words: number of words of the tokenizer's masks.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        eos_token_ids: tuple[int, ...],
        executor: LLExecutor,
        num_words: int,
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self._matcher = matcher
        self._executor = executor
        self._num_words = num_words

    def copy(self) -> "LLGuidanceGrammar":
        copied = self._matcher.deep_copy()
        return LLGuidanceGrammar(copied, self.eos_token_ids, self._executor, self._num_words)

    def advance(self, token_id: int) -> bool:
        # the matcher would count an end of sequence among the tokens that it takes
        return (
            token_id not in self.eos_token_ids and self._matcher.try_consume_tokens([token_id]) == 1
        )

    def is_accepting(self) -> bool:
        return self._matcher.is_accepting()

    def fill(self, mask: np.ndarray) -> None:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        self._take(bits[None], mask[None])
        if failure := self._clear_if_ended(mask):
            raise failure

    def fill_all(
        self, grammars: Sequence[Grammar], masks: np.ndarray
    ) -> list[GrammarFailed | None]:
        own = [grammar for grammar in grammars if isinstance(grammar, LLGuidanceGrammar)]
        assert len(own) == len(grammars), "grammars of another class"
        matchers = [(grammar._matcher, row) for row, grammar in enumerate(own)]
        bits = np.zeros((len(own), self._num_words), dtype=np.uint32)
        # One call for all rows: a thread waits up to 5 ms each time that it takes the GIL back.
        self._executor.unsafe_compute_mask_ptr(
            matchers, bits.ctypes.data, 4 * self._num_words, len(own)
        )
        self._take(bits, masks)
        return [grammar._clear_if_ended(mask) for grammar, mask in zip(own, masks, strict=True)]

    def _take(self, bits: np.ndarray, masks: np.ndarray) -> None:
        """Write the library's masks `[rows, its words]` to `[rows, words]`, without ends."""
        width = min(bits.shape[1], masks.shape[1])
        masks[:, width:] = 0
        masks[:, :width] = bits[:, :width]
        for token in self.eos_token_ids:
            if token < 32 * masks.shape[1]:
                masks[:, token // 32] &= ~np.uint32(1 << token % 32)

    def _clear_if_ended(self, mask: np.ndarray) -> GrammarFailed | None:
        """Clear the mask if the matcher has ended. Returns the limit that it met, if that was why,
        and not that nothing can follow."""
        if not self._matcher.is_error():
            return None
        mask.fill(0)
        error = self._matcher.get_error()
        return None if "NoExtension" in error else GrammarFailed(_shown(error))


def _shown(error: str) -> str:
    """Returns the first line that says something."""
    if error.startswith("panic"):
        return "it is too large"
    lines = [line.strip() for line in error.split("<state>")[0].splitlines() if line.strip()]
    return (lines[0] if lines else "it cannot be read")[:_SHOWN]
