"""The formats by name, and how a model's format is found from its chat template.

An unknown format is None and never a guess. Text that looks like a call then stays content.
docs/use/tools.md has the table. Every module that makes an `AnswerParser` calls this one.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from pdserve.text.answers.native import deepseek, hermes, llama, mistral, qwen_xml
from pdserve.text.answers.native.call_form import CallForm
from pdserve.text.answers.reader import Steps
from pdserve.text.answers.scan import Scan

_TAIL = 64  # characters at a prompt's end that may hold a delimiter and whitespace after it


@dataclass(frozen=True, slots=True)
class CallFormat:
    name: str
    parse: Callable[[Scan], Steps[None]]
    form: CallForm


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The delimiters of reasoning, which stands once, at the start of an answer, between them."""

    name: str
    begin: str
    end: str

    def is_open_after(self, prompt: str) -> bool:
        """True if the prompt ends inside reasoning, so that the answer starts there. This happens
        when the template itself writes <think>. Only the last characters are checked."""
        return prompt[-_TAIL:].rstrip().endswith(self.begin)

    def is_closed_after(self, prompt: str) -> bool:
        """True if the prompt ends just after reasoning, so that the answer is content. This happens
        when a template writes an empty <think></think> to switch reasoning off. Only the last
        characters are checked."""
        return prompt[-_TAIL:].rstrip().endswith(self.end)


CALL_FORMATS = {
    found.name: found
    for found in (
        CallFormat("hermes", hermes.parse, hermes.FORM),
        CallFormat("llama3-json", llama.parse, llama.FORM),
        CallFormat("mistral", mistral.parse, mistral.ARRAY_FORM),
        CallFormat("mistral-args", mistral.parse, mistral.NAMED_FORM),
        CallFormat("qwen3-coder", qwen_xml.parse, qwen_xml.FORM),
        CallFormat("deepseek-v3", deepseek.parse, deepseek.FENCED_FORM),
        CallFormat("deepseek-v3.1", deepseek.parse, deepseek.PLAIN_FORM),
    )
}
REASONING_FORMATS = {
    found.name: found
    for found in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral-think", "[THINK]", "[/THINK]"),
    )
}


def format_of(
    chat_template: str | None, tokens: Collection[str] = (), override: str | None = None
) -> str | None:
    """Returns the name in CALL_FORMATS of the model's format, or None if it is unknown.

    - tokens: Special tokens of the vocabulary. They decide if there is no template, as in Mistral's
      repositories.
    - override: A name that wins over the template and the tokens.

    Raises ValueError if there is no format named `override`.
    """
    if override is not None:
        return _known(override, CALL_FORMATS, "tool call format")
    text = chat_template if chat_template is not None else "\n".join(tokens)
    if deepseek.CALL_BEGIN in text:
        return "deepseek-v3" if deepseek.FENCE in text else "deepseek-v3.1"
    if mistral.CALLS in text:
        return "mistral-args" if mistral.ARGS in text else "mistral"
    if chat_template is None:
        return None
    if hermes.BEGIN in text:
        if qwen_xml.FUNCTION in text and qwen_xml.PARAMETER in text:
            return "qwen3-coder"
        return "hermes" if "arguments" in text and "<arg_key>" not in text else None
    if llama.PYTHON_TAG in text or llama.PYTHON_TAG in tokens:
        is_json = '"parameters": ' in text and qwen_xml.FUNCTION not in text
        return "llama3-json" if is_json else None
    return None


def reasoning_format_of(
    chat_template: str | None, tokens: Collection[str] = (), override: str | None = None
) -> str | None:
    """Returns the name in REASONING_FORMATS, found as in `format_of`. Both delimiters must occur.
    None: the format is unknown."""
    if override is not None:
        return _known(override, REASONING_FORMATS, "reasoning format")
    text = "\n".join([chat_template or "", *tokens])
    for name, found in REASONING_FORMATS.items():
        if found.end in text and (found.begin in text or found.begin in tokens):
            return name
    return None


def delimiter_tokens(
    calls: CallFormat | None, reasoning: ReasoningFormat | None, tokens: Collection[str]
) -> frozenset[str]:
    """Returns the delimiters of these formats that are one token of the vocabulary. The caller must
    make the `AnswerParser` with them, and push each as a `SpecialToken`.

    - tokens: All added tokens, including those that the tokenizer does not call special.
    """
    mine = calls.form.tokens if calls is not None else ()
    mine += (reasoning.begin, reasoning.end) if reasoning is not None else ()
    return frozenset(mine).intersection(tokens)


def _known(name: str, formats: Collection[str], kind: str) -> str:
    if name not in formats:
        raise ValueError(f"{kind} {name!r} is unknown: use one of {', '.join(formats)}")
    return name
