"""Prompt rows of a step where no time between tokens is promised."""

import random
import statistics

import pytest
from engine.paper_time import PaperTime, poisson
from engine.test_step_model import taught

from pdserve.configs.router import SloConfig
from pdserve.engine.pacing.step_model import MOST_EFFICIENT, StepLoad, StepModel
from pdserve.engine.pacing.unpromised import STALL_S, unpromised_rows

DECODES = StepLoad(0, 8, 16_000)
LEAST = 128


@pytest.fixture(scope="module")
def model() -> StepModel:
    return taught()


def rows(model: StepModel, wanted: int, longest: float = 0.0, expects_streams: bool = False) -> int:
    return unpromised_rows(model, [DECODES], longest, LEAST, wanted, 0, expects_streams)[0]


def test_a_prompt_that_waits_alone_has_short_chunks(model: StepModel) -> None:
    chunk = max(MOST_EFFICIENT, model.longest_rows(DECODES))
    assert chunk < 800 < model.prompt_rows_within(STALL_S, DECODES)
    assert rows(model, 1500) == chunk
    assert rows(model, chunk + 50) == chunk + 50, "no step is left for the last rows"


def test_what_would_still_wait_after_the_next_steps_is_computed_now(model: StepModel) -> None:
    soon = model.prompt_rows_within(STALL_S, DECODES)
    assert rows(model, soon + 1000, longest=0.2) == 1000
    assert rows(model, soon + 2000, longest=0.2) == 2000


def test_where_streams_are_handed_over_chunks_stay_short(model: StepModel) -> None:
    chunk = max(MOST_EFFICIENT, model.longest_rows(DECODES))
    assert rows(model, 100_000, longest=0.2, expects_streams=True) == chunk
    assert rows(model, chunk + 50, longest=0.2, expects_streams=True) == chunk + 50


@pytest.mark.parametrize("longest", [0.0, 0.1])
def test_no_step_takes_longer_than_it_may(model: StepModel, longest: float) -> None:
    given = rows(model, 100_000, longest)
    seconds = model.seconds(DECODES.with_prompt(given, 0))
    assert seconds == pytest.approx(max(STALL_S, longest), rel=0.02)


def test_a_worthwhile_chunk_is_always_given(model: StepModel) -> None:
    crowded = StepLoad(0, 500, 10_000_000)
    assert model.decode_seconds(crowded) > STALL_S
    assert unpromised_rows(model, [crowded], 0.0, LEAST, 4000, 0, False) == [LEAST]


def test_each_home_has_rows_for_its_own_decodes(model: StepModel) -> None:
    crowded = StepLoad(0, 200, 600_000)
    given = unpromised_rows(model, [DECODES, crowded], 0.0, LEAST, 100_000, 0, False)
    assert given[0] > given[1] >= LEAST


def test_tokens_come_sooner_than_in_steps_of_whole_prompts() -> None:
    """One H200 with 10 requests per second, against an engine without a pace."""

    def typical(slo: SloConfig | None) -> tuple[float, float]:
        engine = PaperTime(slo)
        calls = poisson(random.Random(0), 10, 20, lambda: 2048, lambda: 128)
        courses = engine.run(calls)
        engine.assert_empty()
        tpot = statistics.median(course.tpot_s for course in courses)
        return tpot, statistics.median(course.ttft_s for course in courses)

    (tpot, ttft), (whole_tpot, whole_ttft) = typical(SloConfig()), typical(None)
    assert tpot < 0.9 * whole_tpot
    assert ttft < 1.25 * whole_ttft
