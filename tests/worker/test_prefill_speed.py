import pytest

from pdserve.worker.prefill_speed import KEPT_S, MAX_GAIN, PrefillSpeed


def measured(*lengths: int, fixed_s: float = 0.02, per_token_s: float = 1e-4) -> float:
    speed = PrefillSpeed()
    for length in lengths:
        speed.observe(length, 1, fixed_s + per_token_s * length, now=0.0)
    return speed.tokens_per_s


def test_the_fixed_time_of_a_short_step_does_not_count_whatever_lengths_came() -> None:
    assert measured() == 0
    assert measured(*[100, 150, 200] * 10) == pytest.approx(10_000)
    assert measured(*[20, 200] * 10) == pytest.approx(10_000)
    assert measured(*[100, 150, 200] * 10, 256) == pytest.approx(10_000), "one larger step"


def test_larger_steps_tell_tokens_by_seconds() -> None:
    assert measured(*[1000, 2000] * 30) == pytest.approx(3000 / 0.34, rel=0.01)
    assert measured(*[64, 1000] * 30) == pytest.approx(1000 / 0.12, rel=0.01)
    speed = PrefillSpeed()
    for _ in range(30):  # two steps of 15,000 tokens on an H200; a line says 100,000 or less than 0
        speed.observe(8192, 1, 0.2095, now=0.0)
        speed.observe(6808, 1, 0.2160, now=0.0)
    assert speed.tokens_per_s == pytest.approx(15_000 / 0.4255, rel=0.02)


def test_a_step_that_was_held_up_says_nothing() -> None:
    speed = PrefillSpeed()
    for seconds in (0.3, 0.05, 2.6, 0.05):
        speed.observe(2048, 1, seconds, now=0.0)
    assert speed.tokens_per_s == pytest.approx(2048 / 0.05)


def test_steps_that_are_alike_tell_tokens_by_seconds() -> None:
    assert measured(200) == pytest.approx(200 / 0.04)
    assert measured(*[200, 201] * 20) == pytest.approx(200 / 0.04, rel=0.01)


def test_a_line_through_noise_stays_within_reason() -> None:
    speed = PrefillSpeed()
    for length, seconds in ((100, 0.1), (200, 0.1001), (100, 0.1), (200, 0.1)):
        speed.observe(length, 1, seconds, now=0.0)
    plain = 600 / 0.4001
    assert speed.tokens_per_s <= MAX_GAIN * plain * 1.2
    speed.observe(100, 1, 10.0, now=0.0)  # shorter and slower: no line at all
    assert 0 < speed.tokens_per_s < plain


def test_decoding_and_tiny_steps_are_left_out_and_old_steps_fade() -> None:
    speed = PrefillSpeed()
    speed.observe(64, 64, 1.0, now=0.0)
    speed.observe(100, 60, 1.0, now=0.0)
    speed.observe(8, 1, 1.0, now=0.0)
    assert speed.tokens_per_s == 0
    for _ in range(5):
        speed.observe(100, 1, 1.0, now=0.0)
    for _ in range(200):
        speed.observe(100, 1, 0.01, now=0.0)
    assert speed.tokens_per_s == pytest.approx(10_000, rel=0.05)


@pytest.mark.parametrize("length", [100, 2048])
def test_a_speed_becomes_old_the_sooner_the_fewer_steps_it_comes_from(length: int) -> None:
    speed = PrefillSpeed()
    assert not speed.is_old(1000.0), "there is none"
    speed.observe(length, 1, 0.1, now=100.0)
    assert not speed.is_old(100.0 + KEPT_S) and speed.is_old(100.1 + KEPT_S)
    speed.observe(8, 1, 0.1, now=100.1)  # a tiny step confirms nothing
    assert speed.is_old(100.1 + KEPT_S)
    speed.observe(length, 1, 0.1, now=100.1)
    assert not speed.is_old(100.1 + 3.7 * KEPT_S) and speed.is_old(100.1 + 3.9 * KEPT_S)
    for _ in range(200):
        speed.observe(length, 1, 0.1, now=101.0)
    assert not speed.is_old(101.0 + 399 * KEPT_S) and speed.is_old(101.0 + 401 * KEPT_S)


@pytest.mark.parametrize("length", [150, 1000])
def test_small_steps_do_not_confirm_the_speed_of_a_larger_one(length: int) -> None:
    """A worker that is thought slow gets only prompts of which it holds nearly all."""
    speed = PrefillSpeed()
    speed.observe(length, 1, length / 1000, now=0.0)
    for number in range(10):
        speed.observe(20, 1, 0.02, now=number * KEPT_S)
    assert speed.is_old(10 * KEPT_S) and speed.tokens_per_s == pytest.approx(1000)
    speed.observe(length, 1, length / 5000, now=10 * KEPT_S)
    assert speed.tokens_per_s == pytest.approx(5000), "the first one was held up"


@pytest.mark.parametrize("length", [300, 8192])
def test_small_steps_make_a_slow_worker_be_tried_no_more_often(length: int) -> None:
    speed = PrefillSpeed()
    num_trials = 0
    for tenths in range(6000):
        if speed.is_old(tenths / 10) or not num_trials:
            speed.observe(length, 1, length / 1000, now=tenths / 10)
            num_trials += 1
        speed.observe(18 + tenths % 28, 1, 0.01 + (18 + tenths % 28) / 1000, now=tenths / 10)
    assert num_trials < 25, "8 in the first minute, 19 in ten"


def test_a_long_prompt_does_not_make_all_others_small() -> None:
    speed = PrefillSpeed()
    speed.observe(8192, 1, 0.2, now=0.0)
    speed.observe(200, 1, 0.01, now=1.0)
    assert not speed.is_old(2.0) and speed.is_old(4.0)


def test_a_line_that_is_too_steep_shows_the_least_speed() -> None:
    """One large step and many of 18 to 46 rows make a line that is limited."""
    speed = PrefillSpeed()
    speed.observe(8000, 1, 0.01 + 8000 / 45_000, now=0.0)
    for number in range(80):
        rows = 18 + 7 * number % 28
        speed.observe(rows, 1, 0.01 + rows / 45_000, now=1.0)
    assert speed.tokens_per_s < 20_000 and speed.is_least


def test_small_steps_that_are_alike_show_the_least_speed() -> None:
    speed = PrefillSpeed()
    assert not speed.is_least, "there is none"
    speed.observe(20, 1, 0.02, now=0.0)
    assert speed.is_least and speed.tokens_per_s == pytest.approx(1000)
    speed.observe(120, 1, 0.03, now=0.0)
    assert not speed.is_least and speed.tokens_per_s > 2000, "a line goes through both"
    speed = PrefillSpeed()
    speed.observe(1000, 1, 0.2, now=0.0)
    assert not speed.is_least, "the fixed time is little of it"


@pytest.mark.parametrize("length", [100, 2048])
def test_one_fast_step_shows_that_old_ones_were_held_up(length: int) -> None:
    speed = PrefillSpeed()
    for _ in range(50):
        speed.observe(length, 1, 2.0, now=1.0)
    speed.observe(length, 1, 0.5, now=2.0)
    assert speed.tokens_per_s < length, "it is not old, so this may be chance"
    now = 3.0 + 400 * KEPT_S
    speed.observe(length, 1, 0.5, now=now)
    assert speed.tokens_per_s == pytest.approx(length / 0.5)
    assert not speed.is_old(now + KEPT_S) and speed.is_old(now + 1.1 * KEPT_S)


@pytest.mark.parametrize("length", [100, 2048])
def test_a_worker_that_is_really_slow_is_soon_tried_seldom(length: int) -> None:
    speed = PrefillSpeed()
    now = 0.0
    num_trials = 0
    while now < 3600.0:
        if speed.is_old(now) or not num_trials:
            speed.observe(length, 1, 2.0, now=now)
            num_trials += 1
        now += 0.1
    assert num_trials < 50, "8 in the first minute, one per 160 s in the end"
    assert speed.tokens_per_s == pytest.approx(length / 2.0)


def test_few_prompts_of_two_lengths_keep_their_line() -> None:
    speed = PrefillSpeed()
    for number in range(40):
        length = 20 + 180 * (number % 2)
        speed.observe(length, 1, 0.02 + length * 1e-4, now=number * 30.0)
    assert speed.tokens_per_s == pytest.approx(10_000, rel=0.02)
