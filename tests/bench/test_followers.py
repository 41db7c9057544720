"""The benchmark of a follower's host time: two ranks that note what they do."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.engine import followers
from pdserve.engine.stepping.wire import Reset, encode_work


def test_a_clock_times_what_comes_between_two_messages() -> None:
    clock = followers.Clock()
    message = encode_work(Reset())
    for _ in range(3):
        assert clock.receive(lambda: message) == message
    noted = clock.noted()
    assert len(noted) == 2
    assert all(each.num_decodes == 0 and 0 <= each.cpu_s < 1 for each in noted)
    assert all(0 < each.host_s < 1 for each in noted)


@pytest.mark.processes
def test_a_follower_of_steps_that_compute_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    given = ["--rows", "5", "--steps", "6", "--device", "cpu", "--max-num-seqs", "8"]
    monkeypatch.setattr(sys, "argv", ["followers", *given, "--out", str(out), "--commit", "abc"])
    assert followers.main() == 0
    [row] = [json.loads(line) for line in out.read_text().splitlines()]
    assert (row["rows"], row["steps"], row["device"]) == (5, 6, "cpu")
    assert row["engine"]["tensor_parallel"] == 2
    assert 0 < row["cpu_ms"]["median"] <= row["cpu_ms"]["p99"] < 100
    assert "host_ms" in capsys.readouterr().out
