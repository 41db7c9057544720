"""The step-time model on made-up steps: what it learns, keeps, and does not believe."""

import random
from collections.abc import Callable

import pytest

from pdserve.engine.pacing.lengths import Lengths
from pdserve.engine.pacing.need import Need, Prompt, need_of
from pdserve.engine.pacing.promise import LONGEST, YOUNG, Promise, begun
from pdserve.engine.pacing.step_model import (
    EXPLORED,
    FIRST_ROWS,
    KNEE,
    MOST_EFFICIENT,
    StepLoad,
    StepModel,
)

Device = Callable[[StepLoad], float]


def device(load: StepLoad) -> float:
    """Not of the model's form: reading weights or computing, whichever takes longer."""
    eager = 1.5e-3 if load.num_prompt_rows else 0.0
    compute = max(4e-3, load.num_rows * 26e-6)
    return compute + eager + load.context_tokens * 3.3e-8 + load.attended * 1.3e-9


def decodes(rng: random.Random, most: int = 64) -> StepLoad:
    num = rng.randint(1, most)
    return StepLoad(0, num, num * rng.randint(200, 4000))


def mixed(rng: random.Random) -> StepLoad:
    return decodes(rng).with_prompt(rng.randint(64, 4000), rng.choice([0, 0, 2000, 8000]))


def taught(takes: Device = device, noise: float = 0.03, seed: int = 0) -> StepModel:
    model, rng = StepModel(), random.Random(seed)
    for _ in range(300):
        for load in (decodes(rng), mixed(rng)):
            model.observe(load, takes(load) * (1 + noise * rng.gauss(0, 1)))
    return model


def test_it_predicts_steps_that_it_has_not_seen() -> None:
    model, rng = taught(), random.Random(1)
    for _ in range(200):
        for load, off in ((decodes(rng), 0.08), (mixed(rng), 0.2)):
            assert model.seconds(load) == pytest.approx(device(load), rel=off), load
    assert 0.01 < model.error < 0.08


def test_long_chunks_alone_tell_where_the_knee_is() -> None:
    """Their rows are computed while the weights are read, which decodes alone show the time of."""
    model, rng = StepModel(), random.Random(0)
    for _ in range(300):
        for load in (decodes(rng, 16), decodes(rng, 16).with_prompt(rng.choice([1500, 2048]), 0)):
            model.observe(load, device(load) * (1 + 0.03 * rng.gauss(0, 1)))
    beside = StepLoad(0, 8, 16_000)
    for rows, off in ((128, 0.25), (384, 0.1)):
        load = beside.with_prompt(rows, 0)
        assert model.seconds(load) == pytest.approx(device(load), rel=off), rows
    assert model.longest_rows(beside) < 2 * KNEE


def test_rows_within_a_time_take_that_time() -> None:
    model, rng = taught(), random.Random(2)
    for _ in range(200):
        beside, start = decodes(rng), rng.randint(0, 30_000)
        allowed = rng.uniform(0.004, 0.08)
        rows = model.prompt_rows_within(allowed, beside, start)
        if rows:
            assert model.seconds(beside.with_prompt(rows, start)) <= allowed * 1.001
        if rows < model.most_rows:
            assert model.seconds(beside.with_prompt(rows + 2, start)) >= allowed * 0.999


def test_steps_that_are_all_alike_say_nothing_of_others_and_are_not_asked_to() -> None:
    model, rng = StepModel(), random.Random(3)
    beside = StepLoad(0, 32, 64_000)
    alike = beside.with_prompt(512, 0)
    for _ in range(500):
        model.observe(beside, device(beside) * rng.uniform(0.98, 1.02))
        model.observe(alike, device(alike) * rng.uniform(0.98, 1.02))
    assert model.seconds(alike) == pytest.approx(device(alike), rel=0.02)
    double = model.seconds(beside.with_prompt(1024, 0))
    assert model.seconds(alike) < double <= 2 * model.seconds(alike)
    assert model.prompt_rows_within(10.0, beside) == 1024, "never more than twice what was seen"


def test_chunks_grow_from_the_first_one_on() -> None:
    model = StepModel()
    beside = StepLoad(0, 8, 8000)
    assert model.prompt_rows_within(0.001, beside) == FIRST_ROWS == model.most_rows
    sizes = []
    for _ in range(5):
        rows = model.prompt_rows_within(1.0, beside)
        sizes.append(rows)
        model.observe(beside.with_prompt(rows, 0), device(beside.with_prompt(rows, 0)))
    assert sizes == [256, 512, 1024, 2048, 4096]
    for _ in range(700):
        model.observe(beside.with_prompt(100, 0), device(beside.with_prompt(100, 0)))
    assert model.most_rows < 512, "lately means lately"


def test_it_follows_a_device_that_becomes_slower() -> None:
    model, rng = taught(), random.Random(4)
    for _ in range(200):
        for load in (decodes(rng), mixed(rng)):
            model.observe(load, 1.5 * device(load))
    for _ in range(50):
        for load, off in ((decodes(rng), 0.1), (mixed(rng), 0.25)):
            assert model.seconds(load) == pytest.approx(1.5 * device(load), rel=off)


def test_a_step_that_was_stopped_from_outside_is_not_believed() -> None:
    model, rng = taught(), random.Random(5)
    beside = StepLoad(0, 32, 64_000)
    chunk = beside.with_prompt(512, 0)
    before = model.seconds(beside), model.seconds(chunk)
    for index in range(100):
        for load in (decodes(rng), mixed(rng)):
            model.observe(load, device(load) * (100 if index % 25 == 0 else 1))
    assert model.seconds(beside) == pytest.approx(before[0], rel=0.25)
    assert model.seconds(chunk) == pytest.approx(before[1], rel=0.25)


def test_an_hour_of_decoding_takes_nothing_from_what_is_known_of_prompts() -> None:
    model, rng = taught(), random.Random(6)
    alone = StepLoad(2000)
    before = model.seconds(alone), model.most_rows
    for _ in range(5000):
        load = decodes(rng)
        model.observe(load, device(load))
    assert (model.seconds(alone), model.most_rows) == before


def test_coefficients_are_never_negative() -> None:
    """A step of more rows never counts as faster, whatever was seen."""
    rng = random.Random(7)
    model = StepModel()
    for _ in range(200):
        load = mixed(rng)
        model.observe(load, rng.uniform(0.001, 0.1))
        beside = decodes(rng)
        model.observe(beside, rng.uniform(0.001, 0.01))
        assert min(*model._mixed_terms, *model._decode_terms) >= 0
        assert model.prompt_rows_within(0.05, beside) >= 0


@pytest.mark.parametrize("launch_s", [0.0, 0.0015, 0.006])
def test_rows_of_an_efficient_chunk_cost_little_more_than_those_of_a_long_one(
    launch_s: float,
) -> None:
    """On a device that launches every step with prompts for so long, and computes meanwhile."""
    model, rng = StepModel(), random.Random(8)

    def took(load: StepLoad) -> float:
        base = device(StepLoad(0, load.num_decodes, load.context_tokens))
        rows = load.num_prompt_rows
        return base + max(launch_s, 23e-6 * rows) if rows else base

    for _ in range(200):
        for load in (decodes(rng), mixed(rng)):
            model.observe(load, took(load))
    beside = StepLoad(0, 32, 64_000)
    rows = model.efficient_rows(beside)
    alone = took(beside)

    def row_s(count: int) -> float:
        return (took(beside.with_prompt(count, 0)) - alone) / count

    assert 128 <= rows <= 512
    assert row_s(rows) <= 1.15 * row_s(4096)


def test_a_pair_of_tokens_takes_no_longer_than_its_operations() -> None:
    """Few samples of short chunks deep in prompts leave no time for their rows."""
    free, bound = StepModel(), StepModel(most_pair_tokens=1 / 256)
    for model in (free, bound):
        assert model.pair_tokens == 0, "nothing is known"
        for rows, start, seconds in ((20, 0, 0.01), (3, 1500, 0.02), (4, 2000, 0.03)) * 4:
            model.observe(StepLoad().with_prompt(rows, start), seconds)
    assert free.pair_tokens > 1 / 256 and bound.pair_tokens == 1 / 256
    usual = StepModel(most_pair_tokens=1 / 4096)
    for rows, start in ((8192, 0), (2048, 8192), (512, 0), (128, 0)) * 10:
        load = StepLoad().with_prompt(rows, start)
        usual.observe(load, 0.005 + 22e-6 * (rows + 4.4e-5 * load.attended))
    assert 2e-5 < usual.pair_tokens < 8e-5


def test_how_many_tokens_a_stream_will_have() -> None:
    lengths = Lengths()
    assert lengths.left(0, 1000) == 500, "half of what it asked for, while nothing is known"
    assert (lengths.left(4, 20), lengths.left(0, 10), lengths.left(600, 400)) == (12, 10, 0)
    for count in range(100, 200):
        lengths.ended(count)
    assert lengths.left(0, 1000) == 120 and lengths.left(150, 1000) == 10
    assert lengths.left(0, 50) == 50, "it gets no more"
    assert lengths.mean_left([]) == 0
    assert lengths.mean_left([(0, 1000)]) == pytest.approx(149.5)
    assert lengths.mean_left([(0, 1000), (150, 1000)]) == pytest.approx((149.5 + 25) / 2)
    assert lengths.mean_left([(0, 100), (500, 1000)]) == pytest.approx((100 + 250) / 2)
    assert lengths.left(195, 100) == 0, "few became as long, and it has half of what it asked"
    for _ in range(300):
        lengths.ended(20)
    assert lengths.left(0, 1000) == 20, "what was long ago is forgotten"


def test_what_prompts_need() -> None:
    def need(*prompts: tuple[int, float, float]) -> Need:
        return need_of([Prompt(*each) for each in prompts], 10.0, lambda rows: rows * 1e-4)

    assert need() == Need(0.0, 0.0)
    alone = need((1000, 10.0, 12.0))
    assert alone.at_least == pytest.approx(0.1 / 2) and alone.soon == pytest.approx(0.1 / 0.3)
    both = need((1000, 10.0, 12.0), (4000, 10.0, 11.0))
    assert both.at_least == pytest.approx(0.5) and both.soon == 1.0
    assert need((1000, 8.0, 10.05)) == Need(0.0, 0.0), "it is late in any case"
    assert need((1000, 8.0, 10.05), (1000, 10.0, 12.0)).at_least == pytest.approx(0.1)


def test_a_chunk_beside_decodes_is_no_longer_than_pays() -> None:
    model, beside = taught(), StepLoad(0, 8, 16_000)
    rows = model.longest_rows(beside)

    def added_s(count: int) -> float:
        """Seconds that each row of such a chunk adds."""
        added = model.seconds(beside.with_prompt(count, 0)) - model.decode_seconds(beside)
        return added / count

    assert KNEE <= rows <= 1024
    assert added_s(rows) <= 1.15 * added_s(4096)
    assert StepModel().longest_rows(beside) == KNEE


def test_chunks_are_longer_where_a_step_with_prompts_costs_much_for_itself() -> None:
    """A mixture of experts reads the weights of all of them for a few rows."""

    def mixture(load: StepLoad) -> float:
        return (12e-3 if load.num_prompt_rows else 4e-3) + 5e-6 * load.num_rows

    model, beside = StepModel(), StepLoad(0, 8, 16_000)
    for rows in [*(128, 512, 2048, 8192) * 10, 400]:
        for load in (beside, beside.with_prompt(rows, 0)):
            model.observe(load, mixture(load))
    assert model.efficient_rows(beside) == MOST_EFFICIENT
    assert 4096 <= model.longest_rows(beside) <= 16_384


def test_chunks_of_about_the_knee_are_tried_again_after_steps_of_other_sizes() -> None:
    """Only such a step shows that its rows were nearly free."""
    model, beside = StepModel(), StepLoad(0, 10, 20_000)
    for number in range(40):
        rows = 2048 if number % 4 else 150
        model.observe(beside, device(beside))
        model.observe(beside.with_prompt(rows, 0), device(beside.with_prompt(rows, 0)))
    assert model.longest_rows(beside) == KNEE
    for rows in (KNEE, 2048, 2048):
        model.observe(beside.with_prompt(rows, 0), device(beside.with_prompt(rows, 0)))
    longest = model.longest_rows(beside)
    for _ in range(EXPLORED):
        model.observe(beside.with_prompt(2048, 0), device(beside.with_prompt(2048, 0)))
    assert model.longest_rows(beside) == KNEE <= longest


# --- promises ---


def test_a_token_is_due_by_the_mean_since_the_first() -> None:
    promise = Promise(first_at=100.0)
    assert promise.slack(5, 0.01, at=100.02) == pytest.approx(0.03)


def test_a_stream_that_came_late_is_brought_in_over_its_next_tokens() -> None:
    promise = Promise(first_at=100.0)
    at = 100.05
    assert promise.slack(1, 0.01, at) == pytest.approx(-0.04)
    assert promise.bring_in(0.05, 1, tokens_left=200, gain_s=0.003)
    assert promise.slack(1, 0.01, at) == pytest.approx(0.01)
    over = promise.over
    assert YOUNG <= over <= LONGEST
    for position in range(2, 80):
        at += max(0.007, min(0.01, promise.slack(position - 1, 0.01, at)))
    assert promise.slack(80, 0.01, at) >= 0.0099, "its debt is paid"


def test_a_stream_that_cannot_be_brought_in_starts_anew() -> None:
    few, slow = Promise(100.0), Promise(100.0)
    assert not few.bring_in(0.05, 1, tokens_left=10, gain_s=0.003)
    assert not slow.bring_in(0.05, 1, tokens_left=1000, gain_s=0.0005)
    assert few.slack(1, 0.01, 100.05) == pytest.approx(0.01)


def test_what_a_stream_may_owe_makes_its_token_due_later() -> None:
    promise = Promise(first_at=100.0)
    assert promise.slack(5, 0.01, 100.02, owed_s=0.004) == pytest.approx(0.034)
    promise.lend(0.01, 5, 10)
    assert promise.slack(5, 0.01, 100.02, owed_s=0.004) == pytest.approx(0.04), "not both"


def test_a_stream_of_unknown_age_is_on_time() -> None:
    promise, kept = begun(None, 300, 50, interval_s=0.01, gain_s=0.0, at=7.0)
    assert kept and promise.slack(300, 0.01, 7.0) == pytest.approx(0.01)
