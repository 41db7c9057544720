"""Parsers for argparse that refuse impossible values of options with a clear message.

Knows no options. Torch-free. Used by bench.cli, cluster.cli and benchmarks/.
"""

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

MAX_SEED = (1 << 63) - 1


def shown(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wraps `parse` for argparse, which shows only the message of an ArgumentTypeError."""

    def checked(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Returns a parser of integers from low to high, both included."""
    wanted = f"at least {low}" if high is None else f"from {low} to {high}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"must be an integer, {wanted}, not {text!r}") from None
        if value < low or (high is not None and value > high):
            raise ValueError(f"must be {wanted}, not {value}")
        return value

    return shown(parse)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"must be a finite number above 0, not {text!r}")
    return value


POSITIVE = shown(_positive)
SEED = integer(0, MAX_SEED)
VOCAB_SIZE = integer(2, 1 << 31)
