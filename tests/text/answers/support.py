"""Shared parts of the tests of answers: reference writers of the formats, and a function that runs
a parser over an answer that is cut somewhere.

The writers know nothing of the parsers. Each follows the chat template that its format is from.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.text.answers.formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    CallFormat,
    ReasoningFormat,
    delimiter_tokens,
)
from pdserve.text.answers.parser import AnswerParser
from pdserve.text.answers.pieces import (
    AnyPiece,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Item,
    Reasoning,
    SpecialToken,
    Syntax,
    joined,
)
from pdserve.text.answers.scan import Schemas

Call = tuple[str, str]  # name, arguments as JSON text
Writer = Callable[[Sequence[Call]], str]


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )


def hermes_arguments_first(calls: Sequence[Call]) -> str:
    return "".join(
        f'<tool_call>{{"arguments": {arguments}, "id": [1, "}}"], "name": "{name}"}}</tool_call>\n'
        for name, arguments in calls
    )


def llama(calls: Sequence[Call]) -> str:
    return "; ".join(
        f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in calls
    )


def llama_tagged(calls: Sequence[Call]) -> str:
    return "<|python_tag|>" + "\n".join(
        f'{{"type": "function", "name": "{name}", "parameters": {arguments}}}'
        for name, arguments in calls
    )


def mistral(calls: Sequence[Call]) -> str:
    inside = ", ".join(
        f'{{"name": "{name}", "arguments": {arguments}, "id": "abcDEF123"}}'
        for name, arguments in calls
    )
    return f"[TOOL_CALLS] [{inside}]"


def mistral_v11(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[CALL_ID]abcDEF123[ARGS]{a}" for n, a in calls)


def mistral_v13(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in calls)


def deepseek_v3(calls: Sequence[Call]) -> str:
    inside = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{a}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    inside = "".join(
        f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{a}<｜tool▁call▁end｜>" for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def qwen_xml(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n{_parameters(arguments)}</function>\n</tool_call>"
        for name, arguments in calls
    )


def _parameters(arguments: str) -> str:
    values = json.loads(arguments)
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
    return "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())


WRITERS: dict[str, tuple[str, Writer]] = {
    "hermes": ("hermes", hermes),
    "hermes, arguments first": ("hermes", hermes_arguments_first),
    "llama": ("llama3-json", llama),
    "llama, tag": ("llama3-json", llama_tagged),
    "mistral v3": ("mistral", mistral),
    "mistral v11": ("mistral-args", mistral_v11),
    "mistral v13": ("mistral-args", mistral_v13),
    "qwen3-coder": ("qwen3-coder", qwen_xml),
    "deepseek v3": ("deepseek-v3", deepseek_v3),
    "deepseek v3.1": ("deepseek-v3.1", deepseek_v31),
}


@dataclass
class Setting:
    """A parser to be made, once an answer."""

    calls: CallFormat | None
    reasoning: ReasoningFormat | None = None
    tools: Schemas | None = None
    starts_in_reasoning: bool = False
    parallel: bool = True
    has_tokens: bool = False  # the delimiters are tokens

    @property
    def tokens(self) -> frozenset[str]:
        if not self.has_tokens:
            return frozenset()
        everything = [token for form in CALL_FORMATS.values() for token in form.form.tokens]
        everything += [t for r in REASONING_FORMATS.values() for t in (r.begin, r.end)]
        return delimiter_tokens(self.calls, self.reasoning, everything)

    def parser(self) -> AnswerParser:
        return AnswerParser(
            self.calls,
            self.reasoning,
            starts_in_reasoning=self.starts_in_reasoning,
            tools=self.tools,
            parallel=self.parallel,
            tokens=self.tokens,
        )

    def run(self, cuts: Iterable[Sequence[Item]]) -> list[AnyPiece]:
        """All pieces, joined, of an answer that comes in several pushes."""
        parser = self.parser()
        pieces = [piece for items in cuts for piece in parser.push_all(items)]
        return joined([*pieces, *parser.finish_all()])

    def whole(self, text: str) -> list[AnyPiece]:
        return self.run([self.items(text)])

    def shown(self, text: str) -> list[AnyPiece]:
        return without_syntax(self.whole(text))

    def items(self, text: str) -> list[Item]:
        """The text with its delimiters as tokens, where they are."""
        found: list[Item] = [text]
        for token in sorted(self.tokens, key=len, reverse=True):
            found = [part for item in found for part in _split(item, token)]
        return found


def _split(item: Item, token: str) -> list[Item]:
    if isinstance(item, SpecialToken):
        return [item]
    parts: list[Item] = []
    for text in item.split(token):
        parts += [SpecialToken(token), text]
    return parts[1:]


def setting(name: str, **more: Any) -> Setting:
    return Setting(CALL_FORMATS[name], **more)


def characters(items: Sequence[Item]) -> list[Item]:
    """Cut as finely as can be."""
    return [part for item in items for part in (item if isinstance(item, str) else [item])]


def without_syntax(pieces: Sequence[AnyPiece]) -> list[AnyPiece]:
    return joined([piece for piece in pieces if not isinstance(piece, Syntax)])


def parts_of(pieces: Sequence[AnyPiece]) -> tuple[str, str, list[Call], int]:
    """(reasoning, content, calls, how many of them are complete)."""
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    calls: list[Call] = []
    ended: list[int] = []
    for piece in pieces:
        match piece:
            case CallBegin(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1 and index not in ended
                calls[-1] = calls[-1][0], calls[-1][1] + text
            case CallEnd(index):
                assert index == len(calls) - 1 and index not in ended
                ended.append(index)
    return reasoning, content, calls, len(ended)


def assert_nothing_lost(name: str, text: str, pieces: Sequence[AnyPiece]) -> None:
    """Every character is in some piece, but for "{}" that stands for arguments that were left out.
    Qwen3-Coder's arguments are made from what stands in Syntax."""
    counted = [p for p in pieces if name != "qwen3-coder" or not isinstance(p, CallArguments)]
    found = Counter("".join(getattr(piece, "text", "") for piece in counted))
    made = found - Counter(text)
    assert not Counter(text) - found
    num_empty = sum(arguments == "{}" for _, arguments in parts_of(pieces)[2])
    assert made["{"] == made["}"] <= num_empty and set(made) <= set("{}")
