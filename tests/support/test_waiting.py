"""Tests what a wait in a test says when it fails."""

from functools import partial
from typing import Any

import pytest
from support.waiting import Condition, complaint, until, until_async

LIMIT = 3


def is_full(got: list[int], size: int) -> bool:
    return len(got) >= size


def told(condition: Condition, seconds: float = 0.01) -> list[str]:
    with pytest.raises(AssertionError) as caught:
        until(condition, seconds)
    return str(caught.value).splitlines()


def test_what_was_awaited_and_what_it_was_at_last() -> None:
    got = [1, 2]
    name = "x"
    first = "did not come true within 0.01 s: "
    assert told(lambda: len(got) == LIMIT) == [
        f"{first}len(got) == LIMIT",
        "    got = [1, 2]",
        "    LIMIT = 3",
    ]
    assert told(lambda: len(got) > 2 or not (name == "x" or got)) == [
        f'{first}len(got) > 2 or not (name == "x" or got)',
        "    got = [1, 2]",
        "    name = 'x'",
    ]
    assert told(lambda: any(number > 5 for number in got))[1:] == ["    got = [1, 2]"]
    assert told(
        lambda: name.startswith("y")
        and got
    )[0] == f"{first}name.startswith(\"y\") and got"  # fmt: skip
    # mypy infers no lambda with defaults where it is passed
    with_default: Any = lambda got=got: got[2:]  # noqa: E731
    assert told(with_default) == [f"{first}got[2:]", "    got[2:] = []"]
    assert told(partial(is_full, got, 3)) == [f"{first}is_full([1, 2], 3)"]


def test_a_function_tells_its_variables() -> None:
    got = list(range(1000))

    def is_empty() -> bool:
        return not got

    [first, second] = told(is_empty)
    assert (
        first.endswith("is_empty")
        and second.startswith("    got = [0, 1, 2")
        and second.endswith("characters)")
    )


def test_a_part_that_raises_costs_no_message() -> None:
    parts = dict(ready=False)
    assert "(KeyError: 'done')" in complaint(lambda: parts["ready"] and parts["done"], 1.0)


def test_the_value_is_the_last_one() -> None:
    seen: list[int] = []
    with pytest.raises(AssertionError, match=r"seen = \[0(, 0)*\]"):
        until(lambda: 1 in seen, 0.02, doing=lambda: seen.append(0))


async def test_in_asyncio() -> None:
    got = [1]
    with pytest.raises(AssertionError, match=r"got = \[1\]"):
        await until_async(lambda: got == [], 0.01)
    await until_async(lambda: got)
