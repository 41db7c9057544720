"""Grammars that are made to do harm: each is answered in time, and costs nobody else anything."""

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from pdserve.text.grammars.checker import QUICK_SECONDS, GrammarChecker, checked_grammar
from pdserve.text.grammars.line import GrammarsBusy, Line, Rule
from pdserve.text.grammars.probe import Finding, Make
from pdserve.text.grammars.structured import structured_of, structured_outputs

pytestmark = pytest.mark.processes

SECONDS = 5.0
SLACK_S = 1.0  # what a busy machine may add to the limit
# what a small one waits at most: one try of a hostile one, and twice its own time on a busy machine
SMALL_S = QUICK_SECONDS + 1.0


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    with closing(GrammarChecker(SECONDS)) as found:
        yield found


@pytest.fixture
def make() -> Iterator[Callable[..., GrammarChecker]]:
    """Makes checkers that start at once, and end with the test."""
    with ExitStack() as stack:

        def started(seconds: float = SECONDS) -> GrammarChecker:
            found = stack.enter_context(closing(GrammarChecker(seconds)))
            found.start()
            return found

        yield started


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
    checker.start()
    fields = HOSTILE[name]()
    began = time.monotonic()
    try:
        asked = structured_of(fields)
        assert asked is not None
        checked_grammar(asked, checker)
    except ValueError as error:
        field = next(iter(fields))
        assert str(error).startswith(field) and len(str(error)) < 1000
    assert time.monotonic() - began < SECONDS + SLACK_S


def slow(number: int) -> dict[str, Any]:
    """A schema of 800 bytes that takes longer than the limit: 10 s on a quiet machine."""
    parts = {f"p{i}": {"type": "integer", "multipleOf": 99991 - i} for i in range(12)}
    return {"type": "object", "title": f"{number}", "properties": parts, "required": list(parts)}


def large(number: int) -> dict[str, Any]:
    """A schema of 90 KB that is allowed: half a second on a quiet machine."""
    names = [f"p{number}_{i}" for i in range(3200)]
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}}


def test_several_are_answered_in_time_and_small_ones_beside_them_at_once(
    make: Callable[..., GrammarChecker],
) -> None:
    """Eight hostile ones, more than there are processes, and four large ones that are allowed.
    Meanwhile new small grammars come, one after the other."""
    checker = make()
    took: list[float] = []
    ends: Counter[str] = Counter()

    def ask(schema: dict[str, Any]) -> None:
        began = time.monotonic()
        try:
            checker.made(structured_outputs({"json": schema}))
            ends["usable"] += 1
        except ValueError as error:
            assert "structured_outputs.json cannot be used" in str(error)
            assert "it takes longer than 4.5 s" in str(error)
            ends["too slow"] += 1
        except GrammarsBusy as error:
            assert "structured_outputs.json: other grammars took the 5 s" in str(error)
            ends["busy"] += 1
        took.append(time.monotonic() - began)

    schemas = [*map(slow, range(8)), *map(large, range(4))]
    threads = [threading.Thread(target=ask, args=(schema,)) for schema in schemas]
    for thread in threads:
        thread.start()
    waits: list[float] = []
    while any(thread.is_alive() for thread in threads):
        began = time.monotonic()
        assert checker.unenforced(f'start: "{len(waits)}"', "x") == ()
        waits.append(time.monotonic() - began)
    assert sum(ends.values()) == len(schemas) and ends["too slow"] >= 1, ends
    assert max(took) < SECONDS + SLACK_S, took
    assert max(waits) < SMALL_S, waits


def test_what_has_no_turn_in_time_is_no_fault_and_known_the_next_time(
    make: Callable[..., GrammarChecker],
) -> None:
    """The build goes on without its request."""
    checker = make(1.0)
    first = [checker.ask(Make(structured_outputs({"json": slow(number)}))) for number in range(2)]
    last = structured_outputs({"json": slow(2)})
    with pytest.raises(GrammarsBusy, match=r"json: other grammars took the 1 s .* try again"):
        checker.made(last)
    assert all("it takes longer than 0.9 s" in future.result(10).error for future in first)
    until(lambda: checker.ask(Make(last)).done())
    with pytest.raises(ValueError, match=r"it takes longer than 0.9 s"):
        checker.made(last)


def test_equal_grammars_are_built_once(checker: GrammarChecker) -> None:
    checker.start()
    asked = Make(structured_outputs({"json": large(100)}))
    before = checker.num_built
    futures = [checker.ask(asked) for _ in range(20)]
    futures[0].cancel()
    assert all(not future.result(30).error for future in futures[1:])
    assert checker.num_built == before + 1


def test_the_line_gives_each_process_its_next() -> None:
    line = Line()
    for number, size in enumerate((30, 10, 20, 10)):
        line.ask(bytes([number]), bytes(size), "x")
    oldest = line.take(Rule.OLDEST)
    smallest = line.take(Rule.SMALLEST)
    quick = line.take(Rule.QUICK)
    assert oldest and smallest and quick
    assert [job.number for job in (oldest, smallest, quick)] == [1, 2, 4]
    line.put_back(quick)
    untried = line.take(Rule.QUICK)
    assert untried and untried.number == 3, "it is larger, but was not tried"
    after = line.take(Rule.OLDEST)
    assert after is quick
    line.close()
    assert line.take(Rule.OLDEST) is None


def test_the_quick_process_takes_nothing_that_another_one_has_the_time_for() -> None:
    line = Line()
    taken: list[Rule] = []

    def take(rule: Rule) -> None:
        if line.take(rule) is not None:
            taken.append(rule)

    threads = [threading.Thread(target=take, args=(rule,)) for rule in (Rule.QUICK, Rule.OLDEST)]
    for thread in threads:
        thread.start()
    until(lambda: line._num_idle == 1)
    for number in range(2):
        line.ask(bytes([number]), b"", "x")
        until(partial(lambda count: len(taken) == count, number + 1))
    line.close()
    for thread in threads:
        thread.join()
    assert taken == [Rule.OLDEST, Rule.QUICK]


def test_the_largest_leaves_a_full_line_and_so_does_what_nobody_wants() -> None:
    line = Line(max_waiting=2)
    small, large_one = line.ask(b"1", b"s", "small"), line.ask(b"2", b"large", "large")
    middle = line.ask(b"3", b"mid", "middle")
    with pytest.raises(GrammarsBusy, match=r"large: 2 grammars wait .* the largest: try again"):
        large_one.result(0)
    small.cancel()
    larger = line.ask(b"4", b"larger", "larger")
    assert not middle.done() and not larger.done()
    with pytest.raises(GrammarsBusy, match="largest"):
        line.ask(b"5", b"the largest", "x").result(0)
    job = line.take(Rule.OLDEST)
    assert job and job.field == "middle"
    line.answer(job, Finding("", "text"))
    assert middle.result(0).text == "text"
    line.close()
    with pytest.raises(GrammarsBusy, match="larger: grammars are not checked any more"):
        larger.result(0)


def test_what_ends_the_process_is_an_error_and_the_next_one_works(checker: GrammarChecker) -> None:
    with pytest.raises(ValueError, match=r"guided_grammar.*too large, or nested too deeply"):
        checker.unenforced(
            "start: " + " ".join(f"r{i}" for i in range(9000)) + "\n" + chain(9000)[10:],
            "guided_grammar",
        )
    assert checker.unenforced('start: "a"', "guided_grammar") == ()


def test_a_verdict_is_remembered(checker: GrammarChecker) -> None:
    before = checker.num_built
    for _ in range(3):
        assert checker.unenforced('start: "seen once"', "x") == ()
        with pytest.raises(ValueError, match="y cannot be used"):
            checker.unenforced("start: nowhere", "y")
    assert checker.num_built == before + 2


def children_of(pid: int | None) -> list[Path]:
    return [Path(f"/proc/{pid}/task/{pid}/children")]


def test_nothing_stays_when_a_checker_ends() -> None:
    checker = GrammarChecker()
    checker.unenforced('start: "a"', "x")
    parents = [process.pid for process in checker._processes.values()]
    children = [path.read_text().split() for pid in parents for path in children_of(pid)]
    forks = [int(child) for found in children for child in found]
    assert len(parents) == 3 and len(forks) == 1, "a fork is made when it is first needed"
    checker.close()
    for pid in (*parents, *forks):
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert checker.unenforced('start: "b"', "x") == ()  # it starts again
    checker.close()


def test_a_process_that_somebody_kills_is_replaced(make: Callable[..., GrammarChecker]) -> None:
    checker = make()
    checker.unenforced('start: "a"', "x")
    for process in checker._processes.values():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    for number in range(20):
        assert checker.unenforced(f'start: "{number}"', "x") == ()
