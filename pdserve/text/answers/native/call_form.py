"""The native form in which a model writes calls, as data. Structural grammars are built from it.

An answer with calls is free text (with reasoning before it), then

    section_begin  call  between  call ...  section_end
    call = call_begin NAME before_arguments ARGUMENTS after_arguments

ARGUMENTS is JSON that fits the tool's schema. If `parameter` is set, it is instead a sequence of
parameters, each with its parts around the key and the value. The file of each format defines its
CallForm. This module knows no parser.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParameterForm:
    """One parameter: begin KEY before_value VALUE end. The value is a plain string or JSON."""

    begin: str
    before_value: str
    end: str


@dataclass(frozen=True, slots=True)
class CallForm:
    # free text ends where the trigger begins; with tool_choice "none" the trigger is forbidden
    trigger: str
    call_begin: str
    before_arguments: str
    after_arguments: str
    section_begin: str = ""
    between: str = ""
    section_end: str = ""
    # delimiters that are one token each if the vocabulary has them
    tokens: tuple[str, ...] = ()
    # calls are only allowed at the start of the answer, after its reasoning
    only_at_start: bool = False
    parameter: ParameterForm | None = None  # None: the arguments are one JSON object
