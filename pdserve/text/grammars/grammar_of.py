"""Makes one llguidance grammar from the form that a request asks for.

It checks limits first and then makes the grammar. Only building shows whether a grammar can be
used. `probe` calls this module in a process of its own, because hostile input may take long.
"""

from collections.abc import Sequence

from pdserve.text.grammars.limits import check_bytes
from pdserve.text.grammars.notation import choice_grammar, lark_grammar, regex_grammar
from pdserve.text.grammars.schemas import can_end, json_text, schema_of, unenforced_keywords
from pdserve.text.grammars.structured import StructuredRequest
from pdserve.text.grammars.tags import tag_grammar, tag_schemas


def grammar_of(structured: StructuredRequest, opening: str = "") -> str:
    """Returns the grammar, as `llguidance.LLMatcher` takes it. It may still prove unusable, which
    `checker.checked_grammar` finds.

    - opening: Text with which the text of a regular expression or of a structural tag must not
      begin, because it would be read as the start of reasoning.

    Raises ValueError that names the field and the cure. With `strict`, an unknown keyword also
    raises.
    """
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
    """Returns the unknown keywords of the request's JSON schemas."""
    return set().union(*map(unenforced_keywords, _schemas(structured)))


def _schemas(structured: StructuredRequest) -> Sequence[dict[str, object]]:
    if structured.kind == "json":
        return [schema_of(structured.value, structured.field)]
    if structured.kind == "structural_tag":
        return tag_schemas(structured.value, structured.field)
    return []


def _json_grammar(schema: str) -> str:
    return f'{{"grammars": [{{"json_schema": {schema}}}]}}'
