"""The grammar of an answer with tool calls, in the form in which its model writes them.

    reasoning, if the model reasons    free text, unless a call is required    calls

It is made from a CallForm and the request's tools. The format's parser reads every call that this
grammar allows back with the same name and arguments. The answer ends after the calls. The router's
chat endpoint calls this module.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pdserve.text.answers.formats import ReasoningFormat
from pdserve.text.answers.native.call_form import CallForm
from pdserve.text.grammars import lark
from pdserve.text.grammars.json_schemas.schemas import (
    can_end,
    json_text,
    schema_of,
    unenforced_keywords,
)
from pdserve.text.grammars.limits import MAX_TOOLS, check_bytes
from pdserve.text.grammars.parameters.rules import parameter_rules
from pdserve.text.grammars.reasoning import ReasoningPrefix

Enforce = Literal["schema", "syntax", "off"]

# names of functions that every format can write
_NAME = re.compile(r"[^\s<>\[\]{}\"'`\\\x00-\x1f\ud800-\udfff]{1,256}")


def tools_grammar(
    form: CallForm,
    tools: Sequence[Mapping[str, Any]],
    choice: Any = "auto",
    parallel: bool = True,
    reasoning: ReasoningFormat | None = None,
    *,
    starts_in_reasoning: bool = False,
    enforce: Enforce = "schema",
    token_ids: Mapping[str, int] | None = None,
    places: Sequence[int] | None = None,
) -> str:
    """Returns Lark of an answer, or "" if nothing is to be enforced (`enforce` "off").

    - tools: OpenAI's tools.
    - choice: OpenAI's tool_choice: "auto" (free text, then calls or none), "required", "none" (no
      call), or {"type": "function", "function": {"name": ...}}.
    - parallel: False allows only one call.
    - reasoning: Reasoning that may stand first.
    - starts_in_reasoning: True if the prompt opened the reasoning.
    - enforce: "syntax" leaves out the schemas of arguments.
    - token_ids: Ids of the delimiters that are special tokens of the vocabulary. The model writes
      those as tokens, and other delimiters as text.
    - places: Places of the tools in the request, for errors. None: they are the request's.

    Raises ValueError that names the field and the cure.
    """
    if enforce == "off":
        return ""
    prefix = ReasoningPrefix(reasoning, starts_in_reasoning, token_ids or {})
    writer = _Writer(form, prefix)
    kind, functions = _chosen(tools, choice, places)
    if kind == "none":
        return writer.none()
    calls = _enforced(functions, enforce)
    text = (
        writer.auto(calls, parallel)
        if kind == "auto"
        else writer.required(calls, parallel and kind == "required")
    )
    check_bytes(text, "tools")
    return text


def call_rules(
    form: CallForm,
    tools: Sequence[Mapping[str, Any]],
    parallel: bool,
    enforce: Literal["schema", "syntax"],
    token_ids: Mapping[str, int],
    places: Sequence[int] | None = None,
) -> tuple[str, ...]:
    """Returns lines of Lark for a rule `calls`: one call of these tools or, with `parallel`, more.
    Parameters and errors are those of `tools_grammar`."""
    writer = _Writer(form, ReasoningPrefix(token_ids=token_ids))
    rules = writer.call_rules(_enforced(_functions(tools, places), enforce), parallel, "")
    check_bytes("\n".join(rules), "tools")
    return tuple(rules)


def tool_parts(
    form: CallForm,
    tools: Sequence[Mapping[str, Any]],
    choice: Any,
    enforce: Literal["schema", "syntax"],
    token_ids: Mapping[str, int],
    places: Sequence[int] | None = None,
) -> tuple[tuple[str, str], ...]:
    """Returns for each tool that may be called its place in the request with its name, and Lark of
    one call of it. It finds the tool at fault if a grammar of all cannot be used. Parameters are
    those of `tools_grammar`."""
    writer = _Writer(form, ReasoningPrefix(token_ids=token_ids))
    _, functions = _chosen(tools, choice, places)
    return tuple(
        (f"{called.field} of {called.name!r}", writer.required([called], parallel=False))
        for called in _enforced(functions, enforce)
    )


@dataclass(frozen=True)
class _Function:
    """One function that may be called."""

    name: str
    schema: dict[str, Any]  # JSON schema of the arguments
    field: str  # the schema's place in the request, for errors
    strict: bool = False  # True refuses keywords that cannot be enforced


def _enforced(functions: list[_Function], enforce: Enforce) -> list[_Function]:
    if enforce == "schema":
        return functions
    return [replace(call, schema={"type": "object"}, strict=False) for call in functions]


def _chosen(
    tools: Sequence[Mapping[str, Any]], choice: Any, places: Sequence[int] | None
) -> tuple[str, list[_Function]]:
    functions = _functions(tools, places)
    if choice in ("auto", "none", "required"):
        return choice, functions
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(
            "tool_choice must be 'none', 'auto', 'required' or {\"type\": \"function\", "
            f'"function": {{"name": ...}}}}, not {choice!r:.80}'
        )
    named = [found for found in functions if found.name == name]
    if not named:
        known = ", ".join(found.name for found in functions)
        raise ValueError(
            f"tool_choice names {name!r:.80}, which tools does not hold: use {known:.500}"
        )
    return "named", named


def _functions(
    tools: Sequence[Mapping[str, Any]], places: Sequence[int] | None = None
) -> list[_Function]:
    if not 0 < len(tools) <= MAX_TOOLS:
        raise ValueError(f"tools must hold 1 to {MAX_TOOLS} tools, not {len(tools)}")
    found: dict[str, _Function] = {}
    for number, tool in zip(places or range(len(tools)), tools, strict=True):
        field = f"tools[{number}].function"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise ValueError(f"{field}.name must be the name of a function, not {name!r:.80}")
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{field}.name must have 1 to 256 characters without spaces, quotes and brackets, "
                f"not {name!r:.80}"
            )
        if name in found:
            raise ValueError(f"{field}.name {name!r} stands there twice: give each its own name")
        where = f"{field}.parameters"
        schema, strict = _parameters(function, where), function.get("strict") is True
        if strict and (names := unenforced_keywords(schema)):
            raise ValueError(
                f"{where} uses {', '.join(sorted(names))}, which cannot be enforced: leave it out, "
                "or send strict: false"
            )
        found[name] = _Function(name, schema, where, strict)
    return list(found.values())


def _parameters(function: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Returns the schema of the arguments. They are an object in every format."""
    given = function.get("parameters")
    if given is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = schema_of(given, field)
    if "type" not in schema:
        schema["type"] = "object"
    if schema["type"] not in ("object", ["object"]):
        raise ValueError(f"{field}.type must be object, not {schema['type']!r:.80}")
    if not can_end(schema):
        raise ValueError(
            f"{field} fits no finite arguments: a part that it requires is false, or refers back "
            "without an end; make that part optional"
        )
    return schema


class _Writer:
    def __init__(self, form: CallForm, prefix: ReasoningPrefix) -> None:
        self._form = form
        self._prefix = prefix
        self._ids = prefix.token_ids

    def none(self) -> str:
        """Returns the grammar of an answer without calls."""
        return self._answer("TEXT", [self._text_rule()])

    def required(self, calls: list[_Function], parallel: bool) -> str:
        """Returns the grammar of an answer that is only calls."""
        return self._answer("calls", self.call_rules(calls, parallel, ""))

    def auto(self, calls: list[_Function], parallel: bool) -> str:
        """Returns the grammar of free text that may end in calls."""
        form = self._form
        rules = [self._text_rule()]
        if form.only_at_start:
            return self._answer("TEXT | calls", rules + self.call_rules(calls, parallel, ""))
        if form.trigger in self._ids:
            body = f"TEXT | TEXT {lark.delimiter(form.trigger, self._ids)} calls"
        else:
            body = "TEXT | head calls"
            rules += [
                f"head[lazy]: FREE {lark.string(form.trigger)}",
                f"FREE: {lark.without(start=self._prefix.opening)}",
            ]
        return self._answer(body, rules + self.call_rules(calls, parallel, form.trigger))

    def _text_rule(self) -> str:
        """Returns the rule of free text without the trigger."""
        form, start = self._form, self._prefix.opening
        if form.trigger in self._ids:
            return f"TEXT: {lark.without(start=start)}"
        if not form.only_at_start:
            return f"TEXT: {lark.without(form.trigger, start=start)}"
        return f"TEXT: {lark.without(start=start)} & ~/\\s*{lark.escaped(form.trigger)}(?s:.*)/"

    def _answer(self, body: str, rules: list[str]) -> str:
        """Returns the whole grammar: reasoning, if there is any, and then the body."""
        return "\n".join([*self._prefix.before(body), *rules]) + "\n"

    def call_rules(self, calls: list[_Function], parallel: bool, after: str) -> list[str]:
        """Returns the rules of `calls`. `after` is the part of the first call's text that was read
        already."""
        form, ids = self._form, self._ids
        before = form.section_begin + form.call_begin
        assert before.startswith(after)
        first = lark.with_delimiters(before[len(after) :], ids)
        more = lark.with_delimiters(form.between + form.call_begin, ids)
        end = lark.with_delimiters(form.section_end, ids)
        repeated = f"({more} call)*" if parallel else ""
        parts = [first, "call", repeated, end]
        rules = ["calls: " + " ".join(part for part in parts if part)]
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(calls))))
        unenforced: set[str] = set()
        for number, called in enumerate(calls):
            unenforced |= unenforced_keywords(called.schema)
            begin = lark.with_delimiters(called.name + form.before_arguments, ids)
            close = lark.with_delimiters(form.after_arguments, ids)
            if form.parameter is None:
                schema = json_text(called.schema, called.field, called.strict)
                rules.append(f"call_{number}: {begin} %json {schema} {close}".rstrip())
                continue
            name = f"arguments_{number}"
            rules.append(f"call_{number}: {begin} {name} {close}".rstrip())
            found = parameter_rules(
                form.parameter, called.schema, called.field, name, called.strict
            )
            rules += found.lines
            unenforced |= found.unenforced
        return [*lark.remark(unenforced), *rules]
