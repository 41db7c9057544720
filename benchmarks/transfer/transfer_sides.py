"""The source and the sink of a measured transfer, each with a KV cache and a connector.

This module knows no tables and no command line. kv_transfer.py uses it.
"""

import ctypes
import itertools
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from pdserve.bench.record import Json
from pdserve.configs.kv_layout import KVLayout
from pdserve.configs.transfer import TransferConfig
from pdserve.engine.memory.block_manager import BlockManager
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.kvtransfer.build import build_connector
from pdserve.kvtransfer.connector import KVCacheMemory, PullDone, PullFailed
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.request_key import RequestKey

AGING_REQUESTS = 2000
DEADLINE_S = 60.0
WORD = torch.int64


# constants of Linux
CLONE_NEWNS = 0x00020000
CLONE_NEWNET = 0x40000000
MS_REC = 1 << 14
MS_PRIVATE = 1 << 18


def _call(function: str, *arguments: Any) -> None:
    """Calls a function of the C library. Raises OSError if it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")


@dataclass(frozen=True)
class Case:
    """The measurement of one pair of processes."""

    layouts: tuple[KVLayout, KVLayout]  # of source and sink
    num_tokens: int  # size of each KV cache
    tokens: tuple[int, ...]
    ages: tuple[str, ...]
    repeats: int
    device: str  # "cpu" or "cuda"
    tls: str | None  # UCX_TLS; None leaves it to UCX
    progress_delay_us: int
    netns: tuple[str, ...] = ()  # namespaces that source and sink enter; (): none

    def enter_netns(self, rank: int) -> None:
        """Enters the namespace, with a /sys of its own, where UCX looks for devices. It must be the
        first call in a process. Raises OSError without permission."""
        if self.netns:
            with open(f"/run/netns/{self.netns[rank]}") as namespace:
                _call("setns", namespace.fileno(), CLONE_NEWNET)
            _call("unshare", CLONE_NEWNS)
            _call("mount", b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
            _call("mount", b"sysfs", b"/sys", b"sysfs", ctypes.c_ulong(0), None)


class Side:
    """One engine's memory and connector. `rank` is 0 for the source and 1 for the sink. On CUDA it
    is also the device."""

    def __init__(self, case: Case, rank: int) -> None:
        device = torch.device(case.device, rank) if case.device == "cuda" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.case = case
        self.layout = case.layouts[rank]
        self.num_blocks = self.layout.num_blocks_for(case.num_tokens) + 1
        words = self.layout.block_bytes // WORD.itemsize
        self.words = torch.zeros(self.num_blocks, words, dtype=WORD, device=device)
        self.blocks = BlockManager(self.num_blocks)
        self._woken = threading.Event()
        kv_cache = KVCache(self.words, self.layout)
        memory = KVCacheMemory(kv_cache, self.blocks.generations[None], "benchmark", "rows")
        config = TransferConfig(
            ucx_tls=case.tls,
            progress_delay_us=case.progress_delay_us,
            lease_s=DEADLINE_S,
            pull_deadline_s=DEADLINE_S,
        )
        self.sender, self.receiver = build_connector(
            config, memory, f"side-{rank}", time.time_ns(), self._woken.set
        )

    def wait(self, *kinds: type) -> Any:
        """Waits for the next event of these kinds. Raises ValueError if none arrives."""
        ends = time.monotonic() + DEADLINE_S
        while time.monotonic() < ends:
            for event in self.receiver.poll():
                if isinstance(event, kinds):
                    return event
            self._woken.wait(0.01)
            self._woken.clear()
        raise ValueError(f"no answer from the connector in {DEADLINE_S:g} s")

    def pulled(self) -> PullDone:
        """Waits for the end of a pull. Raises ValueError if it fails or does not end."""
        done = self.wait(PullDone, PullFailed)
        if isinstance(done, PullFailed):
            raise ValueError(f"a pull failed: {done.reason}: {done.detail}")
        assert isinstance(done, PullDone)
        return done

    def age(self, seed: int) -> None:
        """Ages the KV cache: random requests come and go, and some of their blocks stay cached."""
        rng = random.Random(seed)
        blocks = self.blocks
        live: list[list[int]] = []
        longest = max(blocks.num_usable // 8, 1)
        for _ in range(AGING_REQUESTS):
            count = rng.randint(1, longest)
            while blocks.num_free < count:
                blocks.release(live.pop(rng.randrange(len(live))))
            live.append(blocks.allocate(count))
            for block in live[-1][: rng.randint(0, count)]:
                blocks.commit(block, rng.randbytes(16))
        for owned in live:
            blocks.release(owned)

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


def contents(ids: torch.Tensor, words: int) -> torch.Tensor:
    """Returns contents [blocks, words] in which every word of every block differs."""
    return ids[:, None] * (1 << 32) + torch.arange(words, device=ids.device)


def source(case: Case, commands: Connection) -> None:
    """Runs the source: publishes as many tokens as it is told, ages its KV cache, and ends."""
    case.enter_netns(0)
    side = Side(case, 0)
    for start in range(0, side.num_blocks, 64):
        ids = torch.arange(start, min(start + 64, side.num_blocks), device=side.words.device)
        side.words[start : start + 64] = contents(ids, side.words.shape[1])
    if case.device == "cuda":
        torch.cuda.synchronize()
    commands.send(side.sender.meta())
    keys = (RequestKey("benchmark", 0, str(i)) for i in itertools.count())
    owned: list[int] = []
    while (command := commands.recv()) != "end":
        side.blocks.release(owned)
        owned = []
        if command == "age":
            side.age(0)
            commands.send(None)
            continue
        owned = side.blocks.allocate(side.layout.num_blocks_for(command))
        commands.send(side.sender.publish(next(keys), owned, command, b""))
    side.close()


def sink(case: Case, commands: Connection, results: Connection) -> None:
    """Runs the sink: drives the source and sends one result per row. If something fails, it sends a
    text with the reason."""
    try:
        for result in measure(case, commands):
            results.send(result)
        results.send(None)
    except EOFError:
        results.send("the source process ended without a message")
    except (ValueError, OSError, RuntimeError) as error:
        results.send(str(error))


def measure(case: Case, commands: Connection) -> Iterator[Json]:
    case.enter_netns(1)
    side = Side(case, 1)
    side.receiver.connect(commands.recv())
    status: PeerStatus = side.wait(PeerStatus)
    if not status.connected:
        raise ValueError(f"the sink could not connect: {status.detail}")
    pull_ids = itertools.count()
    for age in case.ages:
        if age == "aged":
            commands.send("age")
            commands.recv()
            side.age(1)
        for num_tokens in case.tokens:
            yield {"pool": age, **hand_over(side, commands, num_tokens, pull_ids)}
    commands.send("end")
    side.close()


def hand_over(side: Side, commands: Connection, num_tokens: int, pull_ids: Iterator[int]) -> Json:
    """Measures repeated pulls of prompts of `num_tokens`, each from and to other blocks."""
    seconds: list[float] = []
    descriptors: list[int] = []
    for repeat in range(side.case.repeats + 1):  # the first warms up
        commands.send(num_tokens)
        ticket = commands.recv()
        local = side.blocks.allocate(side.layout.num_blocks_for(num_tokens))
        began = time.perf_counter()
        side.receiver.pull(next(pull_ids), ticket, local, 0, DEADLINE_S)
        done = side.pulled()
        ended = time.perf_counter()
        if repeat == 0:
            _check(side, local, ticket.block_ids, num_tokens)
        else:
            seconds.append(ended - began)
            descriptors.append(done.num_descriptors)
        side.blocks.release(local)
    num_bytes = done.num_bytes
    return {
        "tokens": num_tokens,
        "block_size": side.case.layouts[0].block_size,
        "to_block_size": side.layout.block_size,
        "bytes": num_bytes,
        "transport": done.transport,
        "tls": side.case.tls or "default",
        **({"netns": True} if side.case.netns else {}),
        "descriptors": statistics.median(descriptors),
        "ms": 1e3 * statistics.median(seconds),
        "ms_worst": 1e3 * max(seconds),
        "gb_per_s": num_bytes / statistics.median(seconds) / 1e9,
    }


def _check(side: Side, local: list[int], remote: tuple[int, ...], num_tokens: int) -> None:
    device = side.words.device
    (theirs, ours) = side.case.layouts
    step = 8 * max(theirs.block_size, ours.block_size)
    for first in range(0, num_tokens, step):
        count = min(step, num_tokens - first)
        sent = torch.tensor(
            remote[first // theirs.block_size :][: theirs.num_blocks_for(count)], device=device
        )
        arrived = torch.tensor(
            local[first // ours.block_size :][: ours.num_blocks_for(count)], device=device
        )
        wanted = _rows(contents(sent, theirs.block_bytes // WORD.itemsize), theirs)
        if not torch.equal(_rows(side.words[arrived], ours)[:count], wanted[:count]):
            raise ValueError("the bytes that arrived are not those of the source")


def _rows(blocks: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """Returns [blocks, words] as [tokens, heads * layers * planes, words]."""
    [(heads, layers, planes, block_size, _)] = layout.shapes
    return (
        blocks.view(len(blocks), heads * layers * planes, block_size, -1)
        .transpose(1, 2)
        .flatten(0, 1)
    )
