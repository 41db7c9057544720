"""Ending an engine's processes, whatever state they are in."""

import signal
import subprocess
import time

import pytest

from pdserve.cluster.deployments.engine_processes import EngineProcesses

pytestmark = pytest.mark.processes


def test_frozen_and_ended_processes_are_gone_soon() -> None:
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    frozen, ended, _ = children
    processes = EngineProcesses(child.pid for child in children)
    frozen.send_signal(signal.SIGSTOP)
    ended.kill()
    ended.wait()
    began = time.monotonic()
    assert processes.kill(wait_s=10.0)
    assert time.monotonic() - began < 5.0
    assert [child.wait(1) for child in children] == [-signal.SIGKILL] * 3
    assert processes.kill(wait_s=0.0), "again"


def test_one_that_does_not_end_is_not_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "60"])
    processes = EngineProcesses([child.pid])
    with monkeypatch.context() as patch:
        patch.setattr(signal, "pidfd_send_signal", lambda *_: None)
        began = time.monotonic()
        assert not processes.kill(wait_s=0.1)
        assert time.monotonic() - began < 2.0
    assert processes.kill(wait_s=10.0)
    child.wait(1)
