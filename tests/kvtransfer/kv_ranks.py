"""Engines of several ranks for the kvtransfer tests: a small KV cache and a connector a rank, here
or in a child process."""

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from kvtransfer.kv_peers import key
from support.local_transfer import transfer_config
from support.pair import linked
from support.shares import Degrees, dims_of, num_ranks, share_of

from pdserve.configs.kv_layout import KVLayout, LayerGroup
from pdserve.configs.transfer import TransferConfig
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.kvtransfer.build import build_connector, build_rank
from pdserve.kvtransfer.connector import KVCacheMemory, Unpinned, Wake
from pdserve.kvtransfer.p2p.rank_receiver import RankReceiver
from pdserve.kvtransfer.p2p.remote_rank import RemoteRank, serve_rank
from pdserve.kvtransfer.remote import Service
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import KVCacheMeta, RankMemory, Ticket

Make = Callable[[Wake], tuple[RankMemory, RankReceiver]]
HEADS, LAYERS = 4, 3  # of two stages, one has one layer
BLOCK_SIZE = 16
NUM_TOKENS = 24 * 16
CONFIG = {name: transfer_config(name, lease_s=600.0) for name in ("local", "nixl")}
CONFIG["linked"] = CONFIG["local"]


def content(block_size: int = BLOCK_SIZE, home: int = 0, num_heads: int = HEADS) -> torch.Tensor:
    """All heads of a KV cache of P's: [blocks, heads, layers, 2, block size, head dim]. Those of
    other homes differ."""
    generator = torch.Generator().manual_seed(3 + home)
    shape = NUM_TOKENS // block_size, num_heads, LAYERS, 2, block_size, 8
    return torch.rand(*shape, generator=generator)


class Ranks:
    """An engine whose ranks all live in this process.

    - filled: its KV caches hold `content`.
    - linked: rank 0 reaches the others as if they lived elsewhere.
    - num_heads: of the model; 1 for latents, which every rank of a home stores.
    - kv_caches: by rank.
    """

    def __init__(
        self,
        engine_id: str,
        config: TransferConfig,
        degrees: Degrees,
        filled: bool,
        block_size: int = BLOCK_SIZE,
        linked: bool = False,
        num_heads: int = HEADS,
    ) -> None:
        self.rank_receivers: list[RankReceiver] = []
        self._services: list[Service[RankReceiver]] = []
        self.kv_caches: list[torch.Tensor] = []
        self.block_size = block_size
        num_blocks = NUM_TOKENS // block_size
        # homes have the same block numbers and generations: nothing but the home tells them apart
        table = np.arange(100, 100 + num_blocks, dtype=np.int64)
        self.generations = np.stack([table] * degrees.dp)
        self.degrees = degrees
        self.num_heads = num_heads
        others: list[RankMemory] = []
        receivers: list[RankReceiver | RemoteRank] = []
        for rank in range(num_ranks(degrees)):
            home = dims_of(rank, degrees).home
            heads, layers = share_of(rank, degrees, num_heads, LAYERS)
            group = LayerGroup(
                layers=tuple(range(LAYERS)[layers]),
                heads=tuple(range(num_heads)[heads]),
                row_width=8,
            )
            layout = KVLayout(groups=(group,), block_size=block_size)
            whole = content(block_size, home, num_heads)
            kv_cache = (whole if filled else whole * 0)[:, heads, layers].contiguous()
            self.kv_caches.append(kv_cache)
            if rank == 0:
                memory = KVCacheMemory(KVCache(kv_cache, layout), self.generations, "model", "rows")
                self.sender, self.receiver = build_connector(
                    config, memory, engine_id, 1, lambda: None
                )
                self.rank_receivers += self.receiver.local_ranks
            else:
                memory = KVCacheMemory(KVCache(kv_cache, layout), None, "model", "rows", home)
                make = partial(build_rank, config, memory, engine_id, 1, rank)
                told, receiver, remote = self._linked(make, home) if linked else _here(make)
                others.append(told)
                receivers.append(remote)
                self.rank_receivers.append(receiver)
        self.sender.add_ranks(others)
        self.receiver.add_ranks(receivers)
        self._events: list[Any] = []

    def _linked(self, make: Make, home: int) -> tuple[RankMemory, RankReceiver, RemoteRank]:
        near, far = linked()
        service = serve_rank(far, make)
        self._services.append(service)
        remote = RemoteRank(near, lambda: None, home)
        return remote.memory(5.0), service.served, remote

    def meta(self) -> KVCacheMeta:
        return self.sender.meta()

    def publish(self, name: str, block_ids: list[int], home: int = 0) -> Ticket:
        num_tokens = len(block_ids) * self.block_size
        return self.sender.publish(key(name), block_ids, num_tokens, b"content", home=home)

    def publish_part(self, name: str, block_ids: list[int], home: int = 0) -> None:
        self.sender.publish_part(key(name), block_ids, b"content", home=home)

    def bump(self, block: int, home: int = 0) -> None:
        self.generations[home, block] += 1

    def unpinned(self) -> list[Unpinned]:
        return self.sender.poll()

    def wait(self, *kinds: type, timeout_s: float = 60.0) -> Any:
        ends = time.monotonic() + timeout_s
        while time.monotonic() < ends:
            self._events += self.receiver.poll()
            while self._events:
                event = self._events.pop(0)
                if isinstance(event, kinds):
                    return event
                assert isinstance(event, PeerStatus), f"{event} was not expected"
            time.sleep(0.001)
        raise AssertionError(f"none of {kinds} within {timeout_s} s")

    def close(self) -> None:
        self.receiver.close()
        for service in self._services:
            service.close()
        self.sender.close()


def _here(make: Make) -> tuple[RankMemory, RankReceiver, RankReceiver]:
    memory, receiver = make(lambda: None)
    return memory, receiver, receiver


def _child(pipe: Connection, parent: int, degrees: Degrees, block_size: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the tests
    if os.getppid() != parent:
        return
    ranks = Ranks("p", CONFIG["nixl"], degrees, filled=True, block_size=block_size)
    while True:
        name, values = pipe.recv()
        pipe.send(getattr(ranks, name)(*values))
        if name == "close":
            return


class Elsewhere:
    """The same in a process of its own."""

    def __init__(self, degrees: Degrees, block_size: int = BLOCK_SIZE) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_child, args=(theirs, os.getpid(), degrees, block_size), daemon=True
        )
        self._process.start()

    def __getattr__(self, name: str) -> Any:
        def call(*values: Any) -> Any:
            self._pipe.send((name, values))
            assert self._pipe.poll(120), "the source process does not answer"
            return self._pipe.recv()

        return call
