"""Choosing among workers that pace their steps: what their slack takes, and what it leaves."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from router.harness import Harness, until
from router.workers import join, made, send_prompt
from support.clock import Clock

from pdserve.configs.router import SloConfig
from pdserve.protocol.block_digests import NOBODY
from pdserve.protocol.commands import Submit
from pdserve.protocol.events import Load, PaceState
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.choosing.choose import Assignment, Chooser, Demand
from pdserve.router.choosing.paced import (
    LEAST_SHARE,
    SHORT_QUEUE_MS,
    base_step_ms,
    breaks_promise,
    prompt_speed,
    top_speed,
)
from pdserve.router.choosing.predict import STEPS_AHEAD, Predictor, work_of
from pdserve.router.choosing.slack_rule import (
    CHARGED,
    EXPECTED_TOKENS,
    UNPROMISED_WEIGHT,
    WHOLE_STEPS,
    spare_workers,
    split_option,
    whole_option,
)
from pdserve.router.choosing.split_gain import LEAST_PROMPTS, WINDOW_S, SplitGain, described
from pdserve.router.choosing.split_rule import HANDOFF_MS
from pdserve.router.fleet.inbox import Inbox
from pdserve.router.fleet.prefix_index import PromptBlocks
from pdserve.router.fleet.worker_state import Leg, WorkerState

Make = Callable[..., Harness]
NOW = Clock().seconds
pytestmark = pytest.mark.usefixtures("clock")
PROMPT = tuple(range(3, 1003))  # 100 ms at 10,000 tokens/s
KNOWN = [3 + number % 400 for number in PROMPT]  # in the vocabulary
IDLE = PaceState(tpot_ms=10.0, base_step_ms=0.0, row_ms=0.1, prompt_tokens_per_s=10_000.0)
HALF = PaceState(tpot_ms=10.0, base_step_ms=5.0, row_ms=0.1, prompt_tokens_per_s=5000.0)
FULL = PaceState(tpot_ms=10.0, base_step_ms=9.95, row_ms=0.1, prompt_tokens_per_s=1000.0)


def paced(worker_id: str, role: str, pace: PaceState | None = IDLE, **told: Any) -> WorkerState:
    if pace is not None and pace.base_step_ms:
        told.setdefault("num_running", 10)
    return made(worker_id, role, pace=pace, **told)


def pair(
    p: dict[str, Any] | None = None, d: dict[str, Any] | None = None
) -> tuple[WorkerState, WorkerState]:
    """A prefill and a decode worker, over a link that moves PROMPT in 6.4 ms."""
    prefill = paced("p", "prefill", **p or {})
    decode = paced("d", "decode", **d or {})
    join(prefill, decode, bytes_per_s=1e7)
    return prefill, decode


def plan(
    workers: tuple[WorkerState, ...], ttft_ms: float | None = None, **asked: Any
) -> Assignment:
    return chooser(ttft_ms).choose(workers, demand(**asked))


def chooser(ttft_ms: float | None = None, seed: int = 1) -> Chooser:
    return Chooser(1, slo=SloConfig(ttft_ms=ttft_ms, tpot_ms=10.0), seed=seed)


def open_leg(worker: WorkerState, number: int = 0, is_prepared: bool = False) -> None:
    key = RequestKey("router", 1, str(number))
    leg = Leg(key, worker, Inbox(), 0, {0}, 0.0, prepared=is_prepared)
    worker.legs[key.request_id, 0] = leg


def demand(**asked: Any) -> Demand:
    return Demand(len(PROMPT), 1010, prompt=blocks(), **asked)


def blocks() -> PromptBlocks:
    return PromptBlocks(PROMPT, NOBODY)


# --- speeds ---


def test_the_speed_of_those_that_decode_nothing_is_typical() -> None:
    """The others have measured theirs beside their decodes."""
    p, d = pair({"prefill_tokens_per_s": 40_000.0}, {"prefill_tokens_per_s": 30_000.0})
    predictor = Predictor([p, d], None, len(PROMPT), NOW)
    assert predictor.full_speed(p) == predictor.full_speed(d) == 40_000
    p, d = pair({"prefill_tokens_per_s": 0.0}, {"prefill_tokens_per_s": 30_000.0})
    assert Predictor([p, d], None, len(PROMPT), NOW).full_speed(p) == 30_000, "better than none"


def test_deep_in_a_prompt_attention_counts() -> None:
    """15,000 tokens take 4 / 3 as long as their rows alone; of a prompt that is half cached, the
    rest attends to all of it."""
    pace = msgspec.structs.replace(IDLE, pair_tokens=4.4444e-5)
    prompt = list(range(15_000))
    p, _ = pair({"pace": pace, "prefill_tokens_per_s": 10_000.0}, {})
    forecast = Predictor([p], None, len(prompt), NOW).first_token(p)
    assert forecast.own_ms == pytest.approx(2000, rel=1e-3)
    assert work_of(p, 7500, 15_000) == pytest.approx(7500 * (1 + 4.4444e-5 * 11_250))
    assert work_of(paced("p", "prefill", None), 7500, 15_000) == 7500


def test_prompts_get_on_at_the_speed_that_the_decodes_leave() -> None:
    assert prompt_speed(paced("d", "decode", None), 10_000.0) == 10_000
    assert prompt_speed(paced("d", "decode", IDLE), 10_000.0) == 10_000
    assert prompt_speed(paced("d", "decode", HALF), 10_000.0) == 5000
    assert prompt_speed(paced("d", "decode", HALF), 4000.0) == 4000, "never faster than alone"
    crowded = msgspec.structs.replace(HALF, prompt_tokens_per_s=10.0)
    assert prompt_speed(paced("d", "decode", crowded), 10_000.0) == 10_000 * LEAST_SHARE


def test_what_was_sent_since_the_last_report_makes_steps_longer() -> None:
    worker = paced("d", "decode", HALF)
    assert base_step_ms(worker) == 5 and base_step_ms(worker, 1) == pytest.approx(5.1)
    worker.num_others += 10  # prompts that wait, and streams that will come
    assert base_step_ms(worker) == pytest.approx(6)
    assert prompt_speed(worker, 10_000.0) == pytest.approx(5000 * 0.4 / 0.5)
    load = Load(queue_tokens=0, num_running=20, num_waiting=0, pace=HALF)
    worker.told(load, NOW)
    assert base_step_ms(worker) == 5, "they are in what it told"


def test_streams_that_end_before_another_joins_make_no_step_longer() -> None:
    ending = msgspec.structs.replace(HALF, base_step_ms=8.0, stream_ms=450.0)
    worker = paced("d", "decode", ending, num_running=30)
    worker.num_others = 30 + 33  # 33 are to come
    assert base_step_ms(worker, 1) == pytest.approx(8 + 0.1 * 34)
    assert base_step_ms(worker, 1, 450) == pytest.approx(8 + 0.1 * (34 - 15)), "half have ended"
    assert base_step_ms(worker, 1, 900) == pytest.approx(8 + 0.1 * (34 - 30))
    assert base_step_ms(worker, 1, 1800) == pytest.approx(8 + 0.1 * (1 + 33 / 2 - 30))
    assert breaks_promise(worker, 0) and not breaks_promise(worker, 900)
    unknown = paced("e", "decode", msgspec.structs.replace(ending, stream_ms=0.0), num_running=30)
    assert base_step_ms(unknown, 1, 900) == base_step_ms(unknown, 1)


def test_many_that_will_come_do_not_fill_a_decode_worker_whose_streams_end_meanwhile() -> None:
    """With many clients nearly all requests wait at P. They will not all be at D at once."""
    queue = {"queue_tokens": 10_000}  # a second
    pace = msgspec.structs.replace(HALF, base_step_ms=7.0, stream_ms=400.0)
    p, d = pair(queue, {"pace": pace, "num_running": 30, "queue_tokens": 5000})
    d.num_others = 30 + 30
    assert plan((p, d), max_tokens=128).reason == "pays"
    d.told(Load(queue_tokens=5000, num_running=60, num_waiting=0, pace=FULL), NOW)
    assert plan((p, d), max_tokens=128).reason != "pays", "these are there"


def test_the_fixed_part_of_a_step_is_remembered_while_nothing_decodes() -> None:
    worker = paced("d", "decode", HALF)
    worker.told(Load(queue_tokens=0, num_running=0, num_waiting=0, pace=IDLE), NOW)
    assert base_step_ms(worker) == 0 and base_step_ms(worker, 2) == pytest.approx(4 + 0.2)


def test_the_queue_drains_at_the_paced_speed() -> None:
    workers = pair(d={"pace": HALF, "queue_tokens": 1000})
    later = Predictor(workers, blocks(), len(PROMPT), NOW + 0.1)
    assert later.queue_ms(workers[1]) == pytest.approx(100), "500 of 1,000 tokens are left"
    assert later.queue_alone_ms(workers[1]) == pytest.approx(50)
    send_prompt(workers, workers[1], blocks(), "full", NOW + 0.1)
    assert later.queue_ms(workers[1]) == pytest.approx(300)


# --- which way ---


@pytest.mark.parametrize(
    ("p", "d", "reason"),
    [
        ({}, {}, "cheaper"),  # Nothing decodes: D is as fast, and the hand-off is saved.
        ({}, {"pace": HALF}, "pays"),  # 116 ms against 240: 200, and a step under way
        ({"queue_tokens": 1500}, {"pace": HALF}, "cheaper"),  # 266 against 240
        ({"queue_tokens": 1500}, {"pace": HALF, "queue_tokens": 200}, "pays"),  # against 280
        ({"queue_tokens": 12_000}, {"pace": FULL}, "cheaper"),  # both are slow; D is faster
        ({}, {"pace": HALF, "holds": PROMPT}, "cheaper"),  # D holds all of it
    ],
)
def test_each_takes_what_it_can(p: dict[str, Any], d: dict[str, Any], reason: str) -> None:
    chosen = plan(pair(p, d))
    assert chosen.reason == reason and (chosen.prefill is not None) == (reason == "pays")


def test_no_share_of_d_is_set_aside() -> None:
    """The 5 % budget of `split_rule` would send one such prompt, and no more within two seconds."""
    workers = pair({"queue_tokens": 20_000}, {"pace": HALF})
    for _ in range(4):
        assert plan(workers).reason == "cheaper"
        send_prompt(workers, workers[1], blocks(), "full")


def test_a_worker_that_tells_no_pace_keeps_the_budget() -> None:
    workers = pair({"queue_tokens": 20_000}, {"pace": None, "num_running": 4})
    assert plan(workers).reason == "cheaper"
    send_prompt(workers, workers[1], blocks(), "full")
    assert plan(workers).reason == "budget"


def test_a_prompt_that_is_late_everywhere_takes_nothing_from_streams() -> None:
    workers = pair({"queue_tokens": 5000}, {"pace": HALF, "queue_tokens": 1000})
    first = 400 + 5 * STEPS_AHEAD
    assert plan(workers, ttft_ms=first + 1).reason == "cheaper"
    late = plan(workers, ttft_ms=first - 1)
    assert late.reason == "late" and late.prefill is workers[0]
    assert plan(workers).reason == "cheaper", "without a promise nothing is late"


def test_a_short_answer_does_not_make_up_for_a_hand_off() -> None:
    """16.4 ms of gap, and 40 of the step under way; each further token brings 10 - 5.1 ms back."""
    workers = pair({"pace": None}, {"pace": HALF})
    assert plan(workers, max_tokens=13).reason == "pays"
    assert plan(workers, max_tokens=12).reason == "cheaper"
    assert plan(workers, max_tokens=1).reason == "pays", "P samples its only token"


def test_a_stream_waits_no_longer_than_the_present_ones_have_saved_for() -> None:
    """They have saved 1,000 rows of 100,000 per second, so its gap is 16.4 + 10 + 10 ms."""
    told = msgspec.structs.replace(HALF, burst_tokens=1000, top_tokens_per_s=100_000.0)
    workers = pair({"pace": None}, {"pace": told})
    assert plan(workers, max_tokens=9).reason == "pays"
    assert plan(workers, max_tokens=8).reason == "cheaper"
    much = msgspec.structs.replace(told, burst_tokens=9000)
    assert plan(pair({"pace": None}, {"pace": much}), max_tokens=12).reason == "cheaper"


def test_a_short_answer_may_be_decoded_where_its_prompt_was_computed() -> None:
    speeds = msgspec.structs.replace(HALF, prompt_tokens_per_s=9000.0)
    workers = pair({"pace": speeds}, {"pace": HALF})
    chosen = plan(workers, max_tokens=12)
    assert (chosen.reason, chosen.prefill, chosen.decode) == ("spare", None, workers[0])
    assert plan(workers, max_tokens=13).reason == "pays"
    busy = msgspec.structs.replace(speeds, base_step_ms=7.95)
    assert plan(pair({"pace": busy}, {"pace": HALF}), max_tokens=12).reason == "cheaper"
    late = plan(workers, ttft_ms=1.0, max_tokens=12)
    assert (late.reason, late.decode) == ("late", workers[0]), "also where it is late"


def test_without_a_promise_nothing_is_too_short_and_no_role_is_stretched() -> None:
    """Such a worker holds its streams to 1.5 times what their steps take, and to 0 without any."""
    none = msgspec.structs.replace(IDLE, tpot_ms=0.0)
    relative = msgspec.structs.replace(HALF, tpot_ms=7.5)
    mine = Chooser(1, seed=1)
    workers = pair({"pace": none}, {"pace": relative})
    assert mine.choose(workers, demand(max_tokens=2)).reason == "pays"
    open_leg(workers[0])
    open_leg(workers[1])
    assert mine.choose(workers, demand(max_tokens=2)).reason == "pays"
    assert mine.choose(pair({"pace": none}, {"pace": none}), demand()).reason == "cheaper"
    waiting = pair({"pace": none}, {"pace": none, "num_waiting": 3})
    assert mine.choose(waiting, demand()).reason == "pays", "nothing protects three from a fourth"


def test_without_a_promise_all_computing_counts_for_each_that_waits_for_it() -> None:
    """1,000 rows of queue and 1,000 of its own, at 10,000 per second, stall three sequences. Those
    that a prefill worker will hand over are not there yet."""
    free = paced("d", "decode", None, queue_tokens=1000, num_running=2)
    open_leg(free)
    for number in range(5):
        open_leg(free, number + 1, is_prepared=True)
    assert (free.num_present, free.num_decodes) == (3, 8)
    option = whole_option(free, Predictor([free], blocks(), 1000, NOW), None, False)
    assert option.first_ms == pytest.approx(200)
    assert option.cost_ms == pytest.approx(200 + UNPROMISED_WEIGHT * 3 * 200)


def test_announced_legs_hide_no_sequences_of_other_routers() -> None:
    """A worker reports 20 running, all of other routers. They come beside five announced ones."""
    shared = paced("d", "decode", None)
    for number in range(5):
        open_leg(shared, number, is_prepared=True)
    told = Load(queue_tokens=0, num_running=20, num_waiting=0, pace=None)
    shared.told(told, NOW)
    assert (shared.num_others, shared.num_present, shared.num_decodes) == (20, 20, 25)
    assert shared.num_coming_decodes == 5
    open_leg(shared, 5)
    shared.told(told, NOW)
    assert (shared.num_others, shared.num_present) == (19, 20), "one of them is ours"


def test_a_worker_whose_streams_have_saved_time_is_foreseen_to_spend_it() -> None:
    saved = msgspec.structs.replace(HALF, burst_tokens=1000)
    plain, rich = paced("a", "both", HALF), paced("b", "both", saved)
    predictor = Predictor((plain, rich), blocks(), len(PROMPT), NOW)
    assert predictor.first_token(plain).own_ms == pytest.approx(len(PROMPT) / 5)
    assert predictor.first_token(rich).own_ms == pytest.approx(len(PROMPT) / 5 - 100)
    busy = paced("c", "both", saved, queue_tokens=3000)
    predictor = Predictor((busy,), blocks(), len(PROMPT), NOW)
    forecast = predictor.first_token(busy)
    assert forecast.total_ms == pytest.approx((3000 + len(PROMPT)) / 5 - 100 + 5 * STEPS_AHEAD)


def test_saved_time_makes_a_prompt_no_faster_than_chunks_beside_the_decodes() -> None:
    """Every step has the decodes in it: 8,000 tokens/s at most, where 10,000 are computed alone."""
    saved = msgspec.structs.replace(HALF, burst_tokens=100_000, top_tokens_per_s=8000.0)
    worker = paced("d", "decode", saved)
    predictor = Predictor((worker,), blocks(), len(PROMPT), NOW)
    assert predictor.first_token(worker).own_ms == pytest.approx(len(PROMPT) / 8)
    assert top_speed(worker, 7000.0) == 7000, "never faster than alone"
    assert top_speed(paced("e", "decode", HALF), 7000.0) == 7000


def test_a_prompt_waits_for_the_steps_under_way() -> None:
    at_rest, decodes = paced("a", "both"), paced("b", "both", HALF)
    predictor = Predictor((at_rest, decodes), blocks(), len(PROMPT), NOW)
    assert predictor.first_token(at_rest).wait_ms == 0
    assert predictor.first_token(decodes).wait_ms == pytest.approx(5 * STEPS_AHEAD)


def test_of_whole_workers_the_one_with_saved_time_gets_the_prompt() -> None:
    """It reports a lower speed because nothing has hurried it."""
    hurried = msgspec.structs.replace(HALF, prompt_tokens_per_s=7000.0)
    rested = msgspec.structs.replace(HALF, burst_tokens=1000)
    workers = [paced("hurried", "both", hurried), paced("rested", "both", rested)]
    chosen = Chooser(1, seed=1).choose(workers, demand())
    assert chosen.decode.worker_id == "rested"
    workers[1] = paced("rested", "both", HALF)
    assert Chooser(1, seed=1).choose(workers, demand()).decode.worker_id == "hurried"


def test_a_part_of_the_saved_time_is_charged() -> None:
    """It makes a decode worker cheaper where its prefill worker has a queue, not where it rests."""
    saved = msgspec.structs.replace(HALF, burst_tokens=1000)
    for pace, own, charge in ((HALF, 200, 0), (saved, 100, CHARGED * 100)):
        first = own + 5 * STEPS_AHEAD
        _, decode = workers = pair({}, {"pace": pace})
        option = whole_option(decode, Predictor(workers, blocks(), 1000, NOW), None, True)
        assert option.first_ms == pytest.approx(first)
        assert option.cost_ms == pytest.approx(first + charge + 10 * WHOLE_STEPS)
        assert plan(workers).reason == "pays"
    queued = {"queue_tokens": 800}  # 196.4 ms with the hand-off, against 157.5 or 227.5
    assert plan(pair(queued, {"pace": saved})).reason == "cheaper"
    assert plan(pair(queued, {"pace": HALF})).reason == "pays"
    late = pair({"queue_tokens": 3000}, {"pace": saved})
    assert plan(late, ttft_ms=150.0).reason == "cheaper", "only that way it can be in time"


def test_a_worker_that_never_decoded_is_taken_to_need_half_of_the_promise() -> None:
    worker = paced("p", "prefill", IDLE)
    assert base_step_ms(worker) == 0 and base_step_ms(worker, 1) == pytest.approx(5.1)


def test_nearly_equal_ways_are_taken_in_turn_and_alike_under_a_seed() -> None:
    workers = pair({"queue_tokens": 1150}, {"pace": HALF})  # 231.4 ms against 227.5

    def drawn(seed: int) -> list[str]:
        mine = chooser(seed=seed)
        return [mine.choose(workers, demand()).reason for _ in range(40)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert min(Counter(drawn(1)).values()) > 8


# --- whole requests at prefill workers ---


def test_a_prefill_worker_does_whole_requests_when_every_decode_worker_is_full() -> None:
    workers = pair({}, {"pace": FULL})
    chosen = plan(workers)
    assert (chosen.reason, chosen.prefill, chosen.decode) == ("spare", None, workers[0])
    assert workers[0].role == "prefill" and not workers[0].can_decode, "used for placing only"
    other = paced("e", "decode", HALF)
    join(workers[0], other, bytes_per_s=1e7)
    assert plan((*workers, other)).decode is other, "one of them is not full"
    busy, full = pair({"pace": HALF}, {"pace": FULL})
    other = paced("e", "decode", HALF, queue_tokens=5000)
    join(busy, other, bytes_per_s=1e7)
    predictor = Predictor([busy, full, other], blocks(), len(PROMPT), NOW)
    split = split_option(busy, other, predictor, None)
    assert spare_workers([busy], [full], predictor, split) == [busy]
    assert spare_workers([busy], [full, other], predictor, split) == []


def test_a_full_decode_worker_gets_no_prompt() -> None:
    """Its steps take 9.6 of 10 ms, so a stream could not make up for a hand-off. It reports a high
    speed, but a prompt would take from all of its streams."""
    full = msgspec.structs.replace(FULL, base_step_ms=9.6, prompt_tokens_per_s=10_000.0)
    workers = pair({"queue_tokens": 3000}, {"pace": full})
    chosen = plan(workers, max_tokens=20)
    assert (chosen.reason, chosen.decode) == ("spare", workers[0])
    room = msgspec.structs.replace(full, base_step_ms=9.3)
    workers = pair({"queue_tokens": 3000}, {"pace": room})
    chosen = plan(workers, max_tokens=20)
    assert (chosen.reason, chosen.decode) == ("cheaper", workers[1])


@pytest.mark.parametrize(
    ("p", "takes"),
    [
        ({"queue_tokens": int(10 * SHORT_QUEUE_MS)}, True),
        ({"queue_tokens": int(10 * SHORT_QUEUE_MS) + 20}, False),
        ({"pace": HALF, "queue_tokens": 2000}, True),  # it decodes already
        ({"pace": msgspec.structs.replace(HALF, base_step_ms=7.95)}, False),
        ({"pace": None}, False),
    ],
)
def test_when_a_prefill_worker_may(p: dict[str, Any], takes: bool) -> None:
    assert (plan(pair(p, {"pace": FULL})).reason == "spare") == takes


def test_what_a_stream_takes_from_a_prefill_workers_prompts_counts() -> None:
    prefill, _ = workers = pair({"pace": HALF})
    predictor = Predictor(workers, blocks(), len(PROMPT), NOW)
    for max_tokens, counted in ((None, EXPECTED_TOKENS), (1000, EXPECTED_TOKENS), (20, 20)):
        option = whole_option(prefill, predictor, max_tokens, True)
        assert option.cost_ms - option.first_ms == pytest.approx(0.1 * counted)
    full = pair(d={"pace": msgspec.structs.replace(FULL, base_step_ms=9.6)})
    assert plan(full).reason == "pays", "D is full, but keeps its promise: P's prompts go first"


# --- several ---


def test_a_burst_fills_every_queue_to_the_same_length() -> None:
    prefills = [paced(f"p{i}", "prefill") for i in range(2)]
    decodes = [paced(f"d{i}", "decode", HALF) for i in range(2)]
    for prefill in prefills:
        join(prefill, *decodes, bytes_per_s=1e7)
    workers = [*prefills, *decodes]
    mine = chooser()
    for _ in range(60):
        chosen = mine.choose(workers, demand())
        first = chosen.prefill or chosen.decode
        phase: Any = "full" if chosen.prefill is None else "prefill"
        send_prompt(workers, first, blocks(), phase)
    predictor = Predictor(workers, blocks(), len(PROMPT), NOW)
    queues = [predictor.queue_ms(worker) for worker in workers]
    assert max(queues) - min(queues) <= 250, "a prompt of D's and what is taken for equal"


async def test_the_refusals_forecast_is_the_choosers(make: Make, clock: Clock) -> None:
    harness = make(1, 1, split="auto", slo={"ttft_ms": 300}, now=clock)
    for worker, pace, queue in (
        (harness.prefills[0], IDLE, 1000),
        (harness.decodes[0], HALF, 400),
    ):
        worker.pace = pace
        worker.queue_tokens = queue
        worker.prefill_tokens_per_s = 10_000.0
        worker.max_tokens = 4096
    await harness.start()
    generation = await harness.service.admit([KNOWN], SamplingParams(max_tokens=9))
    [seat] = [run._seat for run in generation._runs]  # what was forecast for it
    assert seat._forecast is not None and seat._forecast.worker == "p0"
    assert seat._forecast.total_ms == pytest.approx(200), "100 of queue and 100 of its own"
    harness.decodes[0].queue_tokens = harness.prefills[0].queue_tokens = 100_000
    for worker in (*harness.prefills, *harness.decodes):
        worker.report()
    # 10 s of queue, 100 ms of the first prompt, which is not sent yet, and 100 of its own
    await until(lambda: all(w.queue.left(clock(), 1.0) > 1e4 for w in harness.fleet.workers))
    with pytest.raises(Exception, match="the first token would come after about 10200 ms"):
        await harness.service.admit([KNOWN], SamplingParams(max_tokens=9))
    generation.close()


# --- what is told ---


async def test_a_load_keeps_the_view_fresh_between_snapshots(make: Make, clock: Clock) -> None:
    harness = await make(1, 1, now=clock).start()
    decode = next(w for w in harness.fleet.workers if w.worker_id == "d0")
    assert decode.pace is None
    load = Load(queue_tokens=700, num_running=3, num_waiting=1, pace=HALF)
    harness.decodes[0].push(None, [load])
    await until(lambda: decode.pace is not None)
    assert (decode.pace, decode.num_others) == (HALF, 4)
    assert decode.queue.left(clock(), 1.0) == 700
    assert harness.fleet.intake.num_stale_events == 0


async def test_workers_hear_how_much_of_a_promise_is_used_up(make: Make, clock: Clock) -> None:
    harness = await make(1, 1, now=clock).start()
    p, d = harness.prefills[0], harness.decodes[0]
    p.sleep = d.sleep = clock.sleep
    p.step_s = 0.25
    harness.prefills[0].parts_from = 0
    sampling = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
    run = harness.service.collect([list(PROMPT[:50])], sampling, received=clock() - 0.5)
    await asyncio.wait_for(run, 60)
    [first], [second] = p.submits(), d.submits()
    assert first.waited_ms == pytest.approx(500) and first.starts[0].first_ms_ago == 0
    assert second.waited_ms == pytest.approx(750)
    assert isinstance(second, Submit) and second.starts[0].forced


async def test_a_resumed_stream_says_when_it_began(make: Make, clock: Clock) -> None:
    harness = await make(0, 2, now=clock).start()
    for worker in harness.decodes:
        worker.sleep = clock.sleep
        worker.step_s = 0.1
    sampling = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    dying = harness.decodes[0]
    dying.before_batch = lambda number: dying.die() if number == 4 else None
    other = harness.decodes[1]
    other.before_batch = lambda number: other.die() if number == 4 and dying.alive else None
    await harness.collect(list(PROMPT[:50]), sampling)
    [resumed] = [s for w in harness.decodes for s in w.submits() if s.starts[0].forced]
    assert resumed.starts[0].first_ms_ago >= 200 * 0.99


# --- whether it pays ---


def test_it_is_known_whether_splitting_pays() -> None:
    gain = SplitGain()
    assert gain.pays(0.0) is None and gain.mean_s(0.0) == 0
    for number in range(int(WINDOW_S) + 1):
        gain.note(-2.0, float(number))
    now = WINDOW_S
    assert gain.pays(now) is False and gain.mean_s(now) == pytest.approx(-0.002)
    assert "does not pay" in described(gain, now)
    for number in range(20):
        gain.note(50.0, now + number)
    assert gain.pays(now + 20) is True and "does not" not in described(gain, now + 20)
    assert gain.pays(now + 3 * WINDOW_S) is None, "nothing came of late"
    few = SplitGain()
    for number in range(LEAST_PROMPTS - 1):
        few.note(9.0, number * WINDOW_S / 40)
    assert few.pays(WINDOW_S) is None


def test_the_gain_of_a_decision_is_the_difference_of_the_two_ways() -> None:
    mine = chooser()
    mine.choose(pair({}, {"pace": HALF}), demand())
    whole = 200 + 5 * STEPS_AHEAD + 10 * WHOLE_STEPS
    gain = (whole - 100 - 6.4 - HANDOFF_MS) / 1000
    assert mine.gain.mean_s(NOW) == pytest.approx(gain)
    mine.choose(pair(), demand(resumed=True))
    assert mine.gain.mean_s(NOW) == pytest.approx(gain), "it could not be split"
    always = Chooser(1, split="always", slo=SloConfig(tpot_ms=10.0))
    assert always.choose(pair({}, {"pace": HALF}), demand()).reason == "always"
    assert always.gain.mean_s(NOW) == pytest.approx(gain), "known also where it decides nothing"
