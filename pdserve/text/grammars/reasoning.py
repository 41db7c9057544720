"""Reasoning before what a grammar enforces: a model that reasons does so freely first.

    [begin] free text end    then what the grammar says

Called by `tools`, and by `probe` for requests that ask for a form.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.text.answers.formats import ReasoningFormat
from pdserve.text.grammars import lark

MAX_SPACE = 4  # spaces and line breaks between the end of reasoning and the body
_SPACE = f"/[ \\n]{{0,{MAX_SPACE}}}/"


@dataclass(frozen=True)
class ReasoningPrefix:
    """format: None: the model does not reason. is_open: the prompt opened it, so the answer starts
    inside; else it may stand first. token_ids: ids of the delimiters that are special tokens of the
    vocabulary; others are text."""

    format: ReasoningFormat | None = None
    is_open: bool = False
    token_ids: Mapping[str, int] = field(default_factory=dict)

    @property
    def shortest(self) -> list[str]:
        """The delimiters of an answer that reasons, in order."""
        if self.format is None:
            return []
        return [self.format.end] if self.is_open else [self.format.begin, self.format.end]

    @property
    def opening(self) -> str:
        """Text that free text must not begin with, since it would open reasoning; "" for none."""
        if self.format is None or self.is_open or self.format.begin in self.token_ids:
            return ""
        return self.format.begin

    def before(self, body: str) -> list[str]:
        """Lines of Lark, of which the first is `start`: reasoning, then `body`. Their names are
        think, rest, thought, THOUGHT and SPACE."""
        reasoning, ids = self.format, self.token_ids
        if reasoning is None:
            return [f"start: {body}"]
        first = "rest" if self.is_open else "think?"
        lines = [f"start: {first} ({body})", f"THOUGHT: {lark.without()}", f"SPACE: {_SPACE}"]
        if reasoning.end in ids:
            lines.append(f"rest: THOUGHT {lark.delimiter(reasoning.end, ids)} SPACE")
        else:
            lines.append(f"thought[lazy]: THOUGHT {lark.string(reasoning.end)}")
            lines.append("rest: thought SPACE")
        if not self.is_open:
            lines.append(f"think: {lark.delimiter(reasoning.begin, ids)} rest")
        return lines


NO_REASONING = ReasoningPrefix()


def after_reasoning(grammar: str, prefix: ReasoningPrefix, call_rules: Sequence[str] = ()) -> str:
    """The grammar, with reasoning before it where the model reasons. Takes and gives what
    `grammar_of` gives: Lark, or JSON with several grammars. call_rules: of `calls`
    (`tools.call_rules`), which may come instead of what the grammar allows; (): they may not."""
    if prefix.format is None and not call_rules:
        return grammar
    lines = [*prefix.before("@answer | calls" if call_rules else "@answer"), *call_rules]
    top: dict[str, Any] = {"name": "top", "lark_grammar": "\n".join(lines)}
    first, *others = _grammars(grammar)
    grammars = [top, {**first, "name": "answer"}, *others]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _grammars(text: str) -> list[dict[str, Any]]:
    """The grammars of JSON with several, or the one that is Lark."""
    if text.startswith('{"grammars"'):
        with contextlib.suppress(ValueError):
            found: list[dict[str, Any]] = json.loads(text)["grammars"]
            return found
    return [{"lark_grammar": text}]
