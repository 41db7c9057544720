"""How the answers of one request are read: the format of calls, the reasoning format, the tools.

All choices share one AnswerReading, and each choice has a parser of its own. `turns.model_turns`
makes it. The router and `LLM` pass it to `text.answer_text`. This module knows no tokenizer: token
ids are plain numbers.
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
    """The settings that the parsers of one request share."""

    calls: CallFormat | None = None  # None: no tool may be called.
    reasoning: ReasoningFormat | None = None  # None: the answer cannot reason.
    starts_in_reasoning: bool = False  # True: the prompt opened the reasoning.
    tools: Schemas = field(default_factory=dict)  # JSON schemas of the request's functions.
    parallel: bool = True  # False keeps only the first call.
    # Text of each delimiter that is one token of the vocabulary, by token id.
    delimiters: Mapping[int, str] = field(default_factory=dict)

    def parser(self) -> AnswerParser:
        """Makes the parser of one choice."""
        return AnswerParser(
            self.calls,
            self.reasoning,
            starts_in_reasoning=self.starts_in_reasoning,
            tools=self.tools,
            parallel=self.parallel,
            tokens=frozenset(self.delimiters.values()),
        )

    def new_call_id(self) -> str:
        """Makes a random id for one call. The templates of Mistral's models get the id back in the
        next turn, and they accept only nine letters and digits."""
        if self.calls is not None and self.calls.name.startswith("mistral"):
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"
