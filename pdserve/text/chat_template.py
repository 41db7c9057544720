"""Hugging Face chat templates: messages in, prompt text out, in a sandboxed jinja2 environment.

Gives templates the helpers that transformers gives them (raise_exception, strftime_now, tojson,
loop controls, the `generation` block) and messages in the form they expect: content as one string,
tool-call arguments as objects. Knows no token ids. Called by `text.tokenizer`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

# JSON in a string escapes the bounds of the body that it comes in: so many of all calls are decoded
# within 20 ms.
MAX_ARGUMENT_VALUES = 1 << 16

_RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}
)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`: training code marks the assistant's words by it; for serving it is
    transparent."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    def __init__(self, source: str) -> None:
        """ValueError when the template does not parse."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template does not parse: line {error.lineno}: {error.message}"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """variables: special tokens and what the client adds (e.g. enable_thinking). ValueError
        names what is wrong."""
        for name in variables:
            if name in _RESERVED:
                raise ValueError(f"chat_template_kwargs must not set {name!r}: the server sets it")
        _check_arguments(messages)
        try:
            return self._template.render(
                **variables,
                messages=[_message(message, index) for index, message in enumerate(messages)],
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateError as error:
            raise ValueError(
                f"the model's chat template refuses these messages: {error}"
            ) from error
        except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # a template that indexes into what a message does not have
            raise ValueError(
                f"the model's chat template fails on these messages: {error!r}"
            ) from error


def _check_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    num_values = 0
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            if isinstance(arguments, str):
                num_values += sum(map(arguments.count, "[{,:"))
        if num_values > MAX_ARGUMENT_VALUES:
            raise ValueError(
                f"messages[{index}].tool_calls: function.arguments up to here hold more than "
                f"{MAX_ARGUMENT_VALUES} values: leave out old calls"
            )


def _message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ValueError(
            f"{where} must be an object with role and content, not {type(message).__name__}"
        )
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise ValueError(f"{where}.role must be a non-empty string such as 'user'")
    content = message.get("content")
    if content is None and message["role"] != "assistant":
        raise ValueError(f"{where}.content is missing: only an assistant's message may go without")
    result = dict(message) | {"content": None if content is None else _text(content, where)}
    if message.get("tool_calls"):
        result["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls") for call in message["tool_calls"]
        ]
    return result


def _text(content: Any, where: str) -> str:
    """Content as one string; several text parts are joined by a newline, as vLLM does."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(
            f"{where}.content must be a string or a list of parts, not {type(content).__name__}"
        )
    return "\n".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise ValueError(
            f"{where} has type {kind!r}: only {{'type': 'text', 'text': ...}} is supported"
        )
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{where}.text must be a string")
    return part["text"]


def _tool_call(call: Any, where: str) -> Any:
    """OpenAI sends a call's arguments as a JSON string; templates want the object."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise ValueError(f"{where} must hold objects with a function")
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: function.arguments is not valid JSON: {error}") from error
    return dict(call) | {"function": dict(call["function"]) | {"arguments": parsed}}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes HTML characters, which would change the prompt."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
