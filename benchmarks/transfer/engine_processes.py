"""Engines without Ray, each with a process for each of its ranks.

It needs no torch, so that the engines' processes choose their device before torch loads.
engine_pair.py drives the engines.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from pdserve.configs.schema import WorkerConfig

START_S = 300.0  # long enough to load a model
STOP_S = 5.0

_spawn = multiprocessing.get_context("spawn")


class EngineProcess:
    """An engine: a process for each of its ranks. `gpus` is their CUDA_VISIBLE_DEVICES. None: it is
    not set."""

    def __init__(self, config: WorkerConfig, name: str, gpus: str | None) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="pdserve-engine-pair-")
        self.address = f"ipc://{self._folder.name}/engine"
        self._pipe, far_end = _spawn.Pipe()
        incarnation = time.time_ns()
        identity = (config, f"{name}-{incarnation}", incarnation)
        ranks = range(1, config.engine.num_ranks)
        links = [_spawn.Pipe() for _ in ranks]
        self._processes = [
            _start(_serve, far_end, [near for near, _ in links], *identity, self.address, gpus)
        ]
        for rank, (near, far) in zip(ranks, links, strict=True):
            self._processes.append(_start(_follow, far, *identity, rank, gpus))
            near.close()
            far.close()
        far_end.close()

    def wait_ready(self) -> None:
        """Waits until the engine serves. Raises ValueError if it does not start."""
        try:
            trouble = (
                self._pipe.recv() if self._pipe.poll(START_S) else f"not ready after {START_S:g} s"
            )
        except EOFError:
            trouble = "its process ended without a message"
        if trouble:
            raise ValueError(f"engine {self.name} did not start: {trouble}")

    def join(self) -> None:
        """Waits for an engine that was told to stop."""
        for process in self._processes:
            process.join(STOP_S)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._pipe.close()
        self._folder.cleanup()


def _start(target: Callable[..., None], *arguments: object) -> SpawnProcess:
    process = _spawn.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def _serve(
    parent: Connection,
    others: Sequence[Connection],
    config: WorkerConfig,
    worker_id: str,
    incarnation: int,
    address: str,
    gpus: str | None,
) -> None:
    """Runs rank 0, which tells the other ranks where they meet it."""
    _prepare_process(parent, gpus)
    from pdserve.worker.hosts.engine_host import EngineHost

    try:
        host = EngineHost(config, worker_id, incarnation, address)
        for other in others:
            other.send(host.meeting)
        host.start()
    except (ValueError, OSError, RuntimeError) as error:
        parent.send(str(error) or repr(error))
        return
    gc.collect()
    gc.freeze()
    parent.send("")
    host.run()


def _follow(
    first: Connection,
    config: WorkerConfig,
    worker_id: str,
    incarnation: int,
    rank: int,
    gpus: str | None,
) -> None:
    """Runs another rank. `first` is rank 0's process."""
    meeting = first.recv()
    _prepare_process(first, gpus)
    from pdserve.worker.hosts.follower_host import FollowerHost

    host = FollowerHost(config, worker_id, incarnation, rank, meeting)
    host.start()
    host.run()


def _prepare_process(owner: Connection, gpus: str | None) -> None:
    """Sets up a rank's process, before torch loads. It ends with the process at the other end of
    `owner`."""
    # A terminal sends SIGINT to the whole group, but the owner must end this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus


def _end_with(owner: Connection) -> None:
    """Ends this process when the other end of the pipe closes, however its owner ends."""
    with contextlib.suppress(EOFError, OSError):
        owner.recv()
    os._exit(1)


@contextmanager
def engine_processes(
    configs: Sequence[WorkerConfig], gpus: Sequence[str | None]
) -> Iterator[list[EngineProcess]]:
    """Starts engines, named by their role. They end with the context, whatever ends it. Raises
    ValueError if one does not start."""
    started: list[EngineProcess] = []
    try:
        for config, gpu in zip(configs, gpus, strict=True):
            started.append(EngineProcess(config, config.role, gpu))
        for process in started:
            process.wait_ready()
        try:
            yield started
        finally:  # the user of the engines has told them to stop
            for process in started:
                process.join()
    finally:
        for process in started:
            process.close()
