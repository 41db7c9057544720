"""Tables in wide and narrow terminals."""

import pytest

from pdserve.bench.tables import print_table

COLUMNS = ("name", "requests/s", "remark")
ROWS = [["[one]", "1.5", ""], ["two", "12.25", "slow"]]


def test_a_pipe_has_the_whole_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("The [title]", COLUMNS, ROWS, 60, left=("name",))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "The [title]"
    assert lines[2].split() == [*COLUMNS]
    assert [line.split() for line in lines[4:6]] == [["[one]", "1.5"], ["two", "12.25", "slow"]]
    assert lines[4].startswith("  [one]") and lines[5].endswith("slow")


@pytest.mark.parametrize(("columns", "is_table"), [("59", False), ("60", True)])
def test_a_narrow_terminal_has_a_paragraph_for_each_row(
    columns: str,
    is_table: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what is printed is taken for a terminal
    monkeypatch.setenv("COLUMNS", columns)
    print_table("The [title]", COLUMNS, ROWS, 60)
    out = capsys.readouterr().out
    assert ("- name [one]; requests/s 1.5\n" in out) != is_table
    assert ("- name two; requests/s 12.25; remark slow\n" in out) != is_table
    assert "The [title]" in out
