import pytest

from pdserve.worker.prefill_speed import MAX_GAIN, PrefillSpeed


def measured(*lengths: int, fixed_s: float = 0.02, per_token_s: float = 1e-4) -> float:
    speed = PrefillSpeed()
    for length in lengths:
        speed.observe(length, 1, fixed_s + per_token_s * length)
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
        speed.observe(8192, 1, 0.2095)
        speed.observe(6808, 1, 0.2160)
    assert speed.tokens_per_s == pytest.approx(15_000 / 0.4255, rel=0.02)


def test_a_step_that_was_held_up_says_nothing() -> None:
    speed = PrefillSpeed()
    for seconds in (0.3, 0.05, 2.6, 0.05):
        speed.observe(2048, 1, seconds)
    assert speed.tokens_per_s == pytest.approx(2048 / 0.05)


def test_steps_that_are_alike_tell_tokens_by_seconds() -> None:
    assert measured(200) == pytest.approx(200 / 0.04)
    assert measured(*[200, 201] * 20) == pytest.approx(200 / 0.04, rel=0.01)


def test_a_line_through_noise_stays_within_reason() -> None:
    speed = PrefillSpeed()
    for length, seconds in ((100, 0.1), (200, 0.1001), (100, 0.1), (200, 0.1)):
        speed.observe(length, 1, seconds)
    plain = 600 / 0.4001
    assert speed.tokens_per_s <= MAX_GAIN * plain * 1.2
    speed.observe(100, 1, 10.0)  # shorter and slower: no line at all
    assert 0 < speed.tokens_per_s < plain


def test_decoding_and_tiny_steps_are_left_out_and_old_steps_fade() -> None:
    speed = PrefillSpeed()
    speed.observe(64, 64, 1.0)
    speed.observe(100, 60, 1.0)
    speed.observe(8, 1, 1.0)
    assert speed.tokens_per_s == 0
    for _ in range(5):
        speed.observe(100, 1, 1.0)
    for _ in range(200):
        speed.observe(100, 1, 0.01)
    assert speed.tokens_per_s == pytest.approx(10_000, rel=0.05)
