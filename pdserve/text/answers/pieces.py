"""The input and output of an answer parser: items and pieces.

An item is detokenised text, cut anywhere, or a `SpecialToken`. A `SpecialToken` is a delimiter that
is one token of the vocabulary, so text that only spells it is no delimiter. A piece is text with
its kind. Pieces are msgspec types, because routers send them to Python clients. This module knows
no format.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeVar

import msgspec
from msgspec.structs import replace


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """One special token in the answer. `text` is written as in the tokenizer, for example
    "[TOOL_CALLS]"."""

    text: str


Item = str | SpecialToken


class Reasoning(msgspec.Struct, frozen=True, tag="reasoning"):
    text: str


class Content(msgspec.Struct, frozen=True, tag="content"):
    text: str


class CallBegin(msgspec.Struct, frozen=True, tag="call"):
    """A call begins, and its name is known.

    - index: Number of the call in the answer, from 0.
    - id: The id by which a tool's message refers to the call. Parsers leave it empty, and
      `text.answer_text` sets it.
    """

    index: int
    name: str
    id: str = ""


class CallArguments(msgspec.Struct, frozen=True, tag="arguments"):
    """More of the arguments of the call that was begun last."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, tag="end"):
    """The call is complete: its arguments are closed. A call that is cut off or broken has no
    CallEnd. Without a grammar, the arguments need not be valid JSON or fit the schema."""

    index: int


class Syntax(msgspec.Struct, frozen=True, tag="syntax"):
    """Characters that only give the answer its form, such as delimiters, braces and the whitespace
    around them. Clients do not see them. Tests use them to account for every character."""

    text: str


Piece = Reasoning | Content | CallBegin | CallArguments | CallEnd
AnyPiece = Piece | Syntax


P = TypeVar("P", Piece, AnyPiece)
R = TypeVar("R", bound=str)


def joined(pieces: Iterable[P]) -> list[P]:
    """Joins neighbouring pieces of one kind. The result does not depend on how the answer was
    cut."""
    pieces = list(pieces)
    if len(pieces) < 2:  # the usual case: a token seldom makes more than one piece
        return pieces
    result: list[P] = []
    for _, group in groupby(pieces, key=_kind):
        first, *others = group
        if others and isinstance(first, Reasoning | Content | CallArguments | Syntax):
            texts = [first.text, *(getattr(other, "text", "") for other in others)]
            result.append(replace(first, text="".join(texts)))
        else:
            result += [first, *others]
    return result


class ToolCall(msgspec.Struct, frozen=True):
    """One tool call of a complete answer.

    - arguments: The arguments as the model wrote them.
    - is_complete: True if the arguments are closed.
    """

    id: str
    name: str
    arguments: str
    is_complete: bool


def calls_of(pieces: Iterable[Piece]) -> list[ToolCall]:
    """Returns the calls of an answer, in order."""
    calls: list[ToolCall] = []
    texts: list[list[str]] = []
    for piece in pieces:
        match piece:
            case CallBegin():
                calls.append(ToolCall(piece.id, piece.name, "", False))
                texts.append([])
            case CallArguments():
                texts[piece.index].append(piece.text)
            case CallEnd():
                calls[piece.index] = replace(calls[piece.index], is_complete=True)
    return [
        replace(call, arguments="".join(parts)) for call, parts in zip(calls, texts, strict=True)
    ]


def reasoning_of(pieces: Iterable[Piece]) -> str:
    """Returns the reasoning of an answer, or "" if there is none."""
    return "".join([piece.text for piece in pieces if isinstance(piece, Reasoning)])


def content_of(pieces: Iterable[Piece]) -> str:
    """Returns the content of an answer, without reasoning and calls."""
    return "".join([piece.text for piece in pieces if isinstance(piece, Content)])


def content_pieces(text: str) -> tuple[Piece, ...]:
    """Returns the pieces of a text that is all content."""
    return (Content(text),) if text else ()


def _kind(piece: AnyPiece) -> tuple[type[AnyPiece], int]:
    return type(piece), getattr(piece, "index", 0)


def finish_reason(
    reason: R, num_complete_calls: int, is_named_choice: bool = False
) -> R | Literal["tool_calls"]:
    """Returns OpenAI's finish_reason. It is "tool_calls" only if the generation stopped by itself
    and has a complete call.

    - reason: Why the generation ended ("stop", "length", ...).
    - is_named_choice: True if the request named the function to call. OpenAI then says "stop".
    """
    if reason == "stop" and num_complete_calls and not is_named_choice:
        return "tool_calls"
    return reason
