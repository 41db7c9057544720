"""The golden script sees what differs between two commits (`tests/golden.py`)."""

from collections import Counter

from golden import compare, lost_tests


def row(shows: str, digest: str = "") -> dict[str, str]:
    return {"digest": digest or shows, "shows": shows}


def test_equal_sides_have_no_difference() -> None:
    sides = {"a": row("[1, 2]"), "b": row("[]")}
    assert compare(sides, dict(sides)) == []


def test_a_difference_is_shown_where_it_begins() -> None:
    [line] = compare({"engine x": row("[1, 2, 3]")}, {"engine x": row("[1, 2, 4]")})
    assert line.startswith("engine x: ") and "'[1, 2, 3]'" in line and "'[1, 2, 4]'" in line


def test_a_difference_beyond_what_is_shown_counts() -> None:
    assert len(compare({"a": row("same", "1")}, {"a": row("same", "2")})) == 1


def test_a_case_of_one_side_only_counts() -> None:
    assert compare({"a": row("1"), "b": row("2")}, {"a": row("1"), "c": row("2")}) == [
        "b: only in the old side",
        "c: only in the new side",
    ]


def test_a_lost_test_is_named_and_a_new_one_is_not() -> None:
    old = Counter({"test_a": 2, "test_b[x]": 1})
    new = Counter({"test_a": 1, "test_b[x]": 1, "test_c": 1})
    assert lost_tests(old, new) == ["test test_a: 2 before, 1 now"]
