"""Engines for the kvtransfer tests: a small KV cache with a connector, in this process or in a
child driven over a pipe."""

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import torch
from support.processes import die_with_parent, freeze
from support.waiting import until

from pdserve.configs.kv_layout import KVLayout, rows_digest
from pdserve.configs.transfer import TransferConfig
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.kvtransfer.build import build_connector
from pdserve.kvtransfer.connector import KVCacheMemory, ReceiverEvent, Unpinned
from pdserve.kvtransfer.transport.local_agent import LocalAgent, LocalFaults
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import KVCacheMeta, Ticket
from pdserve.protocol.request_key import RequestKey

NUM_BLOCKS = 64
LAYOUT = KVLayout.uniform(num_layers=2, heads=(0, 1), head_dim=8, block_size=16, dtype="float32")


def key(name: str, attempt: int = 0) -> RequestKey:
    return RequestKey(router_id="router", session=1, request_id=name, attempt=attempt)


def layout_of(block_size: int) -> KVLayout:
    return LAYOUT.with_block_size(block_size)


def empty_pool(block_size: int) -> torch.Tensor:
    """Room for as many tokens, whatever the block size."""
    return torch.zeros(
        NUM_BLOCKS * LAYOUT.block_size // block_size, *layout_of(block_size).shapes[0]
    )


def pattern(seed: int, block_size: int = LAYOUT.block_size) -> torch.Tensor:
    """The content of a source KV cache: every block differs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(empty_pool(block_size).shape, generator=generator)


def rows(blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, heads, layers, 2, block size, width] as [tokens, heads, layers, 2, width]."""
    return blocks.movedim(4, 1).flatten(0, 1)


class Engine:
    """The parts of an engine: memory, sender, receiver, and a count of wakes."""

    def __init__(
        self,
        engine_id: str,
        config: TransferConfig,
        *,
        incarnation: int = 1,
        kv_cache: torch.Tensor | None = None,
        fingerprint: str = "model",
        registry: Any = None,
        block_size: int = LAYOUT.block_size,
    ) -> None:
        self.kv_cache = kv_cache if kv_cache is not None else empty_pool(block_size)
        self.generations = np.arange(100, 100 + self.kv_cache.shape[0], dtype=np.int64)
        self.wakes = 0
        layout = layout_of(block_size)
        rows = rows_digest(fingerprint, layout.groups)
        cache = KVCache(self.kv_cache, layout)
        memory = KVCacheMemory(cache, self.generations[None], fingerprint, rows)
        self.sender, self.receiver = build_connector(
            config, memory, engine_id, incarnation, self._wake, registry=registry
        )
        self.events: list[ReceiverEvent] = []

    def _wake(self) -> None:
        self.wakes += 1

    def wait(self, wanted: Callable[[ReceiverEvent], bool], timeout_s: float = 60.0) -> Any:
        """The first event that is wanted; it and those before it are taken from `events`."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            self.events += self.receiver.poll()
            for index, event in enumerate(self.events):
                if wanted(event):
                    del self.events[: index + 1]
                    return event
            time.sleep(0.001)
        raise AssertionError(f"no such event within {timeout_s} s; got {self.events}")

    def wait_for(self, *kinds: type, pull_id: int | None = None) -> Any:
        return self.wait(
            lambda e: (
                isinstance(e, kinds) and (pull_id is None or getattr(e, "pull_id", None) == pull_id)
            )
        )

    def connect(self, meta: KVCacheMeta) -> PeerStatus:
        self.receiver.connect(meta)
        return self.wait_for(PeerStatus)

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


def pull_of(sink: Engine, pull_id: int) -> Any:
    """As the link knows it; None before it does."""
    links = sink.receiver.local_ranks[0].links
    pulls = [pull for link in links for pull in link.pulls.under_way if pull.pull_id == pull_id]
    return next(iter(pulls), None)


def expire(receiver: Any, pull_id: int) -> None:
    """The deadline of a pull comes as soon as reads of it are under way. receiver: an engine's, or
    a rank's."""
    rank = getattr(receiver, "local_ranks", [receiver])[0]

    def reading() -> list[Any]:
        links = rank.links
        pulls = [pull for link in links for pull in link.pulls.under_way]
        return [pull for pull in pulls if pull.pull_id == pull_id and pull.pieces]

    until(reading)
    [pull] = reading()
    pull.deadline = 0.0


def until_posted(sink: Engine, pull_id: int, num_blocks: int) -> None:
    """The first blocks are read, or their read is under way."""
    until(lambda: (pull := pull_of(sink, pull_id)) is not None and pull.posted >= num_blocks)


def until_verified(sink: Engine, pull_id: int, num_blocks: int) -> None:
    until(lambda: (pull := pull_of(sink, pull_id)) is not None and pull.verified >= num_blocks)


class LocalSource:
    """Holds a source engine in this process."""

    def __init__(
        self,
        engine_id: str,
        config: TransferConfig,
        *,
        incarnation: int = 1,
        seed: int = 0,
        block_size: int = LAYOUT.block_size,
    ) -> None:
        kv_cache = pattern(seed, block_size)
        self.engine = Engine(
            engine_id, config, incarnation=incarnation, kv_cache=kv_cache, block_size=block_size
        )
        self.meta = self.engine.sender.meta()
        self.block_size = block_size

    def publish(
        self, request: RequestKey, block_ids: list[int], num_tokens: int | None = None
    ) -> Ticket:
        """Publish a prompt. num_tokens: fewer than the blocks hold."""
        num_tokens = num_tokens or len(block_ids) * self.block_size
        return self.engine.sender.publish(request, block_ids, num_tokens, b"content")

    def publish_part(self, request: RequestKey, block_ids: list[int]) -> None:
        self.engine.sender.publish_part(request, block_ids, b"content")

    def revoke(self, request: RequestKey) -> None:
        self.engine.sender.revoke(request)

    def bump(self, block: int) -> None:
        self.engine.generations[block] += 1

    def lease(self, seconds: float) -> None:
        """Set the lease of what is published or renewed from now on."""
        self.engine.sender.lease_s = seconds

    def unpinned(self, timeout_s: float = 60.0) -> list[Unpinned]:
        """Wait until something is unpinned, and return it."""
        end = time.monotonic() + timeout_s
        while True:
            events = self.engine.sender.poll()
            if events or time.monotonic() > end:
                return events
            time.sleep(0.0005)

    def wakes(self) -> int:
        return self.engine.wakes

    def close(self) -> None:
        self.engine.close()

    @property
    def faults(self) -> LocalFaults:
        agent = self.engine.sender.agent
        assert isinstance(agent, LocalAgent)
        return agent.faults

    def freeze(self) -> None:
        self.faults.frozen = True

    def thaw(self) -> None:
        self.faults.frozen = False

    def kill(self) -> None:
        self.faults.dead = True


def _child(pipe: Connection, parent: int, arguments: dict[str, Any]) -> None:
    die_with_parent(parent)
    source = LocalSource(**arguments)
    pipe.send(source.meta)
    while True:
        name, values = pipe.recv()
        if name == "exit":
            source.close()
            return
        pipe.send(getattr(source, name)(*values))


@dataclass
class ProcessSource:
    """The same engine in a process of its own, to be frozen and killed."""

    engine_id: str
    config: TransferConfig
    incarnation: int = 1
    seed: int = 0
    block_size: int = LAYOUT.block_size

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = {
            "engine_id": self.engine_id,
            "config": self.config,
            "incarnation": self.incarnation,
            "seed": self.seed,
            "block_size": self.block_size,
        }
        self.process = context.Process(
            target=_child, args=(theirs, os.getpid(), arguments), daemon=True
        )
        self.process.start()
        theirs.close()
        self.meta: KVCacheMeta = self._receive()

    def _receive(self) -> Any:
        assert self._pipe.poll(120.0), "the source process does not answer"
        return self._pipe.recv()

    def _call(self, name: str, *values: Any) -> Any:
        self._pipe.send((name, values))
        return self._receive()

    def publish(
        self, request: RequestKey, block_ids: list[int], num_tokens: int | None = None
    ) -> Ticket:
        return self._call("publish", request, block_ids, num_tokens)

    def publish_part(self, request: RequestKey, block_ids: list[int]) -> None:
        self._call("publish_part", request, block_ids)

    def revoke(self, request: RequestKey) -> None:
        self._call("revoke", request)

    def bump(self, block: int) -> None:
        self._call("bump", block)

    def lease(self, seconds: float) -> None:
        self._call("lease", seconds)

    def unpinned(self, timeout_s: float = 60.0) -> list[Unpinned]:
        return self._call("unpinned", timeout_s)

    def wakes(self) -> int:
        return self._call("wakes")

    def freeze(self) -> None:
        assert self.process.pid is not None
        freeze(self.process.pid)

    def thaw(self) -> None:
        psutil.Process(self.process.pid).resume()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)

    def close(self) -> None:
        if self.process.is_alive():
            self._pipe.send(("exit", ()))
            self.process.join(10)
        if self.process.is_alive():
            self.kill()


Source = LocalSource | ProcessSource
