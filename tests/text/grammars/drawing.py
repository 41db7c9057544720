"""JSON schemas and values drawn at random, and the judge of answers: the jsonschema package, with
exact numbers and with ECMA-262's `$`."""

import decimal
import json
import random
import re
from collections.abc import Collection, Iterator
from decimal import Decimal
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend

NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
    "required": ["v"],
    "additionalProperties": False,
}
PATTERNS = [
    "^[a-c]+$",
    "b",
    '^[^"]*$',
    r"^[^\\]*$",
    r'^[^"\\]+$',
    '^[^"\n]*$',
    r"^[^a]{2,4}$",
    r"^\W?[^\w]$",
    r'^(?:[^"]|x"y)$',
    r"^[\x00-!]+$",
    r'"$|^\\',
    r"^\D[^\d]$",
]
# keywords that mean something else without another one
_DEPENDENT = {
    "properties": ("additionalProperties",),
    "patternProperties": ("additionalProperties",),
    "prefixItems": ("items",),
}
KEYS = ["a", "b", "c d", "é", "zz", 'x"y', "back\\slash"]
TEXTS = ["", "a", "abc", "bbb", "é\n", 'x"y', "2024-02-03", "long text", "\\", '"', "!!", "\\\\b"]


class Draw:
    """Schemas and values at random. Schemas use keywords that are enforced, alone."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def schema(self, depth: int = 3) -> dict[str, Any]:
        leaves = [self._text, self._number, self._enum, self._any]
        inner = [self._object, self._object, self._array, self._either]
        makers = [*leaves, *(inner if depth else [])]
        return self.rng.choice(makers)(depth - 1)

    def root(self) -> dict[str, Any]:
        return self._rooted(self._object(2) if self.rng.random() < 0.7 else self.schema())

    def arguments(self) -> dict[str, Any]:
        """Draws the schema of a function's arguments."""
        return self._rooted(self._object(2))

    def _rooted(self, schema: dict[str, Any]) -> dict[str, Any]:
        node = self.rng.choice([NODE, self._text(0), self._map(0)])
        other = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
        return schema | {"$defs": {"node": node, "other": other}}

    def _text(self, _: int) -> dict[str, Any]:
        more: list[dict[str, Any]] = [
            {},
            {"minLength": 2},
            {"maxLength": 3},
            {"format": "ipv4"},
            {"enum": ["a", "é", 'x"y']},
            {"pattern": self.rng.choice(PATTERNS)},
            {"pattern": self.rng.choice(PATTERNS)},
            {"pattern": self.rng.choice(PATTERNS), "maxLength": 4},
        ]
        return {"type": "string"} | self.rng.choice(more)

    def _number(self, _: int) -> dict[str, Any]:
        more: list[dict[str, Any]] = [
            {},
            {"minimum": -2},
            {"maximum": 12},
            {"exclusiveMinimum": 0, "maximum": 5},
            {"multipleOf": 3},
            {"multipleOf": 0.5, "maximum": 20},
            {"exclusiveMinimum": 0, "maximum": 0.5},
            {"minimum": -1.5, "exclusiveMaximum": -1},
        ]
        return {"type": self.rng.choice(["integer", "number"])} | self.rng.choice(more)

    def _enum(self, _: int) -> dict[str, Any]:
        return self.rng.choice([{"const": 3}, {"enum": [1, "a", None, True, [1], {"a": 1}]}])

    def _any(self, _: int) -> dict[str, Any]:
        kinds: list[dict[str, Any]] = [{}, {"type": "null"}, {"type": ["boolean", "string"]}]
        return self.rng.choice([*kinds, {"$ref": "#/$defs/node"}, {"$ref": "#/$defs/other"}])

    def _object(self, depth: int) -> dict[str, Any]:
        if self.rng.random() < 0.2:
            return self._map(depth)
        keys = self.rng.sample(KEYS, self.rng.randint(0, 4))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {key: self.schema(depth) for key in keys},
            "required": [key for key in keys if self.rng.random() < 0.4],
        }
        if self.rng.random() < 0.1 and keys:
            schema["properties"][keys[0]] = False
        rest = self.rng.choice([None, False, False, {"type": "integer"}])
        return self._counted(schema if rest is None else schema | {"additionalProperties": rest})

    def _map(self, depth: int) -> dict[str, Any]:
        """An object whose keys follow patterns."""
        patterns = self.rng.choice([["^[ab]"], ['^[^"]*$'], ["^a", "^[^a]"]])
        schema = {
            "type": "object",
            "patternProperties": {pattern: self.schema(max(depth, 0)) for pattern in patterns},
        }
        rest = self.rng.choice([None, False, {"type": "boolean"}])
        return self._counted(schema if rest is None else schema | {"additionalProperties": rest})

    def _counted(self, schema: dict[str, Any]) -> dict[str, Any]:
        if self.rng.random() < 0.25:
            schema["minProperties"] = self.rng.randint(1, 3)
        if self.rng.random() < 0.25:
            schema["maxProperties"] = schema.get("minProperties", 0) + self.rng.randint(0, 2)
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "items": self.schema(depth)}
        if self.rng.random() < 0.3:
            schema["prefixItems"] = [self.schema(0)]
        if self.rng.random() < 0.5:
            schema["minItems"] = self.rng.randint(0, 2)
            schema["maxItems"] = schema["minItems"] + self.rng.randint(0, 2)
        return schema

    def _either(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.schema(depth), self.schema(depth)]}

    def bounds(self) -> tuple[dict[str, Any], list[str]]:
        """Draws the schema of a number with bounds, and numbers near them, as JSON."""
        names = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
        base = self._bound()
        schema: dict[str, Any] = {
            name: self.rng.choice([self._bound(), base, base + 1, base - 1, base + 0.5])
            for name in self.rng.sample(names, self.rng.randint(1, 3))
        }
        near: list[str] = ["0", "-0"]
        for bound in schema.values():
            exact = Decimal(repr(bound))
            unit = Decimal(10) ** min(0, int(exact.as_tuple().exponent))
            steps = (0, unit, -unit, unit / 10, -unit / 10, 1, -1, round(exact) - exact)
            near += [format(exact + step, "f") for step in steps]
        kind = self.rng.choice([{}, {"type": "number"}, {"type": "integer"}])
        if self.rng.random() < 0.3:
            schema = {"allOf": [{name: bound} for name, bound in schema.items()]}
        return kind | schema, near

    def _bound(self) -> int | float:
        if self.rng.random() < 0.5:
            return self.rng.randint(-20, 20)
        digits = self.rng.randint(1, 9)
        number = self.rng.randint(-(10**digits), 10**digits)
        return float(f"{number}e{-self.rng.randint(0, digits + 2)}")

    def value(self, schema: Any, root: dict[str, Any], depth: int = 6) -> Any:
        """A value that often fits, with properties in the schema's order."""
        if depth == 0 or not isinstance(schema, dict) or self.rng.random() < 0.04:
            return self._simple()
        if "$ref" in schema:
            target = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
            return self.value(target, root, depth - 1)
        if "anyOf" in schema:
            return self.value(self.rng.choice(schema["anyOf"]), root, depth - 1)
        if "const" in schema or "enum" in schema:
            return self.rng.choice(schema.get("enum", [schema.get("const")]))
        kind = schema.get("type")
        kind = self.rng.choice(kind) if isinstance(kind, list) else kind
        if kind == "object":
            return self._members(schema, root, depth)
        if kind == "array":
            least = schema.get("minItems", 0)
            count = self.rng.randint(least, schema.get("maxItems", least + 3))
            first = schema.get("prefixItems", [])
            parts = [first[i] if i < len(first) else schema.get("items") for i in range(count)]
            return [self.value(part, root, depth - 1) for part in parts]
        if kind == "string":
            return self.rng.choice(TEXTS)
        if kind in ("integer", "number"):
            return self.rng.choice([0, 1, 3, -2, 6, 12, 15, 2.5, -0.5, 1e20])
        return None if kind == "null" else self.rng.choice([True, False])

    def _members(self, schema: dict[str, Any], root: dict[str, Any], depth: int) -> dict[str, Any]:
        needed = schema.get("required", [])
        found = {
            key: self.value(part, root, depth - 1)
            for key, part in schema.get("properties", {}).items()
            if self.rng.random() < (0.97 if key in needed else 0.5)
        }
        parts = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
        for key in self.rng.sample(["other", "ab", "b", 'q"'], self.rng.choice([0, 0, 1, 2])):
            if key not in schema.get("properties", {}):
                found[key] = self.value(self.rng.choice(parts), root, depth - 1)
        return found

    def _simple(self) -> Any:
        return self.rng.choice([0, "a", None, True, [], {}, 3, 7, "x"])


def judge(schema: Any, without: Collection[str] = ()) -> Any:
    """The validator of the schema without some keywords. It wants values of `read`."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    names = {name for left_out in without for name in (left_out, *_DEPENDENT.get(left_out, ()))}
    return _Exact(_without(exact, names), format_checker=_Exact.FORMAT_CHECKER)


def read(text: str) -> Any:
    """The value of a JSON text, with exact numbers; of a key that comes twice, the last one."""
    return json.loads(text, parse_float=_exact)


def _exact(text: str) -> Decimal:
    try:
        return Decimal(text)
    except decimal.InvalidOperation:  # its exponent has more than 18 digits
        return Decimal("0.123")


def is_valid(validator: Any, value: Any) -> bool:
    with decimal.localcontext(prec=2000):
        return bool(validator.is_valid(value))


def _without(schema: Any, names: Collection[str]) -> Any:
    if isinstance(schema, list):
        return [_without(item, names) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _without(value, names) for key, value in schema.items() if key not in names}


def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("$", r"\Z"), re.ASCII)


def _pattern(_: Any, pattern: str, value: Any, __: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and not _expression(pattern).search(value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: dict[str, Any], value: Any, _: Any
) -> Iterator[ValidationError]:
    for pattern, part in patterns.items() if isinstance(value, dict) else ():
        for key, item in value.items():
            if _expression(pattern).search(key):
                yield from validator.descend(item, part, path=key, schema_path=pattern)


def _multiple_of(_: Any, step: Any, value: Any, __: Any) -> Iterator[ValidationError]:
    if isinstance(value, (int, Decimal)) and not isinstance(value, bool):
        has_huge_exponent = isinstance(value, Decimal) and value.adjusted() > 1000
        if has_huge_exponent or value % step:  # a multiple is written without an exponent
            yield ValidationError(f"{value} is no multiple of {step}")


_Exact = extend(
    Draft202012Validator,
    {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "multipleOf": _multiple_of,
    },
)
