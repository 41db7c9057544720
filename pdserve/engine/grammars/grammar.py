"""What the engine asks of a grammar, whichever library is behind it.

A grammar is built once from its text, as a prototype that stays at its first token; each choice
advances a copy. Implemented by `llguidance_engine`; asked by the sampler's host half and by
`builder`.
"""

from typing import Protocol

import numpy as np


class GrammarFailed(Exception):
    """A grammar cannot go on: it met a limit of its library. The message says which."""


class Grammar(Protocol):
    """The position of one choice in a grammar. Not thread-safe. eos_token_ids: all that end a
    sequence, by model and tokenizer."""

    eos_token_ids: tuple[int, ...]

    def copy(self) -> "Grammar":
        """Another one at the same position, which advances alone."""

    def advance(self, token_id: int) -> bool:
        """Go on by one token. False, and no change, if the grammar does not allow it."""

    def is_accepting(self) -> bool:
        """Whether what came so far is a whole answer."""

    def fill(self, mask: np.ndarray) -> None:
        """Write which tokens may come next to uint32 `[words]`: bit t % 32 of word t // 32 is token
        t. Ends of sequence are never among them: they may come where `is_accepting`. Raises
        GrammarFailed."""


class GrammarEngine(Protocol):
    """Builds grammars for one tokenizer. Thread-safe.

    name: library and version, as in "llguidance 1.9.1".
    """

    name: str

    def build(self, text: str) -> Grammar:
        """The prototype of a grammar. ValueError says what is wrong with the text."""
