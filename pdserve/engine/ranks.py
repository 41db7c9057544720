"""The other ranks of an `LLM` that runs on several devices. They are processes on this machine that
end with it.

    python -m pdserve.engine.ranks    reads its RankTask from standard input, as JSON

In a cluster, Ray starts the ranks of workers (cluster.deployments). Knows no requests.
"""

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

import pdserve
from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.engine.build import Following, build_engine
from pdserve.engine.engine import Engine
from pdserve.engine.execution.group_executor import GroupExecutor
from pdserve.engine.expert_places import load_to_place_by
from pdserve.engine.stepping.executor import Executor
from pdserve.engine.stepping.step_watch import StepWatch
from pdserve.models.checkpoint import resolve_folder
from pdserve.models.config import read_spec
from pdserve.parallel.bring_up import RankFailed, RankGroup
from pdserve.parallel.dims import dims_of
from pdserve.parallel.hang_up import end_with

T = TypeVar("T")
CLOSE_S = 5.0  # seconds for all ranks to end by themselves
STOP_S = 0.5  # seconds for ranks to act on a Stop, before their standard input is closed
LEAST_WAIT_S = 0.01  # minimum wait for each of them, however late it is


class RankProcesses:
    """Ranks from 1 on, as started processes; `group` is rank 0's. They end when this process ends,
    or by `close`. children: processes by rank."""

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.group = RankGroup.host(dims_of(config), watch=self._check)
        try:
            for rank in range(1, config.num_ranks):
                self.children[rank] = self._start(model, config, rank)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Wait until all have ended; those that do not end by themselves are killed."""
        until = time.monotonic() + CLOSE_S
        stopped = time.monotonic() + STOP_S
        for child in self.children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(stopped - time.monotonic(), LEAST_WAIT_S))
        for child in self.children.values():
            assert child.stdin is not None
            with contextlib.suppress(OSError):
                child.stdin.close()
        for child in self.children.values():
            try:
                child.wait(max(until - time.monotonic(), LEAST_WAIT_S))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def command(self) -> list[str]:
        """The command of a rank's process, which reads a RankTask from standard input."""
        return [sys.executable, "-m", "pdserve.engine.ranks"]

    def _start(
        self, model: ModelConfig, config: EngineConfig, rank: int
    ) -> "subprocess.Popen[bytes]":
        task = RankTask.of(model, config, rank, self.group)
        package = str(Path(pdserve.__file__).parent.parent)
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        child = subprocess.Popen(
            self.command(),
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            process_group=0,  # Ctrl-C at a terminal reaches rank 0 only
        )
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(task) + b"\n")
        child.stdin.flush()
        return child

    def _check(self) -> None:
        for rank, child in self.children.items():
            if (status := child.poll()) is not None:
                raise RankFailed(
                    f"rank {rank} (process {child.pid}) ended with status {status} while the "
                    "engine started: its own message stands above"
                )


RunWork = Callable[[Callable[[threading.Event], None]], None]
"""Runs work. The work must end soon after the event that it is given is set."""


def build_with_ranks(model: ModelConfig, config: EngineConfig) -> tuple[Engine, RunWork]:
    """Build an engine of `config.num_ranks` ranks; the other ranks are processes that end with it.
    Also returns a function that runs work on it. ValueError names a parameter that is wrong."""
    if config.num_ranks == 1:
        return build_engine(model, config), lambda work: work(threading.Event())
    folder = resolve_folder(model.resolved_path, model.load_format, model.revision)
    spec = read_spec(
        str(folder),
        "dummy",
        quantization=model.quantization,
        activation_dtype=model.activation_dtype,
    )
    spec.check_parallel(dims_of(config), config.redundant_experts)
    load_to_place_by(config, spec)
    processes = RankProcesses(model, config)
    thread = _OwnThread()
    try:
        # on that thread, because cuDNN's plans belong to the thread that made them
        engine = thread.result_of(lambda: build_engine(model, config, group=processes.group))
    except BaseException:
        processes.close()
        raise
    assert isinstance(engine.executor, GroupExecutor)
    watch = StepWatch(engine.step_clock, engine.config.step_deadline_s, engine.executor.break_off)
    weakref.finalize(engine, _end, engine.executor, processes, watch)
    return engine, thread


def _end(executor: Executor, processes: RankProcesses, watch: StepWatch) -> None:
    watch.stop()
    with contextlib.suppress(RuntimeError, ConnectionError):
        executor.close()
    processes.close()


class _OwnThread:
    """Runs work on a thread that no signal reaches, because what ranks do together must not be cut
    off. An interruption of the caller ends the work at its next step, and then the wait."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "engine")
        # If an interruption came while the pool starts its thread, it would start another later.
        self._thread.submit(int).result()

    def result_of(self, make: Callable[[], T]) -> T:
        """Return what `make` returns, or raise what it raises. Interrupting the caller does not end
        it."""
        return self._thread.submit(make).result()

    def __call__(self, work: Callable[[threading.Event], None]) -> None:
        is_over = threading.Event()
        done = self._thread.submit(work, is_over)
        try:
            done.result()
        except BaseException:
            is_over.set()
            wait([done])
            raise


class RankTask(msgspec.Struct, frozen=True):
    """Everything that the process of a rank needs to know."""

    model: dict[str, object]
    config: dict[str, object]
    rank: int
    address: str
    num_threads: int  # of torch
    parent: int  # process id of rank 0

    @classmethod
    def of(
        cls, model: ModelConfig, config: EngineConfig, rank: int, group: RankGroup
    ) -> "RankTask":
        return cls(
            model.model_dump(mode="json"),
            config.model_dump(mode="json", exclude_unset=True),
            rank,
            group.address,
            max(torch.get_num_threads() // config.num_ranks, 1),
            os.getpid(),
        )

    def run(self) -> None:
        """Run this rank to its end."""
        self.start().run()

    def start(self) -> Following:
        """Start this rank, so that it is ready to follow."""
        config = EngineConfig.model_validate(self.config)
        group = RankGroup.join(dims_of(config, self.rank), self.address, device_index=self.rank)
        return Following(ModelConfig.model_validate(self.model), config, group)


def main() -> None:
    task = msgspec.json.decode(sys.stdin.readline(), type=RankTask)
    end_with(task.parent, sys.stdin.fileno())
    torch.set_num_threads(task.num_threads)
    try:
        following = task.start()
        # a full garbage collection of what was just loaded would otherwise come during a step
        gc.collect()
        gc.freeze()
        following.run()
    except (ValueError, RankFailed) as error:
        # rank 0 has received the error, too, and reports it
        print(f"rank {task.rank}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # process groups are not taken apart: that may wait for others


if __name__ == "__main__":
    main()
