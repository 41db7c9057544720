"""Makes the grammar of a turn's answer: calls in the form of the model, with the tools' schemas.

`text.grammars` writes the grammar, and workers with a grammar engine enforce it. Knows no workers:
callers say whether there is such an engine. Called by `turns.model_turns`.
"""

from collections.abc import Mapping
from typing import Literal

from pdserve.text.answers.formats import CallFormat, ReasoningFormat
from pdserve.text.grammars.tools import call_rules, tool_parts, tools_grammar
from pdserve.turns.turn import Turn

RULE = "grammar"
Enforcement = Literal["schema", "syntax", "off"]


def call_rules_of(
    turn: Turn, calls: CallFormat, enforcement: Enforcement, token_ids: Mapping[str, int]
) -> tuple[str, ...]:
    """Returns the rules of calls that may come instead of content with a form.

    They are enforced even if `enforcement` is off, because the form is. Raises a ValueError that
    names the tool and the cure.
    """
    return call_rules(
        calls.form,
        turn.tools,
        turn.parallel_tool_calls,
        "syntax" if enforcement == "off" else enforcement,
        token_ids,
        turn.tool_places,
    )


def parts_of(
    turn: Turn, calls: CallFormat, enforcement: Enforcement, token_ids: Mapping[str, int]
) -> tuple[tuple[str, str], ...]:
    """Returns for each tool that may be called its place and name, and a grammar of it alone
    (`text.grammars.tools`)."""
    return tool_parts(
        calls.form,
        turn.tools,
        turn.openai_choice,
        "syntax" if enforcement == "off" else enforcement,
        token_ids,
        turn.tool_places,
    )


def grammar_of(
    turn: Turn,
    calls: CallFormat,
    reasoning: ReasoningFormat | None,
    starts_in_reasoning: bool,
    enforcement: Enforcement,
    token_ids: Mapping[str, int],
) -> str:
    """Returns the grammar of the answer; "" if nothing is to be enforced.

    A call that must be made is enforced even if `enforcement` is off. `token_ids` are those of the
    delimiters that are tokens. Raises a ValueError that names the tool and the cure.
    """
    if turn.must_call and enforcement == "off":
        enforcement = "syntax"
    return tools_grammar(
        calls.form,
        turn.tools,
        turn.openai_choice,
        turn.parallel_tool_calls,
        reasoning,
        starts_in_reasoning=starts_in_reasoning,
        enforce=enforcement,
        token_ids=token_ids,
        places=turn.tool_places,
    )
