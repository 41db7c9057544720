"""Windows: a text cut into prompts that overlap, so that every token is judged with text before it.

A model that was trained on whole texts is at a loss in the first tokens of one that begins in the
middle of a sentence, and there a change of its weights or rows shows far beyond what it does in
use: with the demo's text, a third of the whole divergence stood in the first 16 of 2,048 tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

CONTEXT = 128  # tokens before the first that is judged, but for the beginning of the text


@dataclass(frozen=True)
class Window:
    """ids: of a prompt. first: the position from which it is judged."""

    ids: list[int]
    first: int = 0


def windows_of(ids: Sequence[int], length: int) -> list[Window]:
    """Cut a text of at least one token into windows of at most `length` >= 2 tokens, in which each
    token is judged once."""
    context = min(CONTEXT, length // 2)
    windows = [Window(list(ids[:length]))]
    for end in range(length, len(ids), length - context):
        windows.append(Window(list(ids[end - context : end - context + length]), context))
    return windows
