"""The mix of documents on which the demo model is trained.

This module decides the shares and fills a length. The texts come from demo/data.py (recall and
small talk) and demo/chats (the rest). demo/rows.py and demo/tokenizer.py call it.
"""

import random
from collections.abc import Callable

from demo.chats.objects import object_document
from demo.chats.thinking import thinking_chat
from demo.chats.tool_chat import JSON_TOKENS, tool_chat
from demo.data import (
    BOS,
    EOS,
    arithmetic,
    chat,
    estimate_tokens,
    json_extraction,
    recall_chat,
    recall_document,
    story,
)
from demo.words import pick

SKILLS_SHARE = 0.2


def short_document(rng: random.Random) -> str:
    """Draws one document without recall, tools and drawn keys. It ends as the model should end
    it."""
    kind = pick(rng, (story, arithmetic, json_extraction, chat, chat))
    return kind(rng) + ("" if kind is chat else EOS)


def skill_document(rng: random.Random, num_tokens: int) -> str:
    """Draws a chat with tools of at most about `num_tokens` tokens, or JSON with drawn keys, or
    reasoning."""
    draw = rng.random()
    if draw < 0.2 or num_tokens < 150:
        return object_document(rng)
    if draw < 0.35:
        return thinking_chat(rng)
    return tool_chat(rng, num_tokens)


def document(
    rng: random.Random,
    num_tokens: int,
    recall_share: float,
    skills_share: float = SKILLS_SHARE,
) -> str:
    """Draws training text of about `num_tokens` tokens, without the leading <|bos|>.

    It is skills with probability `skills_share`, else recall with probability `recall_share`, else
    several short documents.
    """
    if rng.random() < skills_share:
        return _filled(num_tokens, JSON_TOKENS, lambda room: skill_document(rng, room))
    draw = rng.random()
    if draw < 0.2 * recall_share:
        return recall_chat(rng, num_tokens)
    if draw < recall_share:
        return recall_document(rng, num_tokens)
    return _filled(num_tokens, 1.0, lambda room: short_document(rng))


def _filled(num_tokens: int, scale: float, make: Callable[[int], str]) -> str:
    """Joins documents until `num_tokens` tokens are full.

    - make: Makes a document from the number of tokens that are left.
    - scale: Tokens per token that `estimate_tokens` counts.
    """
    pieces: list[str] = []
    length = 0.0
    while length < num_tokens:
        pieces.append(make(int(num_tokens - length)))
        length += estimate_tokens(pieces[-1]) * scale
    return BOS.join(pieces)
