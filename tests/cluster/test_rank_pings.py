"""The answers of a worker's ranks, and the gauge of their steps' ages."""

import asyncio

import pytest

from pdserve.cluster.deployments.rank_pings import Answers, StepAges, ping
from pdserve.protocol.metric_families import families_of


async def answering(age: float) -> float:
    return age


async def frozen() -> float:
    await asyncio.sleep(60)
    return 0.0


async def dead() -> float:
    raise ConnectionError("it is gone")


async def test_all_ranks_answer() -> None:
    answers = await ping([answering(0.0), answering(2.5)], 5.0)
    assert answers.ages == [0.0, 2.5] and answers.complaint == ""


async def test_a_frozen_rank_is_named_with_the_age_of_the_step() -> None:
    ranks = [answering(4.26), frozen(), answering(0.0), frozen()]
    answers = await ping(ranks, 0.05)
    assert answers.ages == [4.26, None, 0.0, None]
    assert answers.complaint == "no answer from rank 1, 3 (rank 0's step has run for 4.3 s)"
    assert Answers([0.0, None]).complaint == "no answer from rank 1"
    assert Answers([None, 3.0]).complaint == "no answer from rank 0"


async def test_what_a_rank_raises_is_raised() -> None:
    with pytest.raises(ConnectionError, match="it is gone"):
        await ping([answering(0.0), dead()], 5.0)


def test_the_gauge_keeps_the_last_age_of_a_rank_that_is_silent() -> None:
    ages = StepAges()
    ages.tell(Answers([0.5, 1.5]))
    ages.tell(Answers([3.5, None]))
    [family] = families_of(ages.registry)
    assert (family.name, family.kind) == ("pdserve_engine_step_age_seconds", "gauge")
    assert [(s.labels, s.value) for s in family.samples] == [
        ({"rank": "0"}, 3.5),
        ({"rank": "1"}, 1.5),
    ]
