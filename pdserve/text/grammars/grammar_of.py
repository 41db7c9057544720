"""Makes one llguidance grammar from the form that a request asks for.

It checks limits first and then makes the grammar. Only building shows whether a grammar can be
used. `probe` calls this module in a process of its own, because hostile input may take long.
"""

from collections.abc import Sequence

from pdserve.text.grammars import lark
from pdserve.text.grammars.json_schemas.schemas import (
    can_end,
    close_objects,
    json_text,
    schema_of,
    unenforced_keywords,
)
from pdserve.text.grammars.limits import check_bytes
from pdserve.text.grammars.notation import (
    choice_grammar,
    json_spaces,
    lark_grammar,
    regex_grammar,
)
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
    if kind in ("json", "json_object"):
        return _json(structured)
    if kind == "regex":
        return regex_grammar(value, field, opening)
    if kind == "choice":
        return choice_grammar(value, field)
    if kind == "grammar":
        return lark_grammar(value, field)
    return tag_grammar(value, field, opening)


def whitespace_besides(structured: StructuredRequest) -> str:
    """Returns Lark of the text that the whitespace pattern matches and that is not JSON's
    whitespace. If it can be used, the pattern must not be. It is "" without a pattern."""
    if not structured.whitespace_pattern:
        return ""
    pattern = lark.regex(json_spaces(structured.whitespace_pattern))
    return f"start: OTHER\nOTHER: {pattern} & ~/[ \\t\\n\\r]*/\n"


def unenforced_names(structured: StructuredRequest) -> set[str]:
    """Returns the unknown keywords of the request's JSON schemas."""
    return set().union(*map(unenforced_keywords, _schemas(structured)))


def _schemas(structured: StructuredRequest) -> Sequence[dict[str, object]]:
    if structured.kind in ("json", "json_object"):
        return [_schema(structured)]
    if structured.kind == "structural_tag":
        return tag_schemas(structured.value, structured.field)
    return []


def _json(structured: StructuredRequest) -> str:
    field, whitespace = structured.field, structured.whitespace_pattern
    if whitespace:
        check_bytes(whitespace, f"{field}: its whitespace pattern")
        whitespace = json_spaces(whitespace)
    schema = _schema(structured)
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
    text = json_text(schema, field, structured.strict, whitespace)
    return f'{{"grammars": [{{"json_schema": {text}}}]}}'


def _schema(structured: StructuredRequest) -> dict[str, object]:
    """Returns the JSON schema of the answer."""
    value, field = structured.value, structured.field
    if structured.kind == "json_object" and value is True:
        return {"type": "object"}
    schema = schema_of(value, field)
    if structured.kind == "json_object":
        kinds = schema.setdefault("type", "object")
        if kinds not in ("object", ["object"]):
            raise ValueError(
                f"{field}.type must be object, not {kinds!r:.80}: send type json_schema for other "
                "values"
            )
    if structured.is_closed:
        close_objects(schema)
    return schema
