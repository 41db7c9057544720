"""What a worker loop does when nothing is asked of it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pair import ROUTER, SESSION, Pair, deltas, submit

from pdserve.engine.protocol import RequestKey, SamplingParams
from pdserve.worker import loop as worker_loop


@pytest.fixture
def pair(tiny_llama: Path) -> Iterator[Pair]:
    pair = Pair(tiny_llama)
    yield pair
    pair.close()


def run_one(pair: Pair, request_id: str) -> None:
    key = RequestKey(ROUTER, SESSION, request_id)
    pair.d.command(submit(key, "full", [1, 2, 3], SamplingParams(max_tokens=2, seed=1, ignore_eos=True)))
    pair.until(lambda: any(delta.finish_reason for delta in deltas(pair.d, key)))


def test_blocks_are_checked_once_and_only_after_a_rest(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_loop, "REST_S", 0.05)
    checks: list[float] = []
    monkeypatch.setattr(pair.d.engine, "check_integrity", lambda reservations: checks.append(time.monotonic()))
    run_one(pair, "a")
    pair.turn()
    run_one(pair, "b")
    ended = time.monotonic()
    pair.turn()
    assert not checks
    pair.until(lambda: checks)
    assert checks[0] >= ended + 0.04
    time.sleep(0.1)
    pair.turn()
    assert len(checks) == 1


def test_a_lost_block_ends_the_loop_after_a_rest(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_loop, "REST_S", 0.02)
    run_one(pair, "a")
    pair.d.engine.blocks.allocate(1)
    with pytest.raises(AssertionError, match="reference counts"):
        pair.until(lambda: False, 5)
