"""The turns of one model: what of a turn it can do, its prompt, and how its answer is read.

The formats of calls and of reasoning are found once, from the chat template and the vocabulary
(docs/use/tools.md). A turn goes through

    check -> render -> reading and rules -> (the answer's tokens, by `text.answer_text`) -> pieces

Knows no HTTP and no workers. The router and `LLM` make one per model; it is thread-safe.
"""

from collections.abc import Mapping
from typing import Any

from pdserve.protocol.logit_rules import RULES
from pdserve.text.answers.formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    CallFormat,
    ReasoningFormat,
    delimiter_tokens,
    format_of,
    reasoning_format_of,
)
from pdserve.text.answers.reading import AnswerReading
from pdserve.text.chat_messages import text_of
from pdserve.text.grammars.reasoning import ReasoningPrefix
from pdserve.text.tokenizer import Tokenizer
from pdserve.turns import enforcement
from pdserve.turns.enforcement import Enforcement
from pdserve.turns.turn import Turn

BUDGET_RULE = "thinking_budget"


class ModelTurns:
    def __init__(
        self,
        tokenizer: Tokenizer,
        tool_format: str = "auto",
        reasoning_format: str = "auto",
        tool_enforcement: Enforcement = "schema",
    ) -> None:
        """Finds the model's formats; the arguments after the tokenizer are as in ModelConfig.

        Raises ValueError for an unknown format.
        """
        self._tokenizer = tokenizer
        template = tokenizer.template.source if tokenizer.template is not None else None
        tokens = tokenizer.added_tokens.values()
        calls = _found(tool_format, format_of, template, tokens)
        reasoning = _found(reasoning_format, reasoning_format_of, template, tokens)
        self.calls: CallFormat | None = CALL_FORMATS[calls] if calls else None
        self.reasoning: ReasoningFormat | None = REASONING_FORMATS[reasoning] if reasoning else None
        self._enforcement = tool_enforcement

    def reads(self, name: str) -> bool:
        """True if the chat template reads this variable; without a template none is read."""
        template = self._tokenizer.template
        return template is not None and template.reads(name)

    def check(self, turn: Turn, has_engine: bool) -> None:
        """Raises ValueError if this model cannot do the turn.

        `has_engine` says whether grammars are enforced where the answer is generated. The check
        takes microseconds, so nothing is rendered in vain.
        """
        self._check_variables(turn)
        self._check_tools(turn, has_engine)
        if turn.thinking_token_budget is None:
            return
        if self.reasoning is None:
            raise ValueError(
                "thinking_token_budget: this model is not known to reason: leave it out, or set "
                "model.reasoning_format in the server's configuration"
            )
        if BUDGET_RULE not in RULES:
            raise ValueError(
                "thinking_token_budget cannot be enforced by this server: leave it out, and limit "
                "the answer by max_tokens"
            )

    def check_form(self, turn: Turn, field: str, own_rules: Mapping[str, Any] | None) -> None:
        """Raises ValueError if the content of this turn's answer cannot have a form.

        `field` is where the request asks for the form. `own_rules` are logit rules of the request
        itself.
        """
        if turn.must_call:
            raise ValueError(
                f"tool_choice {turn.tool_choice!r} and {field} exclude each other, since an answer "
                "that must be a call has no content: send one of them"
            )
        if enforcement.RULE in (own_rules or {}):
            raise ValueError(
                f"logit_rules: its grammar and {field} exclude each other: send one of them"
            )

    def render(self, turn: Turn) -> str:
        """Returns the prompt's text. Raises a ValueError that names what is wrong with the
        messages."""
        return self._tokenizer.render_chat(
            turn.messages,
            turn.add_generation_prompt,
            turn.tools,
            turn.continue_final_message,
            **turn.variables,
        )

    def reading(self, turn: Turn, prompt: str) -> AnswerReading | None:
        """Returns how to read the answers to the rendered prompt; None means that all is
        content."""
        calls = self.calls if turn.may_call else None
        reasoning, is_open = self._reasoning_after(turn, prompt)
        if calls is None and reasoning is None:
            return None
        return AnswerReading(
            calls,
            reasoning,
            is_open,
            {
                tool["function"]["name"]: tool["function"].get("parameters") or {}
                for tool in turn.tools
            },
            turn.parallel_tool_calls,
            self._delimiters(calls, reasoning),
        )

    def prefix(self, turn: Turn, prompt: str) -> ReasoningPrefix:
        """Returns the reasoning that may, or must, stand before the content of this turn's
        answers."""
        reasoning, is_open = self._reasoning_after(turn, prompt)
        ids = {text: token for token, text in self._delimiters(None, reasoning).items()}
        return ReasoningPrefix(reasoning, is_open, ids)

    def call_rules(self, turn: Turn, prompt: str) -> tuple[str, ...]:
        """Returns the rules of calls that may come instead of content with a form
        (`text.grammars.tools`).

        It is () if nothing may be called. Raises a ValueError that names the tool and the cure.
        """
        if not turn.may_call or self.calls is None:
            return ()
        reasoning, _ = self._reasoning_after(turn, prompt)
        ids = {text: token for token, text in self._delimiters(self.calls, reasoning).items()}
        return enforcement.call_rules_of(turn, self.calls, self._enforcement, ids)

    def call_parts(self, turn: Turn) -> tuple[tuple[str, str], ...]:
        """Returns a grammar for each tool that may be called, with its place and name, to find the
        one at fault if a grammar of all cannot be used."""
        if not turn.may_call or self.calls is None:
            return ()
        ids = {text: token for token, text in self._delimiters(self.calls, None).items()}
        return enforcement.parts_of(turn, self.calls, self._enforcement, ids)

    def rules(
        self,
        turn: Turn,
        prompt: str,
        has_engine: bool,
        own_rules: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns the logit rules of this turn, by name. Raises a ValueError that names the field.

        `own_rules` are those of the request itself; its own grammar replaces that of the tools.
        Writing a grammar takes milliseconds.
        """
        rules = self.budget_rules(turn, prompt)
        reasoning, is_open = self._reasoning_after(turn, prompt)
        own = (own_rules or {}).get(enforcement.RULE)
        if own is not None:
            self._check_own_grammar(turn, str(own), reasoning if is_open else None)
        elif has_engine and self._is_enforced(turn):
            assert self.calls is not None
            ids = {text: i for i, text in self._delimiters(self.calls, reasoning).items()}
            grammar = enforcement.grammar_of(
                turn, self.calls, reasoning, is_open, self._enforcement, ids
            )
            if grammar:
                rules[enforcement.RULE] = grammar
        return rules

    def budget_rules(self, turn: Turn, prompt: str) -> dict[str, Any]:
        """Returns the logit rule that limits the reasoning, by name; empty if nothing is
        limited."""
        reasoning, is_open = self._reasoning_after(turn, prompt)
        if turn.thinking_token_budget is None or reasoning is None:
            return {}
        return {
            BUDGET_RULE: {
                "tokens": turn.thinking_token_budget,
                "end": self._ids_of(reasoning.end),
                "start": None if is_open else self._ids_of(reasoning.begin),
            }
        }

    def _is_enforced(self, turn: Turn) -> bool:
        wants = turn.must_call or self._enforcement != "off"
        return bool(turn.tools) and self.calls is not None and wants

    def _check_variables(self, turn: Turn) -> None:
        template = self._tokenizer.template
        if template is None:
            return  # rendering reports that there is no template
        for name, asked in (
            ("tools", turn.may_call),
            ("documents", turn.documents),
            ("reasoning_effort", turn.reasoning_effort is not None),
        ):
            if asked and not template.reads(name):
                raise ValueError(
                    f"{name}: the model's chat template does not show them to the model: leave "
                    f"{name} out and write what matters into the messages"
                    if name != "reasoning_effort"
                    else "reasoning_effort: the model's chat template does not read it: leave it "
                    "out, or send what the template reads in chat_template_kwargs"
                )

    def _check_tools(self, turn: Turn, is_enforcing: bool) -> None:
        if not turn.may_call:
            return
        if self.calls is None:
            raise ValueError(
                "tools: the form in which this model writes calls is not known: set "
                "model.tool_format in the server's configuration, or send tool_choice 'none' to "
                "show the model the tools and read its text yourself"
            )
        if is_enforcing:
            return
        if turn.must_call:
            raise ValueError(
                f"tool_choice {turn.tool_choice!r} must be enforced while tokens are drawn, and no "
                "worker of this server has a grammar engine: send 'auto'"
            )
        for place, tool in zip(turn.tool_places, turn.tools, strict=True):
            if tool["function"].get("strict"):
                raise ValueError(
                    f"tools[{place}].function.strict must be enforced while tokens are drawn, and "
                    "no worker of this server has a grammar engine: leave strict out"
                )

    def _check_own_grammar(self, turn: Turn, grammar: str, is_open: ReasoningFormat | None) -> None:
        """Checks the grammar that the request brings for its whole answer."""
        if turn.must_call:
            raise ValueError(
                f"tool_choice {turn.tool_choice!r} and a grammar of the request's own exclude each "
                "other: send one of them"
            )
        if is_open is None:
            return
        spellings = [is_open.end, *(f"<[{i}]>" for i in self._ids_of(is_open.end))]
        if not any(spelling in grammar for spelling in spellings):
            raise ValueError(
                "logit_rules: the prompt ends inside reasoning, and the grammar has no way out of "
                "it: switch reasoning off in chat_template_kwargs, or let the grammar begin with "
                f"reasoning and {is_open.end}"
            )

    def _reasoning_after(self, turn: Turn, prompt: str) -> tuple[ReasoningFormat | None, bool]:
        """Returns the format of reasoning, and whether the prompt ends inside reasoning.

        The format is None if no reasoning can come any more.
        """
        found = self.reasoning
        if found is None:
            return None, False
        if found.is_open_after(prompt):
            return found, True
        if found.is_closed_after(prompt):
            return None, False
        if not turn.continue_final_message:
            return found, False
        begun = text_of(turn.messages[-1]["content"])
        is_open = begun.rfind(found.begin) > begun.rfind(found.end)
        return (found if is_open or not begun.strip() else None), is_open

    def _delimiters(
        self, calls: CallFormat | None, reasoning: ReasoningFormat | None
    ) -> dict[int, str]:
        added = self._tokenizer.added_tokens
        mine = delimiter_tokens(calls, reasoning, added.values())
        return {token: text for token, text in added.items() if text in mine}

    def _ids_of(self, delimiter: str) -> list[int]:
        added = [token for token, text in self._tokenizer.added_tokens.items() if text == delimiter]
        return added[:1] or self._tokenizer.encode(delimiter, add_special_tokens=False)


def _found(asked: str, find: Any, template: str | None, tokens: Any) -> str | None:
    """Returns the name of a format: the one that was asked for, or what `find` finds; None for
    "none"."""
    if asked == "none":
        return None
    found: str | None = find(template, tokens, None if asked == "auto" else asked)
    return found
