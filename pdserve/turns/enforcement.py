"""The grammar of a turn's answer: calls in the form of the model, with the tools' schemas.

`text.grammars` writes the grammar, workers with a grammar engine keep to it. Knows no workers:
callers say whether there is such an engine. Called by `turns.model_turns`.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Literal

from pdserve.protocol.logit_rules import RULES
from pdserve.text.answers.formats import CallFormat, ReasoningFormat
from pdserve.turns.turn import Turn

RULE = "grammar"
Enforcement = Literal["schema", "syntax", "off"]


def tools_grammar() -> Callable[..., str] | None:
    """`text.grammars.tools.tools_grammar`; None where this build has none. The package needs
    llguidance, which a process that enforces nothing does without."""
    try:
        found: Callable[..., str] = import_module("pdserve.text.grammars.tools").tools_grammar
    except ImportError:
        return None
    return found


def is_possible() -> bool:
    """Whether grammars can be written here, and sent to an engine."""
    return RULE in RULES and tools_grammar() is not None


def grammar_of(
    turn: Turn,
    calls: CallFormat,
    reasoning: ReasoningFormat | None,
    starts_in_reasoning: bool,
    enforcement: Enforcement,
    token_ids: Mapping[str, int],
) -> str:
    """What the answer must look like; "" when nothing is to be enforced. A call that must be made
    is enforced whatever `enforcement` says. token_ids: of the delimiters that are tokens.
    ValueError names the tool and the cure."""
    write = tools_grammar()
    assert write is not None
    if turn.must_call and enforcement == "off":
        enforcement = "syntax"
    return write(
        calls.form,
        turn.tools,
        turn.openai_choice,
        turn.parallel_tool_calls,
        reasoning,
        starts_in_reasoning=starts_in_reasoning,
        enforce=enforcement,
        token_ids=token_ids,
    )
