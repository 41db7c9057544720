"""Processes that are the other ranks of one engine after another: most of what a rank's process
costs is Python's and torch's start.

    python -m support.rank_pool    reads RankTasks from standard input, and says how each ended
"""

import os
import select
import subprocess
import sys
import traceback
from pathlib import Path

import msgspec
import torch

from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.engine.ranks import RankTask, dims_of
from pdserve.parallel.bring_up import RankFailed, RankGroup

PATIENCE_S = 10.0
TESTS = Path(__file__).parent.parent


class RankPool:
    """`ranks_of` stands in for `pdserve.engine.ranks.RankProcesses`."""

    def __init__(self) -> None:
        self._idle: list[subprocess.Popen[bytes]] = []

    def ranks_of(self, model: ModelConfig, config: EngineConfig) -> "PooledRanks":
        return PooledRanks(self, model, config)

    def take(self) -> "subprocess.Popen[bytes]":
        if self._idle:
            return self._idle.pop()
        paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        return subprocess.Popen(
            [sys.executable, "-m", "support.rank_pool"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            process_group=0,
        )

    def give_back(self, process: "subprocess.Popen[bytes]") -> None:
        """Ends it unless it said that it is free again."""
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        if ready and process.stdout.readline() == b"free\n":
            self._idle.append(process)
        else:
            _end(process)

    def close(self) -> None:
        for process in self._idle:
            _end(process)
        self._idle.clear()


class PooledRanks:
    def __init__(self, pool: RankPool, model: ModelConfig, config: EngineConfig) -> None:
        self._pool = pool
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.group = RankGroup.host(dims_of(config), watch=self._check)
        for rank in range(1, config.num_ranks):
            child = self.children[rank] = pool.take()
            assert child.stdin is not None
            task = RankTask.of(model, config, rank, self.group)
            child.stdin.write(msgspec.json.encode(task) + b"\n")
            child.stdin.flush()

    def close(self) -> None:
        for child in self.children.values():
            self._pool.give_back(child)
        self.children.clear()

    def _check(self) -> None:
        for rank, child in self.children.items():
            if child.poll() is not None:
                raise RankFailed(f"rank {rank} ended with status {child.returncode}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _serve() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin.buffer:
        try:
            msgspec.json.decode(line, type=RankTask).run()
        except (ValueError, RuntimeError):
            traceback.print_exc()
        sys.stdout.write("free\n")
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _serve()
