"""Grammars that are made to do harm: each is answered in time, and costs nobody else anything."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdserve.text.grammars.checker import GrammarChecker, checked_grammar
from pdserve.text.grammars.structured import structured_of

pytestmark = pytest.mark.processes

SECONDS = 5.0


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    found = GrammarChecker(SECONDS)
    yield found
    found.close()


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def doubling(count: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for i in range(count):
        kinds = [{"type": "object", "properties": {f"{name}{i}": schema}} for name in "ab"]
        schema = {"anyOf": kinds}
    return schema


def choosing(count: int) -> dict[str, Any]:
    parts = [
        {
            "anyOf": [
                {"type": "object", "properties": {f"{x}{i}": {}}, "required": [f"{x}{i}"]}
                for x in "ab"
            ]
        }
        for i in range(count)
    ]
    return {"allOf": parts}


def chain(count: int) -> str:
    rules = [f'r{i}: "a" | r{(i + 1) % count} "b"' for i in range(count)]
    return "start: r0\n" + "\n".join(rules)


HOSTILE: dict[str, Callable[[], dict[str, Any]]] = {
    "nesting": lambda: {"guided_json": json.loads(nested(400))},
    "nesting as text": lambda: {"guided_json": nested(900)},
    "nesting, more than Python's stack": lambda: {"guided_json": nested(100_000)},
    "a long enum": lambda: {"guided_json": {"enum": list(range(20_000))}},
    "a longer enum": lambda: {"guided_json": {"enum": list(range(40_000))}},
    "many choices": lambda: {"guided_choice": [str(i) for i in range(20_000)]},
    "anyOf in anyOf": lambda: {"guided_json": doubling(12)},
    "anyOf in anyOf, small enough": lambda: {"guided_json": doubling(10)},
    "anyOf in allOf": lambda: {"guided_json": choosing(12)},
    "itself": lambda: {"guided_json": {"$ref": "#"}},
    "requires itself": lambda: {
        "guided_json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    },
    "many properties": lambda: {
        "guided_json": {"type": "object", "properties": {f"p{i}": {} for i in range(4500)}}
    },
    "counts of counts": lambda: {"guided_regex": "((((a{1,500}){1,500}){1,500}){1,500})"},
    "a great count": lambda: {"guided_regex": "a{1000000}"},
    "groups in Lark": lambda: {"guided_grammar": "start: " + "(" * 900 + '"a"' + ")" * 900},
    "groups in EBNF": lambda: {"guided_grammar": "root ::= " + "(" * 900 + '"a"' + ")" * 900},
    "a chain of rules": lambda: {"guided_grammar": chain(4500)},
    "rules that double": lambda: {
        "guided_grammar": "start: a0\n"
        + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60))
        + '\na60: "x" | ""'
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_each_is_answered_in_time(name: str, checker: GrammarChecker) -> None:
    fields = HOSTILE[name]()
    began = time.monotonic()
    try:
        asked = structured_of(fields)
        assert asked is not None
        checked_grammar(asked, checker)
    except ValueError as error:
        field = next(iter(fields))
        assert str(error).startswith(field) and len(str(error)) < 1000
    assert time.monotonic() - began < SECONDS + 3


def test_what_ends_the_process_is_an_error_and_the_next_one_works(checker: GrammarChecker) -> None:
    with pytest.raises(ValueError, match=r"guided_grammar.*too large, or nested too deeply"):
        checker.unenforced(
            "start: " + " ".join(f"r{i}" for i in range(9000)) + "\n" + chain(9000)[10:],
            "guided_grammar",
        )
    assert checker.unenforced('start: "a"', "guided_grammar") == ()


def test_what_takes_too_long_ends_and_others_do_not_wait() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}
    slow = f'{{"grammars": [{{"json_schema": {json.dumps(schema)}}}]}}'
    checker = GrammarChecker(0.2, num_processes=2)
    checker.unenforced('start: "a"', "x")  # one process is there
    results: list[str] = []

    def ask() -> None:
        try:
            checker.unenforced(slow, "guided_json")
        except ValueError as error:
            results.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    longest = 0.0
    for number in range(20):
        began = time.monotonic()
        checker.unenforced(f'start: "{number}"', "x")
        longest = max(longest, time.monotonic() - began) if number else 0.0
    thread.join()
    assert longest < 0.2
    assert len(results) == 1 and "it takes longer than 0.2 s" in results[0]
    with pytest.raises(ValueError, match="longer"):  # remembered
        checker.unenforced(slow, "guided_json")
    assert checker.num_built == 22
    checker.close()


def test_a_verdict_is_remembered(checker: GrammarChecker) -> None:
    before = checker.num_built
    for _ in range(3):
        assert checker.unenforced('start: "seen once"', "x") == ()
        with pytest.raises(ValueError, match="y cannot be used"):
            checker.unenforced("start: nowhere", "y")
    assert checker.num_built == before + 2


def test_nothing_stays_when_a_checker_ends() -> None:
    checker = GrammarChecker()
    checker.unenforced('start: "a"', "x")
    children = [p._child for p in list(checker._idle.queue) if p._child is not None]
    assert len(children) == 1
    checker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(children[0].pid, 0)
    assert checker.unenforced('start: "b"', "x") == ()  # it starts again
    checker.close()
