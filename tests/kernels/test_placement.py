"""Placements of experts on ranks: every expert somewhere, loads spread, the same every time; and
the files that say the load."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kernels.experts.load_file import read_load, write_load
from pdserve.kernels.experts.placement import Placement, place_experts


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, int, int, list[int] | None]:
    """Experts, ranks, further copies, and the load of each expert or None."""
    num_experts = draw(st.integers(1, 24))
    num_ranks = draw(st.integers(1, 8))
    most = num_experts * num_ranks - num_experts
    counts = st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts)
    return num_experts, num_ranks, draw(st.integers(0, most)), draw(st.none() | counts)


def loads(placement: Placement, load: list[int]) -> list[float]:
    """Rows of each rank, when an expert's copies get equally many."""
    return [
        sum(load[expert] / len(placement.copies[expert]) for expert in held)
        for held in placement.experts
    ]


@given(problems())
def test_every_expert_is_somewhere_and_on_no_rank_twice(
    problem: tuple[int, int, int, list[int] | None],
) -> None:
    num_experts, num_ranks, num_redundant, load = problem
    placement = place_experts(num_experts, num_ranks, num_redundant, load)
    assert placement == place_experts(num_experts, num_ranks, num_redundant, load)
    assert len(placement.copies) == num_experts and placement.num_ranks == num_ranks
    assert {len(held) for held in placement.experts} == {placement.num_local}
    assert 0 <= placement.num_copies - num_experts - num_redundant < num_ranks
    for held in placement.experts:
        assert list(held) == sorted(set(held))
    for expert, copies in enumerate(placement.copies):
        assert copies, "an expert is nowhere"
        for copy in copies:
            rank, local = divmod(copy, placement.num_local)
            assert placement.experts[rank][local] == expert
    assert sum(map(len, placement.copies)) == placement.num_copies


@given(problems())
def test_no_expert_that_could_have_a_further_copy_is_busier_than_a_copy_is_worth(
    problem: tuple[int, int, int, list[int] | None],
) -> None:
    """A copy taken away would leave its expert at least as busy as any that has fewer copies than
    there are ranks."""
    num_experts, num_ranks, num_redundant, load = problem
    placement = place_experts(num_experts, num_ranks, num_redundant, load)
    rows = load if load is not None and any(load) else [1] * num_experts
    counts = [len(copies) for copies in placement.copies]
    for expert in range(num_experts):
        if counts[expert] > 1:
            for other in range(num_experts):
                if counts[other] < num_ranks:
                    assert rows[expert] / (counts[expert] - 1) >= rows[other] / counts[other]


@given(problems())
def test_ranks_differ_by_the_busiest_expert_at_most(
    problem: tuple[int, int, int, list[int] | None],
) -> None:
    """Without further copies."""
    num_experts, num_ranks, _, load = problem
    if load is None or num_experts % num_ranks:
        return
    placement = place_experts(num_experts, num_ranks, 0, load)
    rows = loads(placement, load)
    assert sum(rows) == pytest.approx(sum(load))
    for a, b in combinations(range(num_ranks), 2):
        assert abs(rows[a] - rows[b]) <= max(load) + 1e-6


def test_alike_and_alone_they_stand_in_blocks() -> None:
    assert place_experts(8, 4).experts == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert place_experts(4, 1).experts == ((0, 1, 2, 3),)


def test_places_that_are_left_over_are_filled() -> None:
    placement = place_experts(6, 4)
    assert placement.num_copies == 8
    assert [len(copies) for copies in placement.copies] == [2, 2, 1, 1, 1, 1]


def test_the_busiest_experts_get_the_copies() -> None:
    load = [30, 1, 1, 16, 0, 0]
    placement = place_experts(6, 4, 2, load)
    assert [len(copies) for copies in placement.copies] == [2, 1, 1, 2, 1, 1]
    assert sorted(loads(placement, load)) == [9, 9, 15, 15]
    spread = place_experts(6, 2, 2, [30, 1, 1, 1, 0, 0])
    assert [len(copies) for copies in spread.copies] == [2, 2, 1, 1, 1, 1], "one for each rank"


def test_a_layer_that_nobody_asked_is_placed_as_if_all_were_alike() -> None:
    assert place_experts(6, 3, 3, [0] * 6) == place_experts(6, 3, 3)


@pytest.mark.parametrize(
    ("num_redundant", "said"),
    [
        (-1, r"engine\.redundant_experts \(-1\) must not be negative"),
        (13, r"engine\.redundant_experts \(13\) is too high: 4 ranks .* choose at most 12"),
    ],
)
def test_what_makes_no_sense_is_refused(num_redundant: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        place_experts(4, 4, num_redundant)


def test_a_load_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    write_load(path, {1: np.array([3, 0], dtype=np.int64), 10: [1, 2]})
    assert json.loads(path.read_text()) == {"1": [3, 0], "10": [1, 2]}
    assert read_load(path, [10], 2) == {10: (1, 2)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "load.json cannot be read as a load of experts"),
        ("[1]", "must hold"),
        ('{"2": [1, 2]}', r"lacks layers \[1\] of the model"),
        ('{"1": [1, 2, 3]}', "has 3 counts for layer 1, but the model has 2 experts"),
        ('{"1": 4}', "has no list of counts for layer 1"),
        ('{"1": [1, -2]}', "has -2 as the number of rows of expert 1 of layer 1"),
        ('{"1": [1.5, 2]}', "has 1.5 as the number of rows of expert 0 of layer 1"),
        ('{"1": [true, 2]}', "has True as the number of rows"),
    ],
)
def test_a_file_that_says_no_load_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_load(path, [1], 2)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json cannot be read"):
        read_load(tmp_path / "none.json", [1], 2)
