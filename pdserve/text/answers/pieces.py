"""What goes into an answer parser and what comes out: items and pieces.

An item is detokenised text, cut anywhere, or a `SpecialToken`: a delimiter that is one token of the
vocabulary, so that text which only spells it is no delimiter. Pieces say what the text is; they are
msgspec types, because they go from routers to Python clients. Knows no format.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeVar

import msgspec
from msgspec.structs import replace


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """One token of the vocabulary that stands in the answer; text: as the tokenizer writes it,
    for example "[TOOL_CALLS]"."""

    text: str


Item = str | SpecialToken


class Reasoning(msgspec.Struct, frozen=True, tag="reasoning"):
    text: str


class Content(msgspec.Struct, frozen=True, tag="content"):
    text: str


class CallBegin(msgspec.Struct, frozen=True, tag="call"):
    """The name of a call is known. index: 0 for the answer's first call, and so on. id: what
    clients name the call by in a tool's message; parsers leave it empty, `text.answer_text` makes
    it."""

    index: int
    name: str
    id: str = ""


class CallArguments(msgspec.Struct, frozen=True, tag="arguments"):
    """More of the arguments of the call that was begun last."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, tag="end"):
    """The call is complete: its arguments are closed. A call that is cut off or broken gets none.
    Without a grammar nobody promises that the arguments are valid JSON or fit the schema."""

    index: int


class Syntax(msgspec.Struct, frozen=True, tag="syntax"):
    """Characters of the answer that only give it its form, such as delimiters, braces and the
    whitespace around them. Not shown; tests account for every character with it."""

    text: str


Piece = Reasoning | Content | CallBegin | CallArguments | CallEnd
AnyPiece = Piece | Syntax


P = TypeVar("P", Piece, AnyPiece)
R = TypeVar("R", bound=str)


def joined(pieces: Iterable[P]) -> list[P]:
    """The same pieces with neighbours of one kind put together: what does not depend on how the
    answer was cut."""
    pieces = list(pieces)
    if len(pieces) < 2:  # a token seldom makes more
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
    """One call of a tool in a whole answer. arguments: as the model wrote them. is_complete: its
    arguments are closed."""

    id: str
    name: str
    arguments: str
    is_complete: bool


def calls_of(pieces: Iterable[Piece]) -> list[ToolCall]:
    """The calls of an answer, in order."""
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
    """The reasoning of an answer; "" when there is none."""
    return "".join([piece.text for piece in pieces if isinstance(piece, Reasoning)])


def content_of(pieces: Iterable[Piece]) -> str:
    """What the user reads of an answer, without reasoning and calls."""
    return "".join([piece.text for piece in pieces if isinstance(piece, Content)])


def content_pieces(text: str) -> tuple[Piece, ...]:
    """The pieces of a text that is all content."""
    return (Content(text),) if text else ()


def _kind(piece: AnyPiece) -> tuple[type[AnyPiece], int]:
    return type(piece), getattr(piece, "index", 0)


def finish_reason(
    reason: R, num_complete_calls: int, is_named_choice: bool = False
) -> R | Literal["tool_calls"]:
    """OpenAI's finish_reason. reason: what ended the generation ("stop", "length", ...);
    is_named_choice: the request named the function to call, for which OpenAI says "stop". Only a
    generation that stopped by itself and holds a complete call says "tool_calls"."""
    if reason == "stop" and num_complete_calls and not is_named_choice:
        return "tool_calls"
    return reason
