"""Numbers of properties (minProperties, maxProperties) as llguidance can enforce them.

It counts only the keys that `properties` does not name, and a key that comes twice counts
twice. So an object whose named properties are optional becomes an anyOf of branches. In each branch
enough of them are required or forbidden for the rest to need no counting, or for llguidance to
count it:

    {"properties": {a, b}, "minProperties": 1}
      -> a is required | a is forbidden, b is required | both are forbidden, one more key

This module knows no other keywords. `schemas` calls it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

KEYWORDS = ("minProperties", "maxProperties")
MAX_BRANCHES = 32
# keywords that may add properties to those that are named beside them
_APPLICATORS = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
_MAX_NAMES = 100  # optional properties; more would take more branches in almost any case


@dataclass(frozen=True)
class _Branch:
    present: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    # number of keys that `properties` does not name; with None for `most` there is no limit
    least: int = 0
    most: int | None = None


def counted(schema: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Returns the schema with both keywords in a form that llguidance enforces, and those of the
    two that are not enforced exactly. The schema's other parts stay where they are, so that
    references find them."""
    names = {name for name in KEYWORDS if name in schema}
    if not names or not _is_well_formed(schema):
        return dict(schema), set()
    others = {name: value for name, value in schema.items() if name not in names}
    needed = {name for name in schema.get("required", []) if isinstance(name, str)}
    branches = _branches(schema, needed)
    if branches == [_Branch()]:  # there is nothing to count
        return others, set()
    if branches is None or _APPLICATORS & schema.keys():
        return others, names
    if not branches:  # this is how llguidance says that nothing fits
        return others | {"minProperties": 1, "maxProperties": 0}, set()
    kind = {"type": "object"} if schema.get("type") == "object" else {}
    others["anyOf"] = [kind | _schema(branch, len(needed)) for branch in branches]
    # of two further keys, one may repeat the other
    repeats = any(branch.least > 1 for branch in branches)
    return others, names & {"minProperties"} if repeats else set()


def _is_well_formed(schema: Mapping[str, Any]) -> bool:
    bounds = [schema[name] for name in KEYWORDS if name in schema]
    return (
        all(isinstance(bound, int) and not isinstance(bound, bool) for bound in bounds)
        and isinstance(schema.get("properties", {}), Mapping)
        and isinstance(schema.get("required", []), list)
    )


def _branches(schema: Mapping[str, Any], needed: set[str]) -> list[_Branch] | None:
    """Returns branches such that every object with the right number of keys fits one. None: there
    are too many. [_Branch()]: every object has the right number."""
    properties = schema.get("properties", {})
    names = [n for n, part in properties.items() if n not in needed and part is not False]
    has_more = schema.get("additionalProperties") is not False or "patternProperties" in schema
    least = max(0, schema.get("minProperties", 0) - len(needed))
    most = schema["maxProperties"] - len(needed) if "maxProperties" in schema else None
    if most is not None and most < least:
        return []
    if len(names) > _MAX_NAMES:
        return None if least or most is not None else [_Branch()]
    walk = _walk(tuple(names), has_more, _Branch(least=least, most=most))
    found = list(islice(walk, MAX_BRANCHES + 1))
    return found if len(found) <= MAX_BRANCHES else None


def _walk(names: tuple[str, ...], has_more: bool, branch: _Branch) -> Iterator[_Branch]:
    """Decides on the names one by one, until the rest needs no counting."""
    least, most = branch.least, branch.most
    if not has_more and least > len(names):
        return
    if not least and (most is None or (not has_more and len(names) <= most)):
        yield _Branch(branch.present, branch.absent)
    elif not names or most == 0:
        yield _Branch(branch.present, branch.absent + names, least, most)
    else:
        name, rest = names[:1], names[1:]
        fewer = None if most is None else most - 1
        taken = _Branch(branch.present + name, branch.absent, max(0, least - 1), fewer)
        left = _Branch(branch.present, branch.absent + name, least, most)
        yield from _walk(rest, has_more, taken)
        yield from _walk(rest, has_more, left)


def _schema(branch: _Branch, num_needed: int) -> dict[str, Any]:
    num_named = num_needed + len(branch.present)
    found: dict[str, Any] = {
        "properties": dict.fromkeys(branch.absent, False),
        "required": list(branch.present),
    }
    if branch.least:
        found["minProperties"] = num_named + branch.least
    if branch.most is not None:
        found["maxProperties"] = num_named + branch.most
    return found
