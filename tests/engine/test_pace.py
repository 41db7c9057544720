"""Steps paced by promises: who gets time, who waits and for how long, in virtual time (see
paper_time); and tokens, which do not depend on it (see harness)."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine.harness import Driver, alone, paper_engine, paper_of
from engine.paper_loads import FIXED, random_load
from engine.paper_time import Call, Course, PaperTime, h200, poisson
from engine.test_scheduler import greedy, imported, prompt_of
from engine.test_step_model import taught

from pdserve.configs.router import SloConfig
from pdserve.engine.pacing.need import Need
from pdserve.engine.pacing.pace import Pace
from pdserve.engine.pacing.promise import Promise
from pdserve.engine.pacing.prompt_speed import speed_beside
from pdserve.engine.pacing.step_model import MOST_EFFICIENT, NOTHING, StepLoad
from pdserve.engine.scheduling.step_plan import StepPlan
from pdserve.engine.scheduling.turns import pace_state
from pdserve.protocol.commands import Start

SLO = SloConfig(ttft_ms=500, tpot_ms=10)
NO_SLO = SloConfig()


def streams(count: int, tokens: int = 2000, prompt: int = 500) -> list[Call]:
    return [Call(0.0, prompt, tokens) for _ in range(count)]


def chats(seed: int, rate: float, seconds: float, prompt: int = 1000, output: int = 100) -> Any:
    rng = random.Random(seed)
    return poisson(
        rng,
        rate,
        seconds,
        lambda: int(2 + rng.uniform(0.5, 1.5) * prompt),
        lambda: int(2 + rng.uniform(0.5, 1.5) * output),
    )


def latest(courses: list[Course]) -> float:
    return max(course.ttft_s for course in courses)


# --- streams keep their pace ---


@pytest.mark.parametrize("in_flight", [1, 2])
def test_streams_keep_their_pace_while_prompts_come(in_flight: int) -> None:
    engine = PaperTime(SLO, max_in_flight=in_flight)
    courses = engine.run(chats(0, 12, 10))
    engine.assert_empty()
    assert max(course.tpot_s for course in courses) <= 0.01
    assert latest(courses) <= 0.5
    assert engine.pace is not None and engine.pace.totals.rows_beside_decodes > 50_000


def test_without_a_pace_they_do_not() -> None:
    """The loads are hard enough, which the other tests here would not notice."""
    courses = PaperTime(None).run(chats(0, 12, 10))
    assert max(course.tpot_s for course in courses) > 0.01


def test_slack_is_saved_up_for_chunks_that_are_worth_a_step() -> None:
    engine = PaperTime(SLO)
    engine.run([*streams(16, 600), Call(2.0, 6000, 2)])
    chunks = [rows for _, rows, decodes in engine.steps if rows and decodes > 1]
    assert len(chunks) >= 2 and min(chunks[:-1]) >= 128
    # 8 intervals, and what the first prediction of such a chunk is wrong by
    assert max(seconds for seconds, _, decodes in engine.steps if decodes) <= 0.1, (
        "8 intervals, about"
    )


def test_a_stream_that_came_late_by_its_hand_off_keeps_its_pace() -> None:
    """Its first token was accepted elsewhere, 60 ms ago."""
    engine = PaperTime(SLO)
    resumed = Call(2.0, 900, 200, starts=(Start(0, (1,), 60.0),))
    engine.run([*chats(1, 10, 6), resumed])
    course = next(each for each in engine.courses if each.call is resumed)
    times = course.tokens[0]
    assert (times[-1] - 2.0 + 0.06) / 200 <= 0.01
    assert engine.pace is not None and engine.pace.totals.given_up == 0


def test_a_stream_whose_promise_is_lost_stops_no_prompts() -> None:
    engine = PaperTime(SLO)
    lost = Call(0.5, 900, 300, starts=(Start(0, (1,), 9000.0),))
    prompts = [Call(0.6 + 0.05 * i, 800, 2) for i in range(20)]
    courses = engine.run([lost, *prompts])
    assert engine.pace is not None and engine.pace.totals.given_up == 1
    assert latest(courses[1:]) <= 0.5


def test_choices_are_streams_of_their_own() -> None:
    engine = PaperTime(SLO)
    calls = [Call(0.2 * i, 700, 120, n=3) for i in range(15)]
    courses = engine.run([*calls, *(Call(0.1 * i, 2000, 2) for i in range(10))])
    engine.assert_empty()
    assert all(len(course.tokens) == course.call.n for course in courses)
    assert max(course.tpot_s for course in courses if course.call.n == 3) <= 0.01


# --- prompts ---


@pytest.mark.parametrize("num_streams", [0, 12])
def test_a_long_prompt_blocks_no_short_one(num_streams: int) -> None:
    engine = PaperTime(SLO)
    long = Call(1.0, 60_000, 5)
    short = [Call(1.01 + 0.1 * i, 400, 20) for i in range(12)]
    first = Call(0.5, 2000, 2)  # after it the engine knows how long the long one will take
    courses = engine.run([*streams(num_streams, 500), first, long, *short])
    by_call = {id(course.call): course for course in courses}
    waits = [by_call[id(call)].ttft_s for call in short]
    assert max(waits) <= 0.35, "no more than the chunks under way, and its own"
    assert by_call[id(long)].ttft_s < 12


def test_two_long_prompts_block_no_short_one_either() -> None:
    engine = PaperTime(SLO)
    longs = [Call(1.0, 50_000, 5), Call(1.05, 40_000, 5)]
    short = [Call(1.1 + 0.25 * i, 3000, 20) for i in range(8)]
    courses = engine.run([*streams(6, 500), *longs, *short])
    assert max(course.ttft_s for course in courses if course.call in short) <= 0.5
    engine.assert_empty()


@pytest.mark.parametrize("slo", [SLO, NO_SLO, SloConfig(tpot_ms=10), SloConfig(ttft_ms=500)])
def test_every_prompt_has_its_first_token_in_bounded_time_under_overload(slo: SloConfig) -> None:
    """A fifth more than the engine can do, for a while: what came waits for what came before, and
    nobody for ever; what is left is done soon after."""
    calls = chats(2, 26, 8, prompt=1500, output=40)
    engine = PaperTime(slo)
    courses = engine.run(calls)
    engine.assert_empty()
    assert all(course.ended_at is not None for course in courses)
    work = sum(call.num_prompt for call in calls) * 26e-6
    assert work > 7.5 and latest(courses) < 2.5 * work
    last = max(course.ended_at or 0.0 for course in courses)
    assert last < 8 + 1.5 * work


@pytest.mark.parametrize("slo", [NO_SLO, SloConfig(tpot_ms=10)])
def test_without_a_promise_late_prompts_stay_where_they_are(slo: SloConfig) -> None:
    """A short prompt comes before long ones that are due with it, and they are late earlier."""
    engine = PaperTime(slo)
    engine.teach()
    before = Call(0.0, 27_000, 2, priority=-1)
    short = Call(0.0, 800, 2, priority=1)
    longs = [Call(0.0, 11_000, 2, priority=1) for _ in range(4)]
    computed: list[int] = []
    engine.on_step = lambda plan: computed.extend(seq.request.num_expected for seq, _ in plan)
    courses = engine.run([before, short, *longs])
    assert min(course.ttft_s for course in courses[2:]) > 1, "they are late"
    assert list(dict.fromkeys(computed)) == [27_000, 800, 11_000]


def test_late_prompts_get_a_fifth_of_the_time_while_others_keep_coming() -> None:
    """A backlog that is late goes on beside prompts that can still be in time, oldest first. (The
    fifth was begun in time, so it became late later than the sixth.)"""
    backlog = [Call(0.0, 4000, 2) for _ in range(60)]
    steady = chats(3, 10, 20, prompt=1000, output=2)
    engine = PaperTime(SloConfig(ttft_ms=500, tpot_ms=10))
    courses = engine.run([*backlog, *steady])
    late = [course.ttft_s for course in courses if course.call in backlog]
    assert max(late) < 60 * 4000 * 26e-6 / 0.2 * 1.3
    in_time = [course.ttft_s <= 0.5 for course in courses if course.call in steady]
    assert sum(in_time) >= 0.9 * len(in_time)
    assert late[6:] == sorted(late[6:]) and max(late[:6]) < late[6]
    assert engine.pace is not None and engine.pace.totals.late_prompts >= 30


def test_late_prompts_do_not_wait_for_the_end_of_an_overload() -> None:
    """There is always somebody who can still be in time."""
    backlog = [Call(0.0, 4000, 2) for _ in range(6)]
    engine = PaperTime(SloConfig(ttft_ms=100, tpot_ms=10))
    courses = engine.run([*backlog, *chats(3, 60, 8, prompt=1000, output=2)])
    assert max(course.ttft_s for course in courses if course.call in backlog) < 5


def test_a_plan_counts_what_is_in_flight() -> None:
    now = 100.0
    pace = Pace(0.5, 0.01, 8192, lambda: now)
    pace.model = taught()
    beside = StepLoad(0, 8, 8000)

    def rows() -> int:
        stream: Any = SimpleNamespace(
            first_token_at=99.945, next_position=10, tokens_left=500, promise=Promise(99.945)
        )
        given = pace.prompt_rows([stream], [beside], 4000, 0, False, Need(1.0, 0.0))
        assert given is not None
        return given[0]

    before = rows()
    pace.planned(beside.with_prompt(1400, 0), is_scored=False, waits=True)
    assert rows() == 0 < before
    assert pace.in_flight.prompt_work(0.0) == pytest.approx(1400), "none of it is done yet"
    assert pace.in_flight.prompt_work(1e-4) == pytest.approx(1400 * (1 + 1e-4 * 700))
    now += pace.in_flight.free_at() - now - 1e-9
    assert pace.in_flight.prompt_work(0.0) == pytest.approx(0.0, abs=1e-3)


def test_a_few_rows_show_no_speed_of_prompts() -> None:
    """A prompt of 3 rows takes as long as a step without them. Routers took the speed that this
    seemed to show, 241 tokens/s, and sent no more prompts."""
    for slo in (SloConfig(), SloConfig(tpot_ms=50)):
        pace = Pace.of(slo, 8192, hidden_size=256)
        decodes = StepLoad(0, 1, 100)
        pace.model.observe(decodes, 0.012)
        for num_rows in (3, 3, 100):
            pace.model.observe(StepLoad(num_rows), 0.033)
            assert pace.full_speed == 0
            for load in (NOTHING, decodes):
                state = pace.state(load, [])
                assert state.prompt_tokens_per_s == state.top_tokens_per_s == 0
        pace.model.observe(StepLoad(128), 0.05)
        assert pace.full_speed > 2000 and pace.state(decodes, []).prompt_tokens_per_s > 1000


def test_a_last_token_owes_nothing() -> None:
    """No token after it could repay what prompts take before it."""

    def rows(tokens_left: int, at_least: float) -> int:
        pace = Pace(0.5, 0.01, 8192, lambda: 100.0)
        pace.model = taught()
        stream: Any = SimpleNamespace(
            first_token_at=100.0, next_position=1, tokens_left=tokens_left, promise=Promise(100.0)
        )
        need = Need(1.0, at_least)
        given = pace.prompt_rows([stream], [StepLoad(0, 32, 130_000)], 4000, 0, False, need)
        assert given is not None
        return given[0]

    assert rows(30, 0.0) == 0, "no chunk fits into the slack of one token"
    assert rows(30, 1.0) > 0, "prompts that need more may borrow"
    assert rows(1, 1.0) == 0


def test_a_stream_that_is_brought_in_is_not_reported_as_lent_to_twice() -> None:
    """The time that it was lent to recover is a part of what it will gain, not an addition."""
    pace = Pace(0.5, 0.01, 8192, lambda: 100.0)
    pace.model = taught()
    decodes = StepLoad(0, 8, 8000)

    def burst(lent: float) -> int:
        promise = Promise(100.0 - 50 * 0.0095 - lent)  # late by what it was lent
        promise.lend(lent, 50, 64)
        stream: Any = SimpleNamespace(
            first_token_at=99.0, next_position=50, tokens_left=100, promise=promise
        )
        return pace.state(decodes, [stream]).burst_tokens

    assert burst(0.06) < burst(0.03) < burst(0.0)


def test_how_long_streams_still_decode_is_reported() -> None:
    pace = Pace(0.5, 0.01, 8192, lambda: 100.0)
    pace.model = taught()
    stream: Any = SimpleNamespace(next_position=50, tokens_left=100, promise=None)
    left = pace.lengths.mean_left([(50, 100)])
    state = pace.state(StepLoad(0, 1, 1000), [stream])
    assert left > 0 and state.stream_ms == pytest.approx(left * 10)
    assert pace.state(StepLoad(), []).stream_ms == 0


def test_what_prompts_got_while_streams_spent_their_time_is_not_reported_as_lasting() -> None:
    """Steps with prompts follow one another for a while. In the long run prompts get what a step of
    the decodes leaves of the promised time."""
    pace = Pace(0.5, 0.006, 8192, lambda: 100.0)
    pace.model = taught()
    decodes = StepLoad(0, 8, 8000)
    before = pace.state(decodes, [])
    for _ in range(100):
        pace._speed.observe(400, 0.01, 100.0)
    state = pace.state(decodes, [])
    assert state.prompt_tokens_per_s == before.prompt_tokens_per_s
    top = state.top_tokens_per_s
    assert state.prompt_tokens_per_s < top < pace.state(StepLoad(), []).prompt_tokens_per_s
    rows = pace.model.longest_rows(decodes)
    assert top == pytest.approx(rows / pace.model.seconds(decodes.with_prompt(rows, 0)), rel=0.05)
    assert pace.state(StepLoad(), []).top_tokens_per_s == 0, "nothing decodes"
    narrow = Pace(0.5, 0.006, 136, lambda: 100.0)
    narrow.model = taught()
    top = 128 / narrow.model.seconds(decodes.with_prompt(128, 0))
    assert narrow.state(decodes, []).top_tokens_per_s == pytest.approx(top, rel=0.05)
    hopeless = Pace(0.5, 0.002, 8192, lambda: 100.0)
    hopeless.model = taught()
    half = hopeless.state(decodes, [])
    full = speed_beside(hopeless.model, decodes, 1.0)
    assert half.prompt_tokens_per_s == pytest.approx(full / 2), "no promise can be kept"
    unpromised = Pace(0.5, None, 8192, lambda: 100.0)
    unpromised.model = taught()
    for _ in range(100):
        unpromised._speed.observe(400, 0.01, 100.0)
    assert unpromised.state(decodes, []).prompt_tokens_per_s == pytest.approx(40_000)


@pytest.mark.parametrize("tpot_ms", [2, 4.05])
def test_prompts_go_on_where_no_stream_can_keep_its_promise(tpot_ms: float) -> None:
    """A step of the decodes alone takes longer than what was promised."""
    engine = PaperTime(SloConfig(ttft_ms=500, tpot_ms=tpot_ms))
    courses = engine.run([*streams(20, 1500), *chats(4, 5, 5, prompt=1000, output=50)])
    engine.assert_empty()
    assert latest(courses) < 0.5


def test_an_embedding_gets_its_share_beside_prompts() -> None:
    embeds = [Call(0.2, 500, 1, kind="embed") for _ in range(10)]
    engine = PaperTime(SLO)
    courses = engine.run([*streams(4, 800), *embeds, *chats(5, 15, 4, output=10)])
    engine.assert_empty()
    assert max(course.ttft_s for course in courses if course.call in embeds) < 2


def test_priority_goes_before_time() -> None:
    engine = PaperTime(SLO)
    patient = [Call(0.0, 4000, 2, priority=5) for _ in range(30)]
    urgent = [Call(0.05 + 0.05 * i, 1000, 2, priority=0) for i in range(20)]
    courses = engine.run([*streams(4, 500), *patient, *urgent])
    assert max(course.ttft_s for course in courses if course.call in urgent) <= 0.5
    assert latest(courses) < 10


def test_what_the_user_has_waited_elsewhere_counts() -> None:
    engine = PaperTime(SLO)
    fresh = [Call(1.0, 3000, 2) for _ in range(6)]
    waited = Call(1.0, 3000, 2, waited_ms=400)
    courses = engine.run([*streams(4, 500), *fresh, waited])
    firsts = {id(each.call): each.tokens[0][0] for each in courses if each.call.at}
    assert firsts[id(waited)] == min(firsts.values())


def test_without_a_promise_no_gap_is_long_and_no_prompt_waits() -> None:
    engine = PaperTime(NO_SLO)
    courses = engine.run([*streams(16, 1500), Call(1.0, 10_000, 2)])
    whole = PaperTime(None)
    at_once = whole.run([*streams(16, 1500), Call(1.0, 10_000, 2)])
    assert courses[-1].ttft_s < 1.3 * at_once[-1].ttft_s
    gaps = [max(s for s, _, n in each.steps if n >= 16) for each in (engine, whole)]
    assert gaps[0] < 0.07 < 0.2 < gaps[1]
    flood = PaperTime(NO_SLO)
    busy = [*streams(16, 1500), *(Call(1.0, 8000, 2) for _ in range(30))]
    assert latest(flood.run(busy)) < 1.3 * latest(PaperTime(None).run(busy)) + 1


# --- blocks, homes, determinism ---


def test_prompts_that_are_partly_computed_are_not_preempted_for_others() -> None:
    engine = PaperTime(SLO, num_blocks=2600)
    courses = engine.run([*chats(6, 6, 6), Call(0.5, 30_000, 5), Call(0.6, 20_000, 5)])
    engine.assert_empty()
    assert all(course.ended_at is not None for course in courses)
    assert engine.scheduler.num_preemptions == 0


def test_preempted_streams_go_on_before_prompts() -> None:
    engine = PaperTime(SLO, num_blocks=420, max_in_flight=1)
    courses = engine.run([*streams(12, 400, prompt=200), *chats(7, 4, 6, prompt=300, output=20)])
    engine.assert_empty()
    assert engine.scheduler.num_preemptions > 0
    assert all(course.ended_at is not None for course in courses)
    assert latest(courses) < 12


def test_homes_share_a_step_and_its_slack() -> None:
    engine = PaperTime(SLO, num_homes=3)
    courses = engine.run(chats(8, 20, 6))
    engine.assert_empty()
    assert {course.tpot_s <= 0.01 for course in courses} == {True}
    assert latest(courses) <= 0.5


def test_the_same_load_takes_the_same_course() -> None:
    def course() -> list[tuple[float, int, int]]:
        engine = PaperTime(SLO, seed=3)
        engine.run(chats(9, 15, 3))
        return engine.steps

    assert course() == course()


def test_a_device_that_becomes_slower_is_noticed() -> None:
    at: list[float] = [0.0]

    def drifting(plan: StepPlan, rng: random.Random) -> float:
        return h200(plan, rng, slower=1.6 if at[0] > 4 else 1.0)

    engine = PaperTime(SloConfig(ttft_ms=1000, tpot_ms=12), step_time=drifting)
    engine.on_step = lambda plan: at.__setitem__(0, engine.now)
    courses = engine.run(chats(10, 8, 10))
    late = [course.tpot_s for course in courses if course.call.at > 4.5]
    assert late and max(late) <= 0.012


def test_prompts_use_up_the_burst_that_is_reported() -> None:
    """Streams that keep to themselves save time for prompts, and a prompt beside them uses it."""
    engine = PaperTime(SloConfig(ttft_ms=1000, tpot_ms=7))
    told: list[tuple[float, int]] = []

    def report(_: StepPlan) -> None:
        assert engine.pace is not None
        state = pace_state(engine.pace, engine.scheduler.running, 1)
        told.append((engine.now, state.burst_tokens))

    engine.on_step = report
    streams = [Call(0.01 * index, 100, 400, max_tokens=400) for index in range(8)]
    prompts = [Call(1.0 + 0.05 * index, 2000, 2) for index in range(20)]
    engine.run([*streams, *prompts])
    most_before = max(burst for at, burst in told if 0.8 < at < 1.0)
    least_after = min(burst for at, burst in told if 1.3 < at < 1.9)
    assert most_before > 4000, "a prompt of 2,000 tokens need not wait"
    assert least_after < most_before / 4


def test_late_prompts_earn_nothing_by_steps_that_were_theirs() -> None:
    """Long prompts with answers of some tokens, more than the engine can do, so that prompts are
    late. Each step without decodes is 200 ms of prompts."""
    rng = random.Random(1)
    calls = poisson(rng, 2.2, 40, lambda: 15_000, lambda: rng.choice([2, 3, 4, 6, 8, 10]))
    courses = PaperTime(SloConfig(ttft_ms=1000, tpot_ms=10)).run(calls)
    assert sum(course.ttft_s > 1 for course in courses) > len(courses) / 2
    assert sum(course.tpot_s > 0.0101 for course in courses) < len(courses) / 5


# --- against fixed budgets ---


def test_the_pace_beats_fixed_budgets_on_some_loads() -> None:
    loads = [random_load(seed) for seed in range(0, 50, 17)]
    paced = sum(load.kept_by_pace() for load in loads)
    for budget in FIXED:
        assert paced >= sum(load.kept_by_budget(budget) for load in loads)


@pytest.mark.slow
def test_the_pace_is_no_worse_than_fixed_budgets_on_fifty_loads() -> None:
    """No budget keeps more requests of any load, and each keeps far fewer of all loads."""
    loads = [random_load(seed) for seed in range(50)]
    paced = [load.kept_by_pace() for load in loads]
    for budget in FIXED:
        fixed = [load.kept_by_budget(budget) for load in loads]
        assert sum(paced) >= 1.09 * sum(fixed)
        worse = [
            (index, mine, other)
            for index, (mine, other) in enumerate(zip(paced, fixed, strict=True))
            if mine < other
        ]
        assert not worse


@pytest.mark.parametrize("seed", [7, 10, 40])
def test_tight_promises_are_kept_as_a_fixed_budget_keeps_them(seed: int) -> None:
    """Chunks beside decodes are no longer than prompts need. Longer ones compute no prompt sooner,
    and make streams late."""
    load = random_load(seed)
    assert load.kept_by_pace() >= max(map(load.kept_by_budget, FIXED))


# --- tokens ---


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"async_scheduling": True},
        {"num_homes": 2},
        # chunks of steps without decodes then end within a block
        {"max_num_batched_tokens": 35},
        {"max_num_batched_tokens": 69, "async_scheduling": True},
    ],
)
def test_tokens_do_not_depend_on_the_pace(tiny_llama: Path, config: dict[str, Any]) -> None:
    config = {"max_num_batched_tokens": 64, **config}
    engine = paper_engine(tiny_llama, slo=SLO, num_kv_blocks=48, **config)
    driver = Driver(engine)
    rng = random.Random(0)
    asked = []
    for i in range(24):
        prompt = prompt_of(rng.choice([3, 20, 70, 150]), i % 7)
        more: dict[str, Any] = {"priority": rng.choice([0, 0, 1])}
        sampling = greedy(rng.choice([1, 8, 20]), n=1)
        if i % 5 == 1:
            sampling = greedy(10, n=3)
        elif i % 5 == 2:
            more["starts"] = (Start(0, (5, 6), 20.0),)
            sampling = greedy(12)
        elif i % 5 == 3:
            more["overlap"] = True
        asked.append((driver.add(prompt, sampling, **more), prompt, sampling, more))
        if i % 3 == 0:
            driver.step()
            engine.check_integrity()
    driver.run()
    driver.assert_empty()
    for key, prompt, sampling, more in asked:
        forced = more["starts"][0].forced if "starts" in more else ()
        for choice in range(sampling.n):
            want = alone(engine, prompt, sampling, choice, forced)
            assert driver.tokens[key, choice] == want


def test_imports_join_before_prompts(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama, slo=SLO, num_kv_blocks=80, max_num_batched_tokens=64)
    driver = Driver(engine)
    first = driver.add(prompt_of(20), greedy(30))
    driver.step()
    driver.add(prompt_of(300, 1), greedy(2))
    key = imported(driver, prompt_of(33, 2), greedy(6), (Start(0, (7,)),))
    driver.step()
    assert not engine.waits(key)
    driver.run()
    assert driver.tokens[first, 0] == alone(engine, prompt_of(20), greedy(30))


def test_a_stream_that_is_handed_over_does_not_wait_for_a_long_step(tiny_llama: Path) -> None:
    """Where nothing decodes, prompts are computed at once, until a stream was handed over: then
    another may come at any time."""
    slo = SloConfig(ttft_ms=5000, tpot_ms=5)
    engine = paper_engine(tiny_llama, slo=slo, num_kv_blocks=200, max_num_batched_tokens=2048)
    now = [100.0]
    assert engine.pace is not None
    engine.pace.model = taught()
    engine.pace.clock = lambda: now[0]
    driver = Driver(engine)

    def largest(seed: int) -> int:
        paper_of(engine).plans.clear()
        for number in range(3):
            driver.add(prompt_of(400, seed + number), greedy(1))
        driver.run()
        return max(sum(plan.values()) for plan in paper_of(engine).plans)

    assert largest(0) == 1200
    imported(driver, prompt_of(33, 1), greedy(2), (Start(0, (7,)),))
    driver.run()
    longest = engine.pace.rows_before_streams(0)
    assert largest(4) <= longest < 800
    assert engine.pace.model.seconds(StepLoad(longest)) <= 0.0201
    now[0] += 61
    assert largest(7) == 1200, "no stream has come for a minute"


def test_a_stream_that_is_handed_over_decodes_beside_short_chunks(tiny_llama: Path) -> None:
    """Without a promise, many prompts have long chunks, but not on an engine to which streams are
    handed over."""

    def longest_chunk(is_handed_over: bool) -> int:
        engine = paper_engine(
            tiny_llama, slo=SloConfig(), num_kv_blocks=400, max_num_batched_tokens=8192
        )
        assert engine.pace is not None
        engine.pace.model = taught()
        driver = Driver(engine)
        if is_handed_over:
            imported(driver, prompt_of(33, 1), greedy(60), (Start(0, (7,)),))
        else:
            driver.add(prompt_of(33, 1), greedy(60))
        driver.step()
        for number in range(8):
            driver.add(prompt_of(400, number), greedy(1))
        driver.run()
        plans = [plan for plan in paper_of(engine).plans if len(plan) > 1]
        return max(sum(plan.values()) for plan in plans)

    assert longest_chunk(False) > 2 * MOST_EFFICIENT
    assert longest_chunk(True) < 1.5 * MOST_EFFICIENT


def test_the_rows_of_a_paced_step_are_whole_blocks(tiny_llama: Path) -> None:
    """Decodes are among them, so that a step fills its graph. A prompt's last chunk is short."""
    slo = SloConfig(ttft_ms=500, tpot_ms=1000)  # which a busy machine keeps, too
    engine = paper_engine(tiny_llama, slo=slo, num_kv_blocks=80, max_num_batched_tokens=50)
    driver = Driver(engine)
    driver.add(prompt_of(10), greedy(60))
    driver.step()
    driver.add(prompt_of(400, 1), greedy(2))
    driver.run()
    beside = [list(plan.values()) for plan in paper_of(engine).plans]
    rows = [sum(plan) for plan in beside if len(plan) == 2 and max(plan) > 1]
    assert rows and all(each % 16 == 0 for each in rows[:-1])


def test_a_launch_that_makes_the_step_before_look_long_is_no_part_of_that_step() -> None:
    """The host launches a decode, 5 ms, and a prompt's step, 9 ms, all the time. It notices the end
    of the decode when the launch is over."""
    now = 0.0
    pace = Pace(1.0, 0.01, 8192, lambda: now)
    decode, mixed = StepLoad(0, 16, 16_000), StepLoad(64, 16, 16_000, 2_048.0)
    for _ in range(60):
        for load, noticed_after, device in ((decode, 0.0138, 0.005), (mixed, 0.0002, 0.009)):
            pace.planned(load, is_scored=False, waits=True)
            now += noticed_after
            pace.collected(device)
    assert pace.model.decode_seconds(decode) == pytest.approx(0.005, rel=0.1)
    assert pace.model.seconds(mixed) == pytest.approx(0.009, rel=0.1)
