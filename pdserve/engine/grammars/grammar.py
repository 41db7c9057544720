"""The protocols that the engine needs of a grammar, whichever library implements them.

A grammar is built once from its text, as a prototype that stays at its first token. Each choice
advances a copy. Implemented by `llguidance_engine`; called by the sampler's host half and by
`builder`.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class GrammarFailed(Exception):
    """A grammar cannot continue because it met a limit of its library. The message says which."""


class Grammar(Protocol):
    """The position of one choice in a grammar. Not thread-safe. eos_token_ids: all tokens that end
    a sequence, according to model and tokenizer."""

    eos_token_ids: tuple[int, ...]

    def copy(self) -> "Grammar":
        """Make another one at the same position, which advances independently."""

    def advance(self, token_id: int) -> bool:
        """Advance by one token. Returns False, and changes nothing, if it is not allowed."""

    def is_accepting(self) -> bool:
        """True if the tokens so far are a complete answer."""

    def fill(self, mask: np.ndarray) -> None:
        """Write which tokens may come next to uint32 `[words]`: bit t % 32 of word t // 32 is token
        t. Ends of sequence are never among them, because `is_accepting` decides about those. Raises
        GrammarFailed."""

    def fill_all(
        self, grammars: Sequence["Grammar"], masks: np.ndarray
    ) -> list[GrammarFailed | None]:
        """Same as `fill` for different grammars of this class at once: row i of masks, uint32
        `[grammars, words]`, is for grammar i. Takes less time than a call for each. Returns for
        each what `fill` would have raised."""


class GrammarEngine(Protocol):
    """Builds grammars for one tokenizer. Thread-safe. name: library and version, such as
    "llguidance 1.9.1"."""

    name: str

    def build(self, text: str) -> Grammar:
        """Returns the prototype of a grammar. ValueError says what is wrong with the text."""
