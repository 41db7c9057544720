"""NIXL's progress thread sleeps, and UCX wakes it when something comes."""

import time

import pytest
from kvtransfer.kv_peers import Engine, ProcessSource, key
from pydantic import ValidationError

from pdserve.configs.transfer import TransferConfig
from pdserve.kvtransfer.connector import PullDone, PullFailed

PULLS = 5
ASLEEP_S = 60.0
TCP = TransferConfig(connector="nixl", ucx_tls="tcp")
ASLEEP = TCP.model_copy(update={"progress_delay_us": round(ASLEEP_S * 1e6)})


@pytest.mark.processes
def test_reads_do_not_wait_for_a_round_of_the_progress_thread() -> None:
    """Over TCP the source's own thread sends the rows, and it sleeps for longer than all of this
    may take."""
    sink = Engine("d", ASLEEP)
    source = ProcessSource("p", ASLEEP, incarnation=1, seed=1)
    try:
        began = time.monotonic()
        assert sink.connect(source.meta).connected
        for number in range(PULLS):
            sink.receiver.pull(number, source.publish(key(str(number)), [3]), [number], 0, 60.0)
            assert isinstance(sink.wait_for(PullDone, PullFailed), PullDone)
        assert time.monotonic() - began < ASLEEP_S / 2
    finally:
        source.close()
        sink.close()


def test_the_progress_thread_may_not_sleep_for_long() -> None:
    """What UCX has no event for waits for a round: QUIET_AFTER_REMOVAL_S counts on some of them."""
    with pytest.raises(ValidationError, match="progress_delay_us"):
        TransferConfig(progress_delay_us=10_001)
