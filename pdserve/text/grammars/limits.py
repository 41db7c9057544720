"""Limits of grammars, checked before anything parses them.

A small body must not keep a core busy for seconds, and llguidance must be able to hold all values.
These are plain functions that raise a ValueError that names the field and the cure. The other files
of this package call them.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal
from itertools import combinations
from typing import Any

MAX_BYTES = (
    1 << 17
)  # Size of a schema, a regular expression or a grammar; OpenAI takes 120,000 characters.
MAX_DEPTH = 100  # Nested lists and objects of a schema; llguidance's parser ends at 128.
MAX_CHOICES = 32_768  # Number of choices, or of values of all enums of a schema together.
MAX_TAGS = 256  # Structures of one structural tag.
MAX_TOOLS = 256
# (step to the first integer that fits, direction of the others)
_BOUNDS = {
    "minimum": (0, 1),
    "maximum": (0, -1),
    "exclusiveMinimum": (1, 1),
    "exclusiveMaximum": (-1, -1),
}
_MAX_FLOAT = 10**300
_MAX_INTEGER = (1 << 63) - 1
_MAX_MULTIPLE = 1 << 32
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # see schemas.ESCAPES


def check_bytes(text: str, field: str) -> None:
    """Raises ValueError if the text is empty, longer than MAX_BYTES or not valid Unicode."""
    if not text:
        raise ValueError(f"{field} is empty: send what the answer must look like, or leave it out")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{field} holds half a surrogate pair: send valid Unicode") from error
    if num_bytes > MAX_BYTES:
        raise ValueError(
            f"{field} has {num_bytes} bytes, and may have {MAX_BYTES}: shorten it, for example "
            "by references to $defs"
        )


def check_schema_size(schema: Any, field: str) -> None:
    """Raises ValueError if values are nested deeper than MAX_DEPTH, or if all enums together have
    more than MAX_CHOICES values. Walks without recursion."""
    left: list[tuple[Any, int]] = [(schema, 1)]
    num_values = 0
    while left:
        value, depth = left.pop()
        if not isinstance(value, (dict, list)):
            continue
        if depth > MAX_DEPTH:
            raise ValueError(
                f"{field} is nested deeper than {MAX_DEPTH} lists and objects: flatten it, for "
                "example by references to $defs"
            )
        if isinstance(value, dict):
            if isinstance(value.get("enum"), list):
                num_values += len(value["enum"])
                check_choices(num_values, field)
            value = list(value.values())
        left += [(item, depth + 1) for item in value]


def check_choices(count: int, field: str) -> None:
    """Raises ValueError if there are more than MAX_CHOICES."""
    if count > MAX_CHOICES:
        raise ValueError(
            f"{field} holds {count} values to choose from or more, and may hold {MAX_CHOICES}: "
            "send fewer, or a pattern"
        )


def check_values(schema: Mapping[str, Any]) -> None:
    """Raises ValueError, which names the keyword, if llguidance would enforce another value than
    the schema's: it holds bounds as 64-bit floats, and cannot write all control characters."""
    for name, (step, direction) in _BOUNDS.items():
        bound = schema.get(name)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or bound % 1:
            continue
        first = int(bound) + step
        if abs(first) > _MAX_FLOAT or (_as_integer(float(bound) + step) - first) * direction < 0:
            raise ValueError(f"{name} {bound!r:.80} is too large to be exact: send 2**53 at most")
    for name in ("const", "enum"):
        for value in _leaves(schema.get(name)):
            if isinstance(value, str) and _UNWRITABLE.search(value):
                raise ValueError(
                    f"{name} holds {value!r:.80}, and its control character cannot be written: "
                    "leave it out"
                )
            if isinstance(value, int) and not isinstance(value, bool) and not _is_held(value):
                raise ValueError(
                    f"{name} holds {value}, which is too large to be exact: send 2**53 at most, or "
                    "a string"
                )


def multiples_fit(schemas: Collection[Mapping[str, Any]]) -> bool:
    """False if schemas with different multipleOf may be merged, and llguidance, which computes with
    32 bits, cannot hold the common multiple."""
    if not any("allOf" in part or ("multipleOf" in part and "$ref" in part) for part in schemas):
        return True
    found = [part["multipleOf"] for part in schemas if "multipleOf" in part]
    exact = [Decimal(str(value)) for value in found if isinstance(value, int | float)]
    scale = 10 ** max((-int(value.as_tuple().exponent) for value in exact), default=0)
    return all(a * b * scale * scale < _MAX_MULTIPLE for a, b in combinations(exact, 2))


def _leaves(value: Any) -> Iterator[Any]:
    """Returns the values in lists and objects, at any depth."""
    if isinstance(value, (Mapping, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)
    else:
        yield value


def _is_held(value: int) -> bool:
    """True if llguidance writes the integer as it is. Beyond 64 bits it writes the shortest digits
    that give the same float."""
    if abs(value) > _MAX_FLOAT:
        return False
    if abs(value) > _MAX_INTEGER:
        return int(Decimal(repr(float(value)))) == value
    return _as_integer(float(value)) == value


def _as_integer(value: float) -> int:
    """Returns the integer of 64 bits that llguidance makes of a float."""
    return max(-_MAX_INTEGER - 1, min(_MAX_INTEGER, int(value)))
