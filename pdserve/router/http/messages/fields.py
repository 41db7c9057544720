"""Checks nested fields, for all parts of a request. ValueErrors begin with the field."""

from collections.abc import Collection, Mapping
from typing import Any


def check_keys(given: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raises ValueError for a member that is none of these, unless it is null."""
    for key, value in given.items():
        if value is not None and key not in known:
            raise ValueError(
                f"{where}.{key:.80} is not supported: leave it out, or use {', '.join(known)}"
            )


def text_or_none(value: Any, where: str) -> str | None:
    """Returns the value, which must be a string or null."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where} must be a string, not {value!r:.80}")
    return value


def checked_text(value: Any, where: str) -> str:
    """Returns the value, which must be a string."""
    if not isinstance(value, str):
        raise ValueError(f"{where} must be a string, not {value!r:.80}")
    return value


def checked_name(value: Any, where: str, what: str) -> str:
    """Returns the value, which must be a string and not empty; `what` describes it."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where} must be {what}, not {value!r:.80}")
    return value
