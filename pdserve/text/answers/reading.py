"""How the answers of one request are read: which format of calls, which reasoning, which tools.

The same for all choices; each choice has a parser of its own. Made by `turns.model_turns`, carried
through the router and `LLM` to `text.answer_text`. Knows no tokenizer: ids of tokens are numbers.
"""

import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.text.answers.formats import CallFormat, ReasoningFormat
from pdserve.text.answers.parser import AnswerParser
from pdserve.text.answers.scan import Schemas

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """calls: None when no tool may be called. reasoning: None when the answer cannot reason.
    starts_in_reasoning: the prompt opened it. tools: JSON schemas of the request's functions.
    parallel: False keeps the first call alone. delimiters: text of each delimiter that is one token
    of the vocabulary, by its id."""

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    starts_in_reasoning: bool = False
    tools: Schemas = field(default_factory=dict)
    parallel: bool = True
    delimiters: Mapping[int, str] = field(default_factory=dict)

    def parser(self) -> AnswerParser:
        """The parser of one choice."""
        return AnswerParser(
            self.calls,
            self.reasoning,
            starts_in_reasoning=self.starts_in_reasoning,
            tools=self.tools,
            parallel=self.parallel,
            tokens=frozenset(self.delimiters.values()),
        )

    def new_call_id(self) -> str:
        """A random id for one call. Templates of Mistral's models refuse all but nine letters and
        digits, and get the id back in the next turn."""
        if self.calls is not None and self.calls.name.startswith("mistral"):
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"
