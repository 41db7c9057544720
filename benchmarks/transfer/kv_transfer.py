"""Bandwidth and latency of KV hand-overs between two engines' pools, beside a plain copy of as many bytes.

    python -m benchmarks.transfer.kv_transfer --out benchmarks/results/kv-transfer-h200.jsonl  # two GPUs
    python -m benchmarks.transfer.kv_transfer --device cpu --tokens 512 2048 --tls default tcp --ray  # here
    python -m benchmarks.transfer.kv_transfer --device cpu --tokens 2048 --tls tcp --netns p d  # two `ip netns`

A source and a sink process, each with a pool and a connector, as engines have them. A hand-over is timed from `pull` to
the event that says its bytes are there and its generations were verified. "aged" pools have served 2,000 random
requests before, so that a prompt's blocks are scattered. The bytes of the first hand-over of every case are checked.
Between blocks of different sizes (--sink-block-sizes) they pass through the sink's staging ring.
With --ray the same bytes also go through Ray's object store: gathered, returned by one actor, scattered by another.
"""

import argparse
import ctypes
import itertools
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.support.places import SHAPES
from pdserve.bench.option_values import integer
from pdserve.bench.record import Json, append, check_writable, circumstances
from pdserve.configs.kv_layout import KVLayout
from pdserve.configs.transfer import TransferConfig
from pdserve.engine.memory.block_manager import BlockManager
from pdserve.kvtransfer.build import build_connector
from pdserve.kvtransfer.connector import KVCacheMemory, PullDone, PullFailed
from pdserve.models.config import read_spec
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.request_key import RequestKey

AGES = ("fresh", "aged")
AGING_REQUESTS = 2000
DEADLINE_S = 60.0
WORD = torch.int64


CLONE_NEWNS, CLONE_NEWNET, MS_REC, MS_PRIVATE = 0x00020000, 0x40000000, 1 << 14, 1 << 18  # Linux


def _call(function: str, *arguments: Any) -> None:
    """A function of the C library. OSError when it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")


@dataclass(frozen=True)
class Case:
    """What one pair of processes measures. layouts: of source and sink; num_tokens: that each pool has room for. tls:
    UCX_TLS, None leaves it to UCX. device: "cpu" or "cuda". netns: network namespaces that source and sink enter;
    empty: neither does."""

    layouts: tuple[KVLayout, KVLayout]
    num_tokens: int
    tokens: tuple[int, ...]
    ages: tuple[str, ...]
    repeats: int
    device: str
    tls: str | None
    progress_delay_us: int
    netns: tuple[str, ...] = ()

    def enter_netns(self, rank: int) -> None:
        """Call first in a process. With a /sys of its own, where UCX looks for devices. OSError without permission."""
        if self.netns:
            with open(f"/run/netns/{self.netns[rank]}") as namespace:
                _call("setns", namespace.fileno(), CLONE_NEWNET)
            _call("unshare", CLONE_NEWNS)
            _call("mount", b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
            _call("mount", b"sysfs", b"/sys", b"sysfs", ctypes.c_ulong(0), None)


class Side:
    """One engine's memory and connector. rank: 0 for the source, 1 for the sink; on CUDA also the device."""

    def __init__(self, case: Case, rank: int) -> None:
        device = torch.device(case.device, rank) if case.device == "cuda" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.case, self.layout = case, case.layouts[rank]
        self.num_blocks = self.layout.num_blocks_for(case.num_tokens) + 1
        words = self.layout.block_bytes // WORD.itemsize
        self.words = torch.zeros(self.num_blocks, words, dtype=WORD, device=device)
        self.blocks = BlockManager(self.num_blocks)
        self._woken = threading.Event()
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[
            self.layout.group.dtype
        ]
        pool = self.words.view(dtype).view(self.num_blocks, *self.layout.block_shape)
        memory = KVCacheMemory(pool, self.blocks.generations, self.layout, "benchmark")
        config = TransferConfig(
            ucx_tls=case.tls, progress_delay_us=case.progress_delay_us, lease_s=DEADLINE_S, pull_deadline_s=DEADLINE_S
        )
        self.sender, self.receiver = build_connector(config, memory, f"side-{rank}", time.time_ns(), self._woken.set)

    def wait(self, *kinds: type) -> Any:
        """The next event of these kinds. ValueError when none comes."""
        ends = time.monotonic() + DEADLINE_S
        while time.monotonic() < ends:
            for event in self.receiver.poll():
                if isinstance(event, kinds):
                    return event
            self._woken.wait(0.01)
            self._woken.clear()
        raise ValueError(f"no answer from the connector in {DEADLINE_S:g} s")

    def pulled(self) -> PullDone:
        """The end of a pull. ValueError when it failed, or does not end."""
        done = self.wait(PullDone, PullFailed)
        if isinstance(done, PullFailed):
            raise ValueError(f"a pull failed: {done.reason}: {done.detail}")
        assert isinstance(done, PullDone)
        return done

    def age(self, seed: int) -> None:
        """Random requests come and go, some of their blocks stay known."""
        rng, blocks = random.Random(seed), self.blocks
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
    """Every word of every block differs: [blocks, words]."""
    return ids[:, None] * (1 << 32) + torch.arange(words, device=ids.device)


def source(case: Case, commands: Connection) -> None:
    """Publishes as many tokens as it is told, ages, ends."""
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
    """Drives the source and sends one result a line; a text says what went wrong."""
    try:
        for result in measure(case, commands):
            results.send(result)
        results.send(None)
    except EOFError:
        results.send("the source process ended with no word")
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
    """Repeated pulls of prompts of num_tokens, each into and out of other blocks."""
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
    device, (theirs, ours) = side.words.device, side.case.layouts
    step = 8 * max(theirs.block_size, ours.block_size)
    for first in range(0, num_tokens, step):
        count = min(step, num_tokens - first)
        sent = torch.tensor(remote[first // theirs.block_size :][: theirs.num_blocks_for(count)], device=device)
        arrived = torch.tensor(local[first // ours.block_size :][: ours.num_blocks_for(count)], device=device)
        wanted = _rows(contents(sent, theirs.block_bytes // WORD.itemsize), theirs)
        if not torch.equal(_rows(side.words[arrived], ours)[:count], wanted[:count]):
            raise ValueError("the bytes that arrived are not those of the source")


def _rows(blocks: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """[blocks, words] as [tokens, heads * layers * planes, words]."""
    heads, layers, planes, block_size, _ = layout.block_shape
    return blocks.view(len(blocks), heads * layers * planes, block_size, -1).transpose(1, 2).flatten(0, 1)


def run_case(case: Case) -> Iterator[Json]:
    """Results of one pair of processes. ValueError when one of them fails."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    context = multiprocessing.get_context("spawn")
    to_source, at_source = context.Pipe()
    at_sink, results = context.Pipe()
    processes = [
        context.Process(target=source, args=(case, at_source), daemon=True),
        context.Process(target=sink, args=(case, to_source, results), daemon=True),
    ]
    for process in processes:
        process.start()
    for end in (to_source, at_source, results):
        end.close()
    try:
        while True:
            try:
                result = at_sink.recv()
            except EOFError as error:
                raise ValueError("the sink process ended with no word") from error
            if isinstance(result, str):
                raise ValueError(result)
            if result is None:
                return
            yield result
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def plain_copy_ms(num_bytes: int, device: str, repeats: int) -> float:
    """Between the two devices, or within host memory."""
    pair = [torch.device(device, index) if device == "cuda" else torch.device("cpu") for index in (0, 1)]
    here, there = (torch.ones(num_bytes, dtype=torch.uint8, device=place) for place in pair)
    times = []
    for _ in range(repeats + 1):
        _synchronize(device)
        began = time.perf_counter()
        there.copy_(here)
        _synchronize(device)
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times[1:])


def _synchronize(device: str) -> None:
    if device == "cuda":
        for index in (0, 1):
            torch.cuda.synchronize(index)


def object_store_ms(num_blocks: int, block_bytes: int, repeats: int) -> float:
    """One actor gathers blocks and returns them, another gets and scatters them. Starts a Ray of its own."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Ray reads it when it is imported
    import ray

    class Holder:
        def __init__(self) -> None:
            self._pool = np.ones((2 * num_blocks, block_bytes), dtype=np.uint8)

        def gather(self) -> np.ndarray:
            return self._pool[::2].copy()

        def scatter(self, blocks: np.ndarray) -> None:
            self._pool[::2] = blocks

    store = max(8 * num_blocks * block_bytes, 100 << 20)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=store)
    try:
        actor = ray.remote(num_cpus=1)(Holder)
        holders: list[Any] = [actor.remote(), actor.remote()]
        times = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            ray.get(holders[1].scatter.remote(holders[0].gather.remote()))
            times.append(time.perf_counter() - began)
        return 1e3 * statistics.median(times[1:])
    finally:
        ray.shutdown()


def table(rows: list[Json]) -> str:
    """Markdown."""
    head = ["tokens", "MiB", "block size", "to", "pool", "UCX_TLS", "transport", "descriptors", "ms", "worst", "GB/s"]
    more = [name for name in ("plain copy", "object store") if any(name in row for row in rows)]
    lines = [
        "| " + " | ".join([*head, *(f"{name}, GB/s" for name in more)]) + " |",
        "|" + "---|" * (len(head) + len(more)),
    ]
    for row in rows:
        cells = [
            f"{row['tokens']:,}",
            f"{row['bytes'] / 2**20:,.1f}",
            str(row["block_size"]),
            str(row["to_block_size"]),
        ]
        cells += [
            row["pool"],
            row["tls"],
            row["transport"],
            f"{row['descriptors']:,.0f}",
            f"{row['ms']:.2f}",
            f"{row['ms_worst']:.2f}",
        ]
        cells += [f"{row['gb_per_s']:.1f}", *(f"{row['bytes'] / row[name] / 1e6:.1f}" for name in more)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SHAPES / "llama-3.1-8b"), help="folder whose KV shape is taken")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--tokens", type=integer(1), nargs="+", default=[1024, 8192])
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 64, 128], choices=[16, 32, 64, 128])
    parser.add_argument(
        "--sink-block-sizes", type=int, nargs="+", choices=[16, 32, 64, 128], help="each with each (default: the same)"
    )
    parser.add_argument("--ages", nargs="+", default=list(AGES), choices=AGES, help="of the pools, in this order")
    parser.add_argument("--tls", nargs="+", default=["default"], help="values of UCX_TLS; default leaves it to UCX")
    parser.add_argument("--netns", nargs=2, default=[], metavar=("SOURCE", "SINK"), help="network namespaces (root)")
    parser.add_argument("--pool-tokens", type=integer(1), help="default: four times the longest of --tokens")
    parser.add_argument("--progress-delay-us", type=integer(0), default=1000, help="of NIXL's progress thread")
    parser.add_argument("--repeats", type=integer(1), default=7, help="timed hand-overs a row (median; default 7)")
    parser.add_argument("--ray", action="store_true", help="also through Ray's object store")
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    parser.add_argument("--commit", help="revision noted in --out (default: git's)")
    options = parser.parse_args()
    device = ("cuda" if torch.cuda.device_count() > 1 else "cpu") if options.device == "auto" else options.device
    if device == "cuda" and torch.cuda.device_count() < 2:
        parser.error(f"--device cuda needs two GPUs, torch sees {torch.cuda.device_count()}: use cpu")
    pool_tokens = options.pool_tokens or 4 * max(options.tokens)
    if pool_tokens < max(options.tokens):
        parser.error(f"--pool-tokens ({pool_tokens}) must hold the longest of --tokens")
    try:
        check_writable(options.out)
        spec = read_spec(options.model, "dummy")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    cases = []
    for tls, block_size in itertools.product(options.tls, options.block_sizes):
        layout = KVLayout.uniform(
            num_layers=spec.num_layers,
            heads=tuple(range(spec.num_kv_heads)),
            head_dim=spec.head_dim,
            block_size=block_size,
            dtype=options.dtype,
        )
        wanted = tuple(options.tokens), tuple(options.ages), options.repeats
        chosen = None if tls == "default" else tls
        for size in options.sink_block_sizes or [block_size]:
            layouts = layout, KVLayout(groups=layout.groups, block_size=size)
            delay_us, netns = options.progress_delay_us, tuple(options.netns)
            cases.append(Case(layouts, pool_tokens, *wanted, device, chosen, delay_us, netns))
    rows: list[Json] = []
    with tqdm(total=len(cases) * len(options.ages) * len(options.tokens), unit="row", leave=False) as bar:
        for case in cases:
            try:
                measured = []
                for row in run_case(case):
                    measured.append(row)
                    bar.update()
                for row in measured:  # now that both processes are gone
                    row["plain copy"] = plain_copy_ms(row["bytes"], device, options.repeats)
                    if options.ray:
                        layout = case.layouts[0]
                        blocks = layout.num_blocks_for(row["tokens"])
                        row["object store"] = object_store_ms(blocks, layout.block_bytes, options.repeats)
                    append(options.out, {"benchmark": "kv_transfer", **row, **circumstances(options.commit)})
                    rows.append(row)
            except ValueError as error:
                print(f"kv_transfer: UCX_TLS {case.tls or 'default'}: {error}", file=sys.stderr)
                return 1
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
