"""The verdicts of tests/mutations.py, over a tree of one function and its tests."""

from pathlib import Path

import pytest
from mutations import GOOD, Mutation, Outcome, Verdict, _verdict, read_list, table, try_all, try_one

SOURCE = """def largest(numbers):
    best = numbers[0]
    for number in numbers:
        if number > best:
            best = number
    return best
"""
TESTS = """import pytest
from pdserve.largest import largest

def test_one():
    assert largest([4]) == 4

def test_last():
    assert largest([1, 2]) == 2
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for folder, name, text in (
        ("pdserve", "largest.py", SOURCE),
        ("tests", "test_largest.py", TESTS),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '-q'\n")
    return tmp_path


def mutation(
    old: str, new: str, survives: str = "", guard: str = "tests/test_largest.py"
) -> Mutation:
    return Mutation(f"{old} {new}", "pdserve/largest.py", old, new, (guard,), survives=survives)


def verdict(tree: Path, *arguments: str, limit_s: float = 60.0) -> tuple[Verdict, str]:
    outcome = try_one(mutation(*arguments), tree, limit_s)
    assert (tree / "pdserve" / "largest.py").read_text() == SOURCE, "the mutation is taken back"
    return outcome.verdict, outcome.by


@pytest.mark.processes
@pytest.mark.slow
def test_verdicts(tree: Path) -> None:
    assert verdict(tree, "number > best", "number < best") == (
        "caught",
        "tests/test_largest.py::test_last",
    )
    equal = "equal ones are the same"
    assert verdict(tree, "number > best", "number >= best", equal) == (
        "survived, with a reason",
        equal,
    )
    assert verdict(tree, "number > beast", "")[0] == "moved"
    assert verdict(tree, "best", "worst")[0] == "moved", "the text is there several times"
    assert verdict(tree, "> best", "< best", "", "tests/nowhere.py")[0] == "broken"
    endless = verdict(tree, "    for number", "    while True: pass\n    for number", limit_s=3.0)
    assert endless == ("caught", "no end within 3 s")


def test_only_what_is_caught_or_has_a_reason_is_good() -> None:
    verdicts = [
        _verdict(is_caught, reason) for is_caught in (True, False) for reason in ("", "a reason")
    ]
    assert verdicts == [
        "caught",
        "caught, but said to be equivalent",
        "survived",
        "survived, with a reason",
    ]
    assert [each for each in verdicts if each in GOOD] == ["caught", "survived, with a reason"]


@pytest.mark.processes
@pytest.mark.slow
def test_every_seed_must_catch_it(tree: Path) -> None:
    tests = tree / "tests" / "test_largest.py"
    tests.write_text(
        TESTS.replace(
            "def test_last():",
            "def test_last(request):\n    if request.config.option.hypothesis_seed == '2': return",
        )
    )
    lucky = Mutation("x", "pdserve/largest.py", "> best", "< best", ("tests",), seeds=(1, 2, 3))
    assert try_one(lucky, tree).verdict == "survived"


@pytest.mark.processes
@pytest.mark.slow
def test_guards_must_pass_without_mutation(tree: Path) -> None:
    (tree / "tests" / "test_largest.py").write_text(TESTS.replace("== 2", "== 3"))
    with pytest.raises(RuntimeError, match="fails without any mutation"):
        try_all([mutation("> best", "< best")], tree)


def test_the_table_says_who_caught_it() -> None:
    by = "tests/a.py::test_b[1-2|3]"
    [_, _, line] = table([Outcome(mutation("1", "2"), "caught", by, 2.6)]).splitlines()
    assert line == "| 1 2 | largest.py | caught | a.py::test_b | 3 |"


def test_the_list_is_read_and_checked(tmp_path: Path) -> None:
    mutations = read_list(Path(__file__).with_name("mutations.toml"))
    assert len(mutations) >= 20
    assert {Path(mutation.file).parts[1] for mutation in mutations} >= {
        "engine",
        "prefill",
        "decode",
        "kvtransfer",
        "router",
    }
    entry = '[[mutation]]\nname = "a"\nfile = "f"\nold = "1"\nnew = "{}"\nguards = []\n'
    path = tmp_path / "list.toml"
    for text in (entry.format(1), entry.format(2) * 2):
        path.write_text(text)
        with pytest.raises(ValueError, match="must change something"):
            read_list(path)


def test_every_mutation_of_the_list_finds_its_text_once() -> None:
    root = Path(__file__).parent.parent
    mutations = read_list(root / "tests" / "mutations.toml")
    assert len(mutations) > 50
    assert [each.name for each in mutations if each.mutated(root) is None] == []
