"""Stages in two network namespaces, as on two hosts that share no files: rows and steps go over
TCP, and a cut link ends both."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine.several_ranks import ROOMY, answers
from engine.stage_hosts import STEP_DEADLINE_S

from benchmarks.support.two_hosts import ADDRESSES, Net, available, two_hosts
from pdserve.engine.llm import LLM

pytestmark = [pytest.mark.lengthy, pytest.mark.processes]

RATE_MBIT = 400
TESTS = Path(__file__).parent.parent
ENV = {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), "OMP_NUM_THREADS": "1"}
GONE_S = 20.0  # of a host that vanished without farewell
# rank 0's Unix sockets lie where only it sees them
ALONE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$TMPDIR" && exec "$@"', "sh"]


@dataclass
class Hosts:
    """Rank 0 and rank 1, each a process in a namespace of its own."""

    net: Net
    first: "subprocess.Popen[str]"
    second: "subprocess.Popen[str]"

    def ask(self) -> None:
        """Rank 0 is to answer the workload."""
        assert self.first.stdin is not None
        self.first.stdin.write("\n")
        self.first.stdin.flush()

    def said(self) -> Any:
        assert self.first.stdout is not None
        return json.loads(self.first.stdout.readline())


def started(namespace: str, *words: str, folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | ENV | {"TMPDIR": str(folder)},
        cwd=TESTS,
        text=True,
    )


@pytest.fixture
def folder(folder_of: Callable[..., Path]) -> Path:
    return folder_of("llama3", num_hidden_layers=5)


@pytest.fixture
def hosts(folder: Path, tmp_path: Path) -> Iterator[Hosts]:
    if reason := available():
        pytest.skip(reason)
    with two_hosts(RATE_MBIT) as net:
        program = [sys.executable, "-m", "engine.stage_hosts", str(folder), ADDRESSES[0]]
        first = started(net.p, *ALONE, *program, str(os.getpid()), folder=tmp_path)
        second = started(net.d, sys.executable, "-m", "pdserve.engine.ranks", folder=tmp_path)
        try:
            assert first.stdout is not None and second.stdin is not None
            second.stdin.write(first.stdout.readline())
            second.stdin.flush()
            yield Hosts(net, first, second)
        finally:
            for process in (first, second):
                process.kill()
                process.communicate()


def test_stages_on_two_hosts_answer_as_one_rank_does(hosts: Hosts, folder: Path) -> None:
    llm = LLM(str(folder), tokenizer=False, device="cpu", **ROOMY)
    hosts.ask()
    wanted = [[choice.token_ids for choice in each.outputs] for each in answers(llm)]
    assert hosts.said() == wanted


@pytest.mark.slow
def test_a_host_that_vanishes_ends_the_engine_on_both(hosts: Hosts) -> None:
    hosts.ask()
    hosts.said()
    hosts.net.cut()
    began = time.monotonic()
    hosts.ask()
    reason = hosts.said()
    assert isinstance(reason, str) and time.monotonic() - began < STEP_DEADLINE_S + 2.0
    hosts.second.wait(GONE_S)
    assert hosts.second.returncode == 1
