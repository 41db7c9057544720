"""Tests what a worker loop does when nothing is asked of it, and what it reports of waiting
legs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clock import Clock
from support.pair import ROUTER, SESSION, Pair, Worker, deltas, prompt_of, submit

from pdserve.engine.step_result import StepResult
from pdserve.engine.stepping import collector
from pdserve.protocol.commands import Subscribe
from pdserve.protocol.events import EventBatch, LegsWaiting, Snapshot
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.worker import loop as worker_loop
from pdserve.worker import status
from pdserve.worker.outbox import ALL_ROUTERS


@pytest.fixture
def pair(tiny_llama: Path) -> Iterator[Pair]:
    pair = Pair(tiny_llama)
    yield pair
    pair.close()


def run_one(pair: Pair, request_id: str) -> None:
    key = RequestKey(ROUTER, SESSION, request_id)
    pair.d.command(
        submit(key, "full", [1, 2, 3], SamplingParams(max_tokens=2, seed=1, ignore_eos=True))
    )
    pair.until(lambda: any(delta.finish_reason for delta in deltas(pair.d, key)))


def test_blocks_are_checked_once_and_only_after_a_rest(
    clock: Clock, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[float] = []
    monkeypatch.setattr(
        pair.d.engine, "check_integrity", lambda reservations: checks.append(clock())
    )

    def rest(seconds: float) -> int:
        clock.seconds += seconds
        pair.turn()
        return len(checks)

    run_one(pair, "a")
    assert rest(0.9 * worker_loop.REST_S) == 0
    run_one(pair, "b")
    assert rest(0.9 * worker_loop.REST_S) == 0
    assert rest(0.2 * worker_loop.REST_S) == 1
    assert rest(10 * worker_loop.REST_S) == 1


def test_a_lost_block_ends_the_loop_after_a_rest(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_loop, "REST_S", 0.02)
    run_one(pair, "a")
    pair.d.engine.blocks.allocate(1)
    with pytest.raises(AssertionError, match="reference counts"):
        pair.until(lambda: False)


def test_a_large_piece_of_scores_is_a_message_of_its_own(
    tiny_llama: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router decodes whole messages, and others wait for it meanwhile."""
    messages: list[list[str]] = []

    def sent(target: str, batch: EventBatch) -> None:
        if target != ALL_ROUTERS:
            messages.append([type(event).__name__ for event in batch.events])

    monkeypatch.setattr(collector, "SCORES_PER_EVENT", 48)
    monkeypatch.setattr(pair.d.loop._outbox, "_send", sent)
    sampling = SamplingParams(max_tokens=1, seed=1, ignore_eos=True, prompt_logprobs=2)
    pair.d.command(submit(RequestKey(ROUTER, SESSION, "a"), "full", prompt_of(40), sampling))
    pair.d.command(submit(RequestKey(ROUTER, SESSION, "b"), "full", prompt_of(10), sampling))
    pair.until(lambda: not pair.d.engine.has_work)
    named = [[name for name in names if name in ("PromptScored", "Delta")] for names in messages]
    scored = ["PromptScored"]
    delta = ["Delta"]
    assert [names for names in named if names] == [scored, scored, scored, [*delta, *scored], delta]


def told_waiting(worker: Worker, session: int = SESSION) -> list[tuple[tuple[str, int], ...]]:
    """Returns each LegsWaiting that went to one router."""
    return [e.legs for e in worker.by_session[f"{ROUTER}/{session}"] if isinstance(e, LegsWaiting)]


@pytest.fixture
def narrow(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """D runs one sequence at a time, computes 16 tokens per step, and reports with every turn."""
    monkeypatch.setattr(status, "SNAPSHOT_PERIOD_S", 0.0)
    pair = Pair(tiny_llama, d={"max_num_seqs": 1, "max_num_batched_tokens": 16})
    yield pair
    pair.close()


def test_a_leg_that_waits_behind_work_is_told_and_one_that_has_begun_is_not(narrow: Pair) -> None:
    first, second = (RequestKey(ROUTER, SESSION, name, 3) for name in ("first", "second"))
    sampling = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    for key in (first, second):
        narrow.d.command(submit(key, "full", [1, 2, 3], sampling))
    narrow.until(lambda: any(delta.finish_reason for delta in deltas(narrow.d, first)))
    waited = told_waiting(narrow.d)
    assert len(waited) >= 6 and all(("second", 3) in legs for legs in waited)
    assert sum(("first", 3) in legs for legs in waited) <= 1, "its prompt was computed in one step"
    narrow.d.by_session.clear()
    narrow.until(lambda: any(delta.finish_reason for delta in deltas(narrow.d, second)))
    assert sum(("second", 3) in legs for legs in told_waiting(narrow.d)) <= 1
    narrow.d.by_session.clear()
    narrow.turn()
    assert told_waiting(narrow.d) == [], "nothing is left"


def test_a_prompt_in_many_steps_is_told_as_long_as_it_advances(narrow: Pair) -> None:
    key = RequestKey(ROUTER, SESSION, "long")
    narrow.d.command(
        submit(key, "full", prompt_of(100), SamplingParams(max_tokens=2, seed=1, ignore_eos=True))
    )
    narrow.until(lambda: deltas(narrow.d, key))
    assert 6 <= len(told_waiting(narrow.d)) <= 8, "with each of 7 steps"


def test_a_router_is_told_of_its_own_legs_only(narrow: Pair) -> None:
    narrow.d.command(Subscribe(router_id=ROUTER, session=SESSION + 1))
    keys = [RequestKey(ROUTER, session, "same") for session in (SESSION, SESSION + 1, SESSION + 1)]
    keys[2] = RequestKey(ROUTER, SESSION + 1, "other")
    for key in keys:
        narrow.d.command(
            submit(key, "full", [1, 2, 3], SamplingParams(max_tokens=6, seed=1, ignore_eos=True))
        )
    narrow.d.by_session.clear()
    narrow.until(lambda: any(delta.finish_reason for delta in deltas(narrow.d, keys[0])))
    assert {leg for legs in told_waiting(narrow.d) for leg in legs} <= {("same", 0)}
    assert {leg for legs in told_waiting(narrow.d, SESSION + 1) for leg in legs} == {
        ("same", 0),
        ("other", 0),
    }


def test_a_queue_that_does_not_move_is_no_reason_to_wait(
    narrow: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its blocks never come back: the router shall find that nothing happens."""
    monkeypatch.setattr(narrow.d.engine, "step", lambda is_patient: StepResult())
    narrow.d.command(
        submit(RequestKey(ROUTER, SESSION, "stuck"), "full", [1, 2, 3], SamplingParams(seed=1))
    )
    for _ in range(5):
        narrow.turn()
    assert told_waiting(narrow.d) == [(("stuck", 0),)], "only that it was read"


def test_a_prompt_that_was_read_is_named_before_a_report_counts_it(narrow: Pair) -> None:
    sampling = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    narrow.d.events.clear()
    for name in ("first", "second"):
        key = RequestKey(ROUTER, SESSION, name)
        narrow.d.command(submit(key, "full", [1, 2, 3], sampling))
    narrow.d.loop.turn()
    events = narrow.d.events
    counted = [isinstance(e, Snapshot) and e.queue_tokens == 3 for e in events].index(True)
    assert LegsWaiting(legs=(("second", 0),)) in events[:counted]


def test_a_prompt_is_named_once_if_it_has_no_event_by_then(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "SNAPSHOT_PERIOD_S", 1000.0)
    monkeypatch.setattr(status, "FRESH_SNAPSHOT_S", 1000.0)
    pair = Pair(tiny_llama, d={"max_num_seqs": 1, "max_num_batched_tokens": 16})
    keys = [RequestKey(ROUTER, SESSION, name) for name in ("first", "second", "long")]
    sampling = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    try:
        pair.d.by_session.clear()
        for key, length in zip(keys, (3, 3, 40), strict=True):
            pair.d.command(submit(key, "full", prompt_of(length), sampling))
        pair.until(lambda: any(delta.finish_reason for delta in deltas(pair.d, keys[2])))
        assert told_waiting(pair.d) == [(("second", 0), ("long", 0))], "first was computed at once"
    finally:
        pair.close()


def test_routers_hear_at_once_of_a_speed_that_was_vague(
    clock: Clock, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "SNAPSHOT_PERIOD_S", 1000.0)
    monkeypatch.setattr(status, "FRESH_SNAPSHOT_S", 1000.0)

    def told(request_id: str, length: int = 300) -> list[bool]:
        """Computes a prompt, and returns of each Snapshot whether the speed is vague."""
        pair.d.events.clear()
        key = RequestKey(ROUTER, SESSION, request_id)
        sampling = SamplingParams(max_tokens=2, seed=1, ignore_eos=True)
        pair.d.command(submit(key, "full", prompt_of(length, "abcd".index(request_id)), sampling))
        pair.until(lambda: any(delta.finish_reason for delta in deltas(pair.d, key)))
        return [e.is_prefill_speed_vague for e in pair.d.events if isinstance(e, Snapshot)]

    assert told("a", 3) == [], "too few rows to show a speed"
    assert pair.d.loop.snapshot().prefill_tokens_per_s == 0
    assert told("b", 40) == [], "small steps show only the least speed"
    assert pair.d.loop.snapshot().is_prefill_speed_vague
    assert told("c") == [False]
    clock.seconds += 100.0
    assert pair.d.loop.snapshot().is_prefill_speed_vague
    assert told("d") == [False]


def test_an_import_that_waits_for_blocks_is_told(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "SNAPSHOT_PERIOD_S", 0.0)
    pair = Pair(tiny_llama, d={"num_kv_blocks": 8})
    try:
        sampling = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
        prompt = prompt_of(40)
        handoff, first = pair.prefill(prompt, sampling)
        taken = pair.d.engine.blocks.allocate(pair.d.engine.blocks.num_free)
        key = pair.decode(handoff, prompt, sampling, first)
        for _ in range(3):
            pair.turn()
        assert told_waiting(pair.d) == [((key.request_id, key.attempt),)] * 3
        pair.d.engine.blocks.release(taken)
        pair.finish(key)
    finally:
        pair.close()
