"""Reasoning before the enforced part of an answer. A model may reason freely before that part.

    [begin] free text end    then what the grammar says

`tools` calls this module, and so does `probe` for requests that ask for a form.
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
    """The reasoning that may stand before an answer's enforced part."""

    format: ReasoningFormat | None = None  # None: the model does not reason
    # True: the prompt opened the reasoning, so the answer starts inside it. False: it is optional.
    is_open: bool = False
    # ids of the delimiters that are special tokens of the vocabulary; others are text
    token_ids: Mapping[str, int] = field(default_factory=dict)

    @property
    def shortest(self) -> list[str]:
        """The delimiters that a reasoning answer has, in order."""
        if self.format is None:
            return []
        return [self.format.end] if self.is_open else [self.format.begin, self.format.end]

    @property
    def opening(self) -> str:
        """The text with which free text must not begin, because it would open reasoning. "": there
        is none."""
        if self.format is None or self.is_open or self.format.begin in self.token_ids:
            return ""
        return self.format.begin

    def before(self, body: str) -> list[str]:
        """Returns lines of Lark for reasoning and then `body`. The first line is the rule `start`.
        The others use the names think, rest, thought, THOUGHT and SPACE."""
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
    """Returns the grammar with reasoning before it if the model reasons. Input and output have the
    form of `grammar_of`: Lark, or JSON with several grammars.

    - call_rules: Rules of `calls` (`tools.call_rules`), which are allowed instead of the grammar's
      text. (): calls are not allowed.
    """
    if prefix.format is None and not call_rules:
        return grammar
    lines = [*prefix.before("@answer | calls" if call_rules else "@answer"), *call_rules]
    top: dict[str, Any] = {"name": "top", "lark_grammar": "\n".join(lines)}
    first, *others = _grammars(grammar)
    grammars = [top, {**first, "name": "answer"}, *others]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _grammars(text: str) -> list[dict[str, Any]]:
    """Returns the grammars in JSON with several, or the one that is Lark."""
    if text.startswith('{"grammars"'):
        with contextlib.suppress(ValueError):
            found: list[dict[str, Any]] = json.loads(text)["grammars"]
            return found
    return [{"lark_grammar": text}]
