"""From what a request asks of its answer's form to one grammar of llguidance, checked.

Limits come first, then the grammar is made, then it is built once to see whether it can be used
(`checker`). Called by the router's service in a thread, and by `LLM.generate`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.text.grammars.checker import GrammarChecker, shared_checker
from pdserve.text.grammars.limits import check_bytes
from pdserve.text.grammars.notation import choice_grammar, lark_grammar, regex_grammar
from pdserve.text.grammars.schemas import can_end, json_text, schema_of, unenforced_keywords
from pdserve.text.grammars.structured import StructuredRequest
from pdserve.text.grammars.tags import tag_grammar, tag_schemas


@dataclass(frozen=True)
class Grammar:
    """text: one grammar as llguidance takes it: Lark, or JSON with several. unenforced: keywords of
    JSON schemas that the request uses and the grammar leaves out."""

    text: str
    unenforced: tuple[str, ...] = ()


def grammar_of(structured: StructuredRequest) -> str:
    """The grammar, as `llguidance.LLMatcher` takes it. It may still be one that cannot be used:
    `checked_grammar` says so. ValueError names the field and the cure."""
    kind, value, field = structured.kind, structured.value, structured.field
    if structured.whitespace_pattern is not None:
        check_bytes(structured.whitespace_pattern, f"{field}: its whitespace pattern")
    if kind == "json":
        schema = schema_of(value, field)
        if not can_end(schema):
            raise ValueError(
                f"{field} fits no finite answer: a part that it requires is false, or refers back "
                "without an end; make that part optional"
            )
        return _json_grammar(
            json_text(schema, field, structured.strict, structured.whitespace_pattern)
        )
    if kind == "json_object":
        if value is not True:
            raise ValueError(f"{field} must be true, not {value!r:.80}: leave it out otherwise")
        return _json_grammar(
            json_text({"type": "object"}, field, False, structured.whitespace_pattern)
        )
    if kind == "regex":
        return regex_grammar(value, field)
    if kind == "choice":
        return choice_grammar(value, field)
    if kind == "grammar":
        return lark_grammar(value, field)
    return tag_grammar(value, field)


def checked_grammar(
    structured: StructuredRequest, checker: GrammarChecker | None = None
) -> Grammar:
    """The grammar, which can be used. Takes 1 ms for one that was seen before or is small, and
    `checker.SECONDS` at most after that its turn came. ValueError names the field and the cure;
    with `strict` also for a keyword that cannot be enforced."""
    text = grammar_of(structured)
    names = unenforced_names(structured)
    if structured.strict and names:
        raise ValueError(
            f"{structured.field} uses {', '.join(sorted(names))}, which cannot be enforced: leave "
            "it out, or send strict: false"
        )
    found = (checker or shared_checker()).unenforced(text, structured.field)
    return Grammar(text, tuple(sorted(names.union(found))))


def unenforced_names(structured: StructuredRequest) -> set[str]:
    """Keywords of its JSON schemas that are not known."""
    return set().union(*map(unenforced_keywords, _schemas(structured)))


def _schemas(structured: StructuredRequest) -> Sequence[dict[str, object]]:
    if structured.kind == "json":
        return [schema_of(structured.value, structured.field)]
    if structured.kind == "structural_tag":
        return tag_schemas(structured.value, structured.field)
    return []


def _json_grammar(schema: str) -> str:
    return f'{{"grammars": [{{"json_schema": {schema}}}]}}'
