"""From what a request asks of its answer's form to one grammar of llguidance.

Limits come first, then the grammar is made. Whether it can be used is seen when it is built. Called
by `probe`, in a process of its own: what it is given may take long.
"""

from collections.abc import Sequence

from pdserve.text.grammars.limits import check_bytes
from pdserve.text.grammars.notation import choice_grammar, lark_grammar, regex_grammar
from pdserve.text.grammars.schemas import can_end, json_text, schema_of, unenforced_keywords
from pdserve.text.grammars.structured import StructuredRequest
from pdserve.text.grammars.tags import tag_grammar, tag_schemas


def grammar_of(structured: StructuredRequest, opening: str = "") -> str:
    """The grammar, as `llguidance.LLMatcher` takes it. It may still be one that cannot be used:
    `checker.checked_grammar` says so. opening: what the text of a regular expression or of a
    structural tag must not begin with, since it would be read as reasoning. ValueError names the
    field and the cure; with `strict` also for a keyword that is not known."""
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
        names = sorted(unenforced_keywords(schema))
        if structured.strict and names:
            raise ValueError(
                f"{field} uses {', '.join(names)}, which cannot be enforced: leave it out, or send "
                "strict: false"
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
        return regex_grammar(value, field, opening)
    if kind == "choice":
        return choice_grammar(value, field)
    if kind == "grammar":
        return lark_grammar(value, field)
    return tag_grammar(value, field, opening)


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
