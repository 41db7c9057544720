"""docs/performance.md holds the tables that the saved results make."""

import pytest

from benchmarks import performance


def test_the_tables_are_up_to_date() -> None:
    page = performance.PAGE.read_text()
    assert performance.with_tables(page, performance.tables()) == page, (
        "run: python -m benchmarks.performance"
    )


def test_a_place_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="no place for the table engine"):
        performance.with_tables("# Performance", {"engine": "|a|"})


def test_every_plot_of_the_page_is_there() -> None:
    names = ["engine-speed", "pair-latency", "several-gpus"]
    for name in names:
        assert (performance.IMAGES / f"{name}.svg").read_text().lstrip().startswith("<?xml")
        assert f"images/{name}.svg" in performance.PAGE.read_text()
