"""Limits of grammars and names of members, checked before anything parses them.

A small body must not keep a core busy for seconds, and no part of it is ignored. These are plain
functions that raise a ValueError that names the field and the cure. The other files of this package
call them, and so do the dialects' readers of forms.
"""

from collections.abc import Collection, Mapping
from typing import Any

MAX_BYTES = (
    1 << 17
)  # Size of a schema, a regular expression or a grammar; OpenAI takes 120,000 characters.
MAX_DEPTH = 100  # Nested lists and objects of a schema; llguidance's parser ends at 128.
MAX_CHOICES = 32_768  # Number of choices, or of values of all enums of a schema together.
MAX_TAGS = 256  # Structures of one structural tag.
MAX_TOOLS = 256


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


def check_members(
    given: Mapping[str, Any],
    known: Collection[str],
    field: str,
    neutral: Mapping[str, Any] | None = None,
) -> None:
    """Raises ValueError for a member that is none of `known`. Others may only be null, or have
    its value in `neutral`, which asks for nothing."""
    for name, value in given.items():
        if name in known or value is None or (neutral and neutral.get(name) == value):
            continue
        raise ValueError(
            f"{field}.{name!s:.80} is not supported: leave it out, or use {', '.join(known)}"
        )


def flag_of(value: Any, field: str) -> bool:
    """Returns a member that is true or false; null is false. Raises ValueError for other values."""
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{field} must be true or false, not {value!r:.80}")
    return bool(value)
