import pytest

from pdserve.worker.prefill_speed import KEPT_S, MAX_GAIN, PrefillSpeed


def measured(*lengths: int, fixed_s: float = 0.02, per_token_s: float = 1e-4) -> float:
    speed = PrefillSpeed(0.0)
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
    speed = PrefillSpeed(0.0)
    for _ in range(30):  # two steps of 15,000 tokens on an H200; a line says 100,000 or less than 0
        speed.observe(8192, 1, 0.2095, now=0.0)
        speed.observe(6808, 1, 0.2160, now=0.0)
    assert speed.tokens_per_s == pytest.approx(15_000 / 0.4255, rel=0.02)


def test_a_step_that_was_held_up_says_nothing() -> None:
    speed = PrefillSpeed(0.0)
    for seconds in (0.3, 0.05, 2.6, 0.05):
        speed.observe(2048, 1, seconds, now=0.0)
    assert speed.tokens_per_s == pytest.approx(2048 / 0.05)


def test_steps_that_are_alike_tell_tokens_by_seconds() -> None:
    assert measured(200) == pytest.approx(200 / 0.04)
    assert measured(*[200, 201] * 20) == pytest.approx(200 / 0.04, rel=0.01)


def test_a_line_through_noise_stays_within_reason() -> None:
    speed = PrefillSpeed(0.0)
    for length, seconds in ((100, 0.1), (200, 0.1001), (100, 0.1), (200, 0.1)):
        speed.observe(length, 1, seconds, now=0.0)
    plain = 600 / 0.4001
    assert speed.tokens_per_s <= MAX_GAIN * plain * 1.2
    speed.observe(100, 1, 10.0, now=0.0)  # shorter and slower: no line at all
    assert 0 < speed.tokens_per_s < plain


def test_decoding_and_tiny_steps_are_left_out_and_old_steps_fade() -> None:
    speed = PrefillSpeed(0.0)
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
    speed = PrefillSpeed(5.0)
    assert not speed.is_old(5.0 + KEPT_S) and speed.is_old(5.1 + KEPT_S), "learned at the start"
    speed.observe(length, 1, 0.1, now=100.0)
    assert not speed.is_old(100.0 + KEPT_S) and speed.is_old(100.1 + KEPT_S)
    speed.observe(8, 1, 0.1, now=105.0)  # a tiny step confirms nothing
    assert speed.is_old(100.1 + KEPT_S)
    for _ in range(200):
        speed.observe(length, 1, 0.1, now=101.0)
    assert not speed.is_old(101.0 + 19 * KEPT_S) and speed.is_old(101.0 + 20.1 * KEPT_S)


@pytest.mark.parametrize("length", [100, 2048])
def test_an_old_speed_counts_as_one_step(length: int) -> None:
    """A worker that was slow for a while shows its real speed in a few steps."""
    speed = PrefillSpeed(0.0)
    for _ in range(50):
        speed.observe(length, 1, 2.0, now=1.0)
    assert speed.tokens_per_s == pytest.approx(length / 2.0)
    now = 1.1 + 20 * KEPT_S
    for _ in range(4):
        speed.observe(length, 1, 0.9, now=now)
    assert speed.tokens_per_s > length / 2.0 * 1.7
    assert not speed.is_old(now + 4 * KEPT_S) and speed.is_old(now + 5.1 * KEPT_S)
    calm = PrefillSpeed(0.0)
    for number in range(40):  # few prompts, of two lengths: the line stays
        calm.observe(
            20 + 180 * (number % 2), 1, 0.02 + 0.002 + 0.018 * (number % 2), now=number * 30.0
        )
    assert calm.tokens_per_s == pytest.approx(10_000, rel=0.02)
