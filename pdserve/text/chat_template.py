"""Hugging Face chat templates: messages in, prompt text out, in a sandboxed jinja2 environment.

Templates get the helpers that transformers gives them (raise_exception, strftime_now, tojson, loop
controls, the `generation` block) and messages in the form that they expect (`text.chat_messages`).
This module knows no token ids. `text.tokenizer` calls it.
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

from pdserve.text.chat_messages import Message, normalised, with_text_arguments

# variables by which templates switch reasoning on and off: Qwen3's and the demo's, DeepSeek-V3.1's
THINKING_SWITCHES = ("enable_thinking", "thinking")
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "raise_exception",
        "strftime_now",
    }
)

# This mark follows the message that is to be continued while the template renders. Its last
# character is a space, which shows whether the template strips contents.
_CUT = "\ue000continued here\ue000 "


class _GenerationBlock(jinja2.ext.Extension):
    """The block `{% generation %}`. Training code marks the assistant's words with it. In serving
    it has no effect."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    def __init__(self, source: str) -> None:
        """Compiles the template. Raises ValueError if it does not parse."""
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
            parsed = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template does not parse: line {error.lineno}: {error.message}"
            ) from error
        self.source = source
        self._names = frozenset(
            node.name for node in parsed.find_all(jinja2.nodes.Name) if node.ctx == "load"
        )
        self._knows_developer = "developer" in source

    def reads(self, name: str) -> bool:
        """True if the template reads this variable anywhere, for example "tools"."""
        return name in self._names

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        continue_final_message: bool = False,
    ) -> str:
        """Returns the prompt text. Raises ValueError that names what is wrong.

        - variables: Special tokens, and variables from the client such as enable_thinking.
        - continue_final_message: The prompt ends where the content of the last message ends.
        """
        for name in variables:
            if name in RESERVED:
                raise ValueError(f"chat_template_kwargs must not set {name!r}: the server sets it")
        shown = normalised(messages, self._knows_developer)
        if continue_final_message:
            shown = _marked(shown)
        given = {
            **variables,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = self._rendered(shown, given)
        return _cut(text) if continue_final_message else text

    def _rendered(self, messages: list[Message], given: Mapping[str, Any]) -> str:
        try:
            try:
                return self._template.render(**given, messages=messages)
            except TypeError:
                if not any("tool_calls" in message for message in messages):
                    raise
                return self._template.render(**given, messages=with_text_arguments(messages))
        except jinja2.TemplateError as error:
            raise ValueError(
                f"the model's chat template refuses these messages: {error}"
            ) from error
        except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # the template indexes into a field that a message does not have
            raise ValueError(
                f"the model's chat template fails on these messages: {error!r}"
            ) from error


def _marked(messages: list[Message]) -> list[Message]:
    """Returns the messages with a mark where the last one is to be continued."""
    last = messages[-1]
    if last["role"] != "assistant" or last["content"] is None or "tool_calls" in last:
        raise ValueError(
            f"messages[{len(messages) - 1}] cannot be continued: continue_final_message needs an "
            "assistant's message with content and without tool_calls at the end"
        )
    return [*messages[:-1], last | {"content": last["content"] + _CUT}]


def _cut(text: str) -> str:
    """Returns the text up to the mark where the last message is continued."""
    start = text.rfind(_CUT.rstrip())
    if start < 0:
        raise ValueError(
            "the model's chat template does not show the last message, so it cannot be continued: "
            "leave continue_final_message out"
        )
    strips = not text.startswith(_CUT, start)
    return text[:start].rstrip() if strips else text[:start]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns plain JSON. jinja2's own filter escapes HTML characters, which would change the
    prompt."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
