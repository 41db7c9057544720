"""Limits of grammars, looked at before anything parses them.

A small body must not keep a core busy for seconds. Plain functions that raise ValueError naming the
field and the cure. Called by the other files of this package.
"""

from typing import Any

MAX_BYTES = (
    1 << 17
)  # of a schema, a regular expression or a grammar; OpenAI takes 120,000 characters
MAX_DEPTH = 100  # of lists and objects in a schema; llguidance's parser ends at 128
MAX_CHOICES = 32_768  # values of all enums of a schema together, or choices
MAX_TAGS = 256  # structures of a structural tag
MAX_TOOLS = 256


def check_bytes(text: str, field: str) -> None:
    """ValueError when the text is empty, longer than MAX_BYTES or no Unicode."""
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
    """ValueError when values are nested deeper than MAX_DEPTH, or enums are longer than MAX_CHOICES
    together. Walks without recursion."""
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
    """ValueError when there are more than MAX_CHOICES."""
    if count > MAX_CHOICES:
        raise ValueError(
            f"{field} holds {count} values to choose from or more, and may hold {MAX_CHOICES}: "
            "send fewer, or a pattern"
        )
