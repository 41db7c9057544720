import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router.harness import routed

from pdserve.protocol.commands import Start
from pdserve.protocol.events import Delta, PackedScores, PromptScored, TokenLogprob
from pdserve.router.held_bytes import size_of
from pdserve.router.request.record import Accepted, LegError, RequestRecord


def delta(
    attempt: int, position: int, tokens: tuple[int, ...], choice: int = 0, reason: str | None = None
) -> Delta:
    return Delta("r", attempt, choice, position, tokens, reason)  # type: ignore[arg-type]


def new(record: RequestRecord, message: Delta) -> Accepted:
    accepted = record.accept(message)
    assert accepted is not None
    return accepted


def test_the_first_token_accepted_at_a_position_stays() -> None:
    record = RequestRecord(1)
    first = record.open_leg()
    assert new(record, delta(first, 0, (5, 6))).token_ids == (5, 6)
    assert record.accept(delta(first, 0, (5, 6))) is None
    second = record.open_leg()
    assert new(record, delta(second, 1, (9, 7))).token_ids == (7,)
    assert record.choices[0].tokens == [5, 6, 7]


def test_only_live_legs_are_heard() -> None:
    record = RequestRecord(1)
    first = record.open_leg()
    second = record.open_leg()
    assert record.accept(delta(first, 0, (5,))) is not None
    record.close_leg(first)
    assert record.accept(delta(first, 1, (6,))) is None
    assert record.accept(delta(second + 1, 1, (6,))) is None
    assert new(record, delta(second, 1, (6,))).token_ids == (6,)
    assert record.open_leg() not in (first, second)


def test_gaps_and_nonsense_are_the_legs_error() -> None:
    record = RequestRecord(1)
    leg = record.open_leg()
    record.accept(delta(leg, 0, (1, 2)))
    for bad in (
        delta(leg, 3, (4,)),
        delta(leg, 0, (1,), choice=1),
        delta(leg, 0, (1,), reason="stop"),
    ):
        with pytest.raises(LegError):
            record.accept(bad)
    assert record.choices[0].tokens == [1, 2] and not record.finished


def test_finishing() -> None:
    record = RequestRecord(2)
    leg = record.open_leg()
    record.accept(delta(leg, 0, (1, 2), choice=1))
    assert new(record, delta(leg, 0, (1,), reason="length")).finish_reason == "length"
    assert record.accept(delta(leg, 1, (9,))) is None
    assert record.starts() == (Start(1, (1, 2)),) and not record.finished
    assert new(record, delta(leg, 2, (), choice=1, reason="stop")).token_ids == ()
    assert record.finished and record.num_tokens == 3 and record.starts() == ()


def test_a_stop_string_forgets_what_follows() -> None:
    record = RequestRecord(1)
    record.accept(delta(record.open_leg(), 0, (1, 2, 3, 4)))
    record.stop(0, "x", 2)
    assert (record.choices[0].tokens, record.choices[0].finish_reason) == ([1, 2], "stop")
    assert record.choices[0].stop_reason == "x" and record.finished


def test_logprobs_follow_their_tokens() -> None:
    record = RequestRecord(1, wants_logprobs=True)
    leg = record.open_leg()
    scored = [TokenLogprob(token, -1.0, 1) for token in (5, 6, 7)]
    record.accept(Delta("r", leg, 0, 0, (5,), None, None, (scored[0],)))
    again = Delta("r", leg, 0, 0, (5, 6, 7), None, None, tuple(scored))
    assert new(record, again).logprobs == tuple(scored[1:])
    for wrong in (None, (scored[0], scored[1])):
        with pytest.raises(LegError, match="logprobs"):
            record.accept(Delta("r", leg, 0, 3, (8,), None, None, wrong))


def test_prompt_logprobs_come_in_parts_and_survive_a_restart() -> None:
    record = RequestRecord(1)
    a = TokenLogprob(1, -1.0, 1)
    b = TokenLogprob(2, -2.0, 1)

    def part(
        leg: int, start: int, values: tuple[TokenLogprob | None, ...], final: bool, cached: int = 0
    ) -> PackedScores:
        scored = PromptScored(
            request_id="r",
            attempt=leg,
            cached_tokens=cached,
            start=start,
            logprobs=values,
            final=final,
        )
        return routed(scored)

    first = record.open_leg()
    second = record.open_leg()
    record.score(part(first, 0, (None, a), False, cached=3))
    record.score(part(second, 0, (None,), False, cached=7))
    with pytest.raises(LegError):
        record.score(part(second, 2, (b,), True))
    assert record.prompt_logprobs() is None
    record.score(part(second, 1, (a, b), True))
    record.score(part(first, 0, (None,), True))
    assert list(record.prompt_logprobs() or ()) == [None, a, b] and record.cached_tokens == 3
    record.close_leg(second)
    record.score(part(second, 0, (), True))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 4)), max_size=40))
@settings(max_examples=300, deadline=None)
def test_whatever_arrives_accepted_tokens_only_grow(messages: list[tuple[int, int, int]]) -> None:
    record = RequestRecord(1)
    legs = [record.open_leg(), record.open_leg()]
    record.close_leg(legs[0])
    before: list[int] = []
    for attempt, position, count in messages:
        tokens = tuple(100 * attempt + position + i for i in range(count))
        try:
            accepted = record.accept(delta(attempt, position, tokens))
        except LegError:
            accepted = None
        now = record.choices[0].tokens
        assert now[: len(before)] == before
        assert now[len(before) :] == list(accepted.token_ids if accepted else ())
        assert all(100 <= token < 200 for token in now)  # of the live leg alone
        before = list(now)


def test_a_prompts_scores_take_a_part_of_what_their_objects_do() -> None:
    record = RequestRecord(1)
    top = tuple((1000 + rank, -1.5 - rank) for rank in range(20))
    scores = tuple(TokenLogprob(7, -0.5, 1, top) for _ in range(100))
    leg = record.open_leg()
    for start, values in ((0, (None, *scores)), (101, scores)):
        part = PromptScored(
            request_id="r",
            attempt=leg,
            cached_tokens=0,
            start=start,
            logprobs=values,
            final=start > 0,
        )
        record.score(routed(part))
    assert list(record.prompt_logprobs() or ()) == [None, *scores, *scores], (
        "as often as somebody asks"
    )
    assert list(record.prompt_logprobs() or ()) == [None, *scores, *scores]
    assert (
        record.num_score_bytes
        == sum(each.num_bytes for each in record._scores)
        < 2 * size_of(0, scores) / 6
    )
    record.forget_scores()
    assert not record._scores and record.num_score_bytes == 0
    record.score(
        routed(PromptScored(request_id="r", attempt=leg, cached_tokens=0, logprobs=scores))
    )
    assert record.is_scored and not record._scores, "they were here"
