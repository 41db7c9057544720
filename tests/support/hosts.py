"""Engine hosts in processes of their own, reached over zmq without Ray: real NIXL, real sockets,
quick to start.

`Host` is one worker process, with one more for each other rank. `LocalLink` gives one router in
this process a link to it, a shell (shell.py) several routers in processes of their own. What needs
Serve itself is tested in tests/cluster.
"""

import contextlib
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from multiprocessing.synchronize import Event
from pathlib import Path

from support.processes import die_with_parent
from support.shell import run_shell

from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.configs.schema import WorkerConfig
from pdserve.configs.transfer import TransferConfig
from pdserve.protocol.commands import Command
from pdserve.router.fleet.link import WorkerLost
from pdserve.worker.engine_client import EngineClient, EngineGone

# Importing torch is nearly all of a host's start: hosts are forked from a server that has done so
# once. (It holds no NIXL agent: a fork after one exists hangs. It sees the environment as it was at
# the first host's start.)
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["pdserve.worker.hosts.follower_host"])


def _serve(
    config: WorkerConfig,
    worker_id: str,
    incarnation: int,
    address: str,
    shell: Path | None,
    ready: Event,
    gpu: int | None,
) -> None:
    die_with_parent(os.getppid())  # the server, which ends with the test run
    os.environ["OMP_NUM_THREADS"] = "1"
    if gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
    from pdserve.worker.hosts.engine_host import EngineHost

    host = EngineHost(config, worker_id, incarnation, address)
    if host.meeting:
        meeting = _meeting_of(address)
        meeting.with_suffix(".new").write_text(host.meeting)
        meeting.with_suffix(".new").rename(meeting)
    host.start()
    if shell is not None:
        threading.Thread(target=run_shell, args=(address, shell), daemon=True).start()
    ready.set()
    host.run()


def _meeting_of(address: str) -> Path:
    """The file that says where an engine's ranks meet."""
    return Path(address.removeprefix("ipc://")).with_name("meeting")


def _follow(
    config: WorkerConfig, worker_id: str, incarnation: int, address: str, rank: int
) -> None:
    die_with_parent(os.getppid())
    os.environ["OMP_NUM_THREADS"] = "1"
    from pdserve.worker.hosts.follower_host import FollowerHost

    while not _meeting_of(address).exists():
        time.sleep(0.01)
    meeting = _meeting_of(address).read_text()
    host = FollowerHost(config, worker_id, incarnation, rank, meeting)
    host.start()
    host.run()
    os._exit(0)


class Host:
    """A running engine host; `kill` is SIGKILL, `close` ends it whatever its state. shells: a
    folder where its shell's socket appears, None for a host without one. gpu: the only card that
    it sees."""

    def __init__(
        self,
        config: WorkerConfig,
        worker_id: str,
        shells: Path | None = None,
        gpu: int | None = None,
    ) -> None:
        self.config = config
        self.worker_id = worker_id
        self.shell = shells / f"{worker_id}.sock" if shells is not None else None
        self._folder = tempfile.TemporaryDirectory(prefix="pdserve-test-")
        self.address = f"ipc://{self._folder.name}/engine"
        self._ready = _forks.Event()
        shared = (config, worker_id, time.time_ns(), self.address)
        self.process = _forks.Process(
            target=_serve, args=(*shared, self.shell, self._ready, gpu), daemon=True
        )
        self.process.start()
        self.followers = [
            _forks.Process(target=_follow, args=(*shared, rank), daemon=True)
            for rank in range(1, config.engine.num_ranks)
        ]
        for follower in self.followers:
            follower.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def wait(self, seconds: float = 300.0) -> None:
        """Until the engine serves."""
        limit = time.monotonic() + seconds
        while not self._ready.wait(0.2):
            assert self.process.is_alive(), "the engine host died at its start"
            assert time.monotonic() < limit, "the engine host did not start in time"

    def kill(self) -> None:
        self.process.kill()
        self.process.join(60)

    def close(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        for process in (self.process, *self.followers):
            process.join(60)
        self._folder.cleanup()
        if self.shell is not None:
            self.shell.unlink(missing_ok=True)


@contextlib.contextmanager
def hosts(
    model: Path | str,
    *names: str,
    engine: dict | None = None,
    degrees: Mapping[str, tuple[int, ...]] | None = None,
    own: Mapping[str, dict] | None = None,
    transfer: dict | None = None,
    shells: Path | None = None,
    gpus: Mapping[str, int] | None = None,
) -> Iterator[list[Host]]:
    """Starts one host per name: P… prefills, D… decodes, W… takes whole requests and fetches
    prefixes, A… takes whole requests and has no connector.

    `degrees` are, by name: tensor parallelism, stages, and data parallelism if it is not 1. `own`
    are, by name, settings of the engine beside those of all. `gpus` are cards, by name. For
    `shells` see Host.
    """
    started = []
    try:
        for name in names:
            tp, pp, dp = (*(degrees or {}).get(name, (1, 1)), 1)[:3]
            parallel = {"tensor_parallel": tp, "pipeline_parallel": pp, "data_parallel": dp}
            parallel |= (own or {}).get(name, {})
            peer = next((other for other in names if other[0] != name[0]), name)
            parallel["peer_stages"] = (degrees or {}).get(peer, (1, 1))[1]
            config = WorkerConfig(
                role={"P": "prefill", "D": "decode"}.get(name[0], "both"),
                connects=name[0] != "A",
                hands_over=name[0] in "PD",
                model=ModelConfig(path=str(model)),
                engine=EngineConfig(
                    **{"device": "cpu", "num_kv_blocks": 512, **(engine or {}), **parallel}
                ),
                transfer=TransferConfig(**(transfer or {})),
            )
            gpu = (gpus or {}).get(name)
            started.append(Host(config, f"{name}-{time.time_ns()}", shells, gpu))
        for host in started:
            host.wait()
        yield started
    finally:
        for host in started:
            host.close()


class LocalLink:
    """A router.fleet.link.WorkerLink over zmq; make it inside the event loop that uses it."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.client = EngineClient(host.address)

    @property
    def worker_id(self) -> str:
        return self._host.worker_id

    async def send(self, command: Command) -> None:
        try:
            self.client.send(command)
        except EngineGone as error:
            raise WorkerLost(str(error)) from error

    async def events(self, router_id: str, session: int) -> AsyncGenerator[bytes, None]:
        try:
            async for batch in self.client.subscribe(router_id, session):
                yield batch
        except EngineGone as error:
            raise WorkerLost(str(error)) from error

    def close(self) -> None:
        self.client.close(stop=False)
