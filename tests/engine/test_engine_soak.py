"""The soak of benchmarks/engine/soak.py for a moment: it ends with all blocks free; its verdict
sees what is wrong."""

from pathlib import Path

import pytest
from engine.harness import make_engine
from support.waiting import until

from benchmarks.engine.soak import Soak, verdict


@pytest.mark.lengthy
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_short_soak(tiny_llama: Path, is_async: bool) -> None:
    engine = make_engine(tiny_llama, num_kv_blocks=60, max_num_seqs=24, async_scheduling=is_async)
    soak = Soak(engine, concurrency=20, longest=100, seed=1)
    num_tokens = num_aborted = 0

    def has_seen_all() -> bool:
        nonlocal num_tokens, num_aborted
        totals = soak.run(0.5)
        assert totals.faults == []
        num_tokens += totals.tokens
        num_aborted += totals.aborted
        return num_tokens > 1000 and num_aborted > 0 and engine.scheduler.num_preemptions > 0

    until(has_seen_all)
    soak.finish()


def test_the_verdict_names_leaks_faults_and_falling_throughput() -> None:
    good = {"faults": 0, "seconds": 30.0, "tokens_per_s": 100, "host_mib": 1000, "device_mib": 5000}
    slow = good | {"tokens_per_s": 50}
    leak = good | {"device_mib": 6000}
    wrong = good | {"faults": 3}
    assert verdict([good] * 6) == []
    assert "throughput fell to 50" in verdict([good] * 5 + [slow])[0]
    assert "device_mib grew by 1000" in verdict([good] * 5 + [leak])[0]
    assert "3 requests went wrong" in verdict([wrong] + [good] * 5)[0]
