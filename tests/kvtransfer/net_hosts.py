"""Engines' memories and connectors in processes of their own, which live in the network namespaces
of `benchmarks.support.two_hosts`.

`python net_hosts.py SOCKET` is such a process: it makes one object and does as it is told.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from kvtransfer.kv_peers import key
from support.processes import freeze

from pdserve.configs.kv_layout import KVLayout
from pdserve.configs.transfer import TransferConfig
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.kvtransfer.build import build_connector
from pdserve.kvtransfer.connector import KVCacheMemory, Unpinned
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import KVCacheMeta, Ticket

NUM_BLOCKS = 128
LAYOUT = KVLayout.uniform(
    num_layers=8, heads=tuple(range(8)), head_dim=64, block_size=16, dtype="float32"
)
POOL_BYTES = NUM_BLOCKS * LAYOUT.block_bytes


def contents(seed: int) -> torch.Tensor:
    """A KV cache in which every word of every block differs."""
    words = NUM_BLOCKS * LAYOUT.block_bytes // 4
    numbers = torch.arange(words, dtype=torch.int32) + seed * 7919
    return numbers.view(torch.float32).view(NUM_BLOCKS, *LAYOUT.shapes[0])


def own_address() -> str:
    """In one of the two namespaces its end of the link, else loopback."""
    found = psutil.net_if_addrs()
    link = found.get("pdp") or found.get("pdd")
    return next((each.address for each in link or () if each.family == socket.AF_INET), "127.0.0.1")


class NetEngine:
    """An engine's memory and connector. seed: of a KV cache that has contents."""

    def __init__(
        self, engine_id: str, config: TransferConfig, incarnation: int = 1, seed: int | None = None
    ) -> None:
        self._pool = torch.zeros(NUM_BLOCKS, *LAYOUT.shapes[0]) if seed is None else contents(seed)
        self._events: list[Any] = []
        generations = np.arange(100, 100 + NUM_BLOCKS, dtype=np.int64)[None]
        memory = KVCacheMemory(KVCache(self._pool, LAYOUT), generations, "model", "rows")
        self._sender, self._receiver = build_connector(
            config, memory, engine_id, incarnation, lambda: None, host=own_address()
        )

    def meta(self) -> KVCacheMeta:
        return self._sender.meta()

    def publish(self, name: str, block_ids: list[int]) -> Ticket:
        return self._sender.publish(
            key(name), block_ids, len(block_ids) * LAYOUT.block_size, b"content"
        )

    def unpinned(self) -> list[Unpinned]:
        return self._sender.poll()

    def connect(self, meta: KVCacheMeta) -> PeerStatus | None:
        self._receiver.connect(meta)
        return self.event(PeerStatus, 60.0)

    def pull(self, pull_id: int, ticket: Ticket, block_ids: list[int], deadline_s: float) -> None:
        self._receiver.pull(pull_id, ticket, block_ids, 0, deadline_s)

    def event(self, kind: type, timeout_s: float) -> Any:
        """The next event of a kind; those before it are dropped. None when there is none in
        time."""
        ends = time.monotonic() + timeout_s
        while True:
            self._events += self._receiver.poll()
            while self._events:
                event = self._events.pop(0)
                if isinstance(event, kind):
                    return event
            if time.monotonic() > ends:
                return None
            time.sleep(0.001)

    def has_posted(self, pull_id: int) -> bool:
        """Its first read is on its way, if nothing else went wrong."""
        links = self._receiver.local_ranks[0].links
        pulls = [pull for link in links for pull in link.pulls.under_way]
        return any(pull.pull_id == pull_id and pull.pieces for pull in pulls)

    def sever(self, agent_name: str) -> int:
        return self._receiver.local_ranks[0].agent.sever(agent_name)

    def num_equal(self, seed: int) -> int:
        """How many blocks hold what those of the same number do in a KV cache of this seed."""
        ours, theirs = (
            pool.view(torch.int32).view(NUM_BLOCKS, -1) for pool in (self._pool, contents(seed))
        )
        return int((ours == theirs).all(dim=1).sum())

    def digest(self) -> int:
        """Compute a digest of every byte of the KV cache."""
        return zlib.crc32(self._pool.numpy().data)

    def clear(self) -> None:
        self._pool.zero_()

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


class Remote:
    """A NetEngine in a process of its own; its methods are called over a pipe, `kill` is SIGKILL.
    prefix: of the process's command."""

    def __init__(self, prefix: list[str], *arguments: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pdserve-net-")
        path = f"{self._folder.name}/pipe"
        here = Path(__file__).parent.parent
        with Listener(path, "AF_UNIX") as listener:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, __file__, path],
                env={**os.environ, "PYTHONPATH": f"{here}:{here.parent}", "NIXL_LOG_LEVEL": "WARN"},
            )
            self._pipe: Connection = listener.accept()
        started = psutil.Process(self._process.pid)
        self._engine = next(iter(started.children()), started)
        self._call(arguments)

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self._call((name, values))

    def _call(self, message: Any) -> Any:
        self._pipe.send(message)
        assert self._pipe.poll(300), "the engine's process does not answer"
        return self._pipe.recv()

    def freeze(self) -> None:
        freeze(self._engine.pid)

    def thaw(self) -> None:
        self._engine.resume()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._engine.send_signal(signal.SIGKILL)
        self._process.wait(10)

    def end(self) -> None:
        """The process notices that nobody talks to it any more."""
        self._pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
        self._folder.cleanup()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    engine = NetEngine(*pipe.recv())
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            name, values = pipe.recv()
            pipe.send(getattr(engine, name)(*values))
    os._exit(0)  # whatever its transport still does


if __name__ == "__main__":
    from kvtransfer import net_hosts  # the messages' classes are that module's, not __main__'s

    net_hosts._serve(Client(sys.argv[1], "AF_UNIX"))
