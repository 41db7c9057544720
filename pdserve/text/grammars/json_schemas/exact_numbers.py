"""Numbers of JSON schemas as llguidance holds them: floats of 64 bits, 64-bit integers, and for
multipleOf integers of 32 bits.

A number that llguidance would hold as another one is refused, so that no answer breaks a bound
unnoticed. This module knows no other keywords. `schemas` calls it.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal
from itertools import combinations
from typing import Any, TypeGuard

NEXT_TO_ZERO = Decimal("1e-17")  # smallest positive number where 0 is excluded
DIGITS = 15  # of a decimal number that a float of 64 bits always holds
# (step from the bound to the first integer that fits, direction of the others)
_BOUNDS = {
    "minimum": (0, 1),
    "maximum": (0, -1),
    "exclusiveMinimum": (1, 1),
    "exclusiveMaximum": (-1, -1),
}
_MAX_FLOAT = 10**300
_MAX_INTEGER = (1 << 63) - 1
_MAX_MULTIPLE = 1 << 32


def check_numbers(schema: Mapping[str, Any]) -> None:
    """Raises ValueError, which names the keyword and the cure, if llguidance would enforce another
    number than the schema's."""
    for name in ("const", "enum", "multipleOf", *_BOUNDS):
        for value in leaves(schema.get(name)):
            if isinstance(value, float) and not _is_read(value):
                raise ValueError(f"{name} {value} has too many digits to be exact: round it")
    for name, (step, direction) in _BOUNDS.items():
        bound = schema.get(name)
        if not is_number(bound) or bound % 1:
            continue
        first = int(bound) + step
        if abs(first) > _MAX_FLOAT or (_as_integer(float(bound) + step) - first) * direction < 0:
            raise ValueError(f"{name} {bound!r:.80} is too large to be exact: send 2**53 at most")
    for name in ("const", "enum"):
        for value in leaves(schema.get(name)):
            if isinstance(value, int) and not isinstance(value, bool) and not _is_held(value):
                raise ValueError(
                    f"{name} holds {value!r:.80}, which is too large to be exact: send 2**53 at "
                    "most, or a string"
                )


def closed_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with inclusive bounds where llguidance would let an exclusive one itself
    through: 0 for {"exclusiveMinimum": 0, "maximum": 0.5}, and so every integer at which the
    numbers with its digits begin."""
    if schema.get("type") == "integer":
        return schema
    found = dict(schema)
    for closed, opened, direction in (
        ("minimum", "exclusiveMinimum", 1),
        ("maximum", "exclusiveMaximum", -1),
    ):
        other = found.get(closed)
        bound = other if found.get(opened) is True else found.get(opened)  # True: as in draft 4
        if not is_number(bound) or bound % 1 or bound * direction < 0:
            continue
        del found[opened]
        following = float(_following(abs(bound))) * direction
        has_more = is_number(other) and (other - following) * direction > 0
        found[closed] = other if has_more else following
    return found


def multiples_fit(schemas: Collection[Mapping[str, Any]]) -> bool:
    """False if schemas with different multipleOf may be merged, and llguidance cannot hold the
    common multiple."""
    if not any("allOf" in part or ("multipleOf" in part and "$ref" in part) for part in schemas):
        return True
    found = [part["multipleOf"] for part in schemas if is_number(part.get("multipleOf"))]
    exact = [Decimal(str(value)) for value in found]
    scale = 10 ** max((-int(value.as_tuple().exponent) for value in exact), default=0)
    return all(a * b * scale * scale < _MAX_MULTIPLE for a, b in combinations(exact, 2))


def leaves(value: Any) -> Iterator[Any]:
    """Returns the values in lists and objects, at any depth."""
    if isinstance(value, (Mapping, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(item)
    else:
        yield value


def is_number(value: Any) -> TypeGuard[int | float]:
    """True if the value is a number, but not infinite."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return is_integer or (isinstance(value, float) and math.isfinite(value))


def _following(bound: float) -> Decimal:
    """Returns the next number of DIGITS digits after a bound that is not negative."""
    exact = Decimal(bound)
    return exact + Decimal(10) ** (exact.adjusted() + 1 - DIGITS) if bound else NEXT_TO_ZERO


def _is_read(value: float) -> bool:
    """True if llguidance reads the float as it is: it multiplies the digits by a power of ten."""
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    if not isinstance(exponent, int) or abs(exponent) > 300:
        return False
    number, power = float("".join(map(str, digits))), float(f"1e{abs(exponent)}")
    return abs(value) == (number * power if exponent > 0 else number / power)


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
