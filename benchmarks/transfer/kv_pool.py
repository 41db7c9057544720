"""The KV pool: store and retrieve through an LMCache server that is started here, beside a plain
copy of as many bytes.

    python -m benchmarks.transfer.kv_pool --out benchmarks/results/kv-pool.jsonl --tokens 256 4096

Two engines have KV caches of the shape of `--layers`, `--kv-heads` and `--head-dim`, with different
block ids in scattered order. A call is timed until its event in `poll`. "call_us" is the time that
the engine loop's thread spends in the call. The rows of every retrieve are checked. The first store
of a server writes memory that was never touched. "again" writes nothing, because the pool has the
chunks.
"""

import argparse
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pdserve.bench.option_values import integer
from pdserve.bench.record import Json, append, check_writable, circumstances
from pdserve.configs.kv_layout import KVLayout
from pdserve.configs.transfer import PoolConfig
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.kvtransfer.build import build_pool
from pdserve.kvtransfer.connector import KVCacheMemory, PoolDone, PoolFailed, PoolStored, unchanged
from pdserve.kvtransfer.pool.lmcache_server import PoolServer

DEADLINE_S = 30.0


class Side:
    """One engine's blocks, and its connection to the KV pool."""

    def __init__(
        self, address: str, config: PoolConfig, layout: KVLayout, num_blocks: int, device: str
    ) -> None:
        self.blocks = torch.zeros(
            num_blocks, *layout.shapes[0], dtype=torch.bfloat16, device=device
        )
        self.generations = np.zeros(num_blocks, np.int64)
        self._event = threading.Event()
        memory = KVCacheMemory(KVCache(self.blocks, layout), None, "benchmark", "rows")
        self.pool = build_pool(address, config, memory, self._event.set)
        while not self.pool.available:
            time.sleep(0.01)

    def timed(self, call: Callable[[], object]) -> tuple[Any, float, float]:
        """Times a call. Returns `(event, ms until it arrived, us in the call)`."""
        self._event.clear()
        start = time.perf_counter()
        call()
        called = time.perf_counter()
        while not (events := self.pool.poll()):
            self._event.wait(DEADLINE_S)
            self._event.clear()
        return events[0], 1e3 * (time.perf_counter() - start), 1e6 * (called - start)


def measure(writer: Side, reader: Side, num_tokens: int, repeats: int, layout: KVLayout) -> Json:
    """Returns medians over `repeats` prompts that were never stored before."""
    seen: dict[str, list[float]] = {}
    num_blocks = num_tokens // layout.block_size
    op_ids = itertools.count(1)

    def note(what: str, kind: type, took: tuple[Any, float, float]) -> Any:
        event, ms, us = took
        if not isinstance(event, kind):
            raise RuntimeError(f"{what}: {event}")
        seen.setdefault(f"{what}_ms", []).append(ms)
        seen.setdefault(f"{what}_call_us", []).append(us)
        return event

    for seed in range(repeats):
        random = np.random.default_rng([num_tokens, seed])
        tokens = random.integers(0, 128_000, num_tokens).tolist()
        here, there = (
            random.permutation(len(writer.blocks))[:num_blocks].tolist() for _ in range(2)
        )
        writer.blocks[here] = torch.randn(num_blocks, *layout.shapes[0], dtype=torch.bfloat16).to(
            writer.blocks
        )
        still = unchanged(writer.generations, here)

        def store(
            ids: list[int] = here, tokens: list[int] = tokens, still: Callable[[], bool] = still
        ) -> None:
            writer.pool.store(next(op_ids), tokens, "", ids, still)

        def retrieve(ids: list[int] = there, tokens: list[int] = tokens) -> None:
            reader.pool.retrieve(next(op_ids), tokens, "", 0, ids, DEADLINE_S)

        note("miss", PoolFailed, reader.timed(retrieve))
        note("store", PoolStored, writer.timed(store))
        note("store_again", PoolStored, writer.timed(store))
        for what in ("retrieve", "retrieve_again"):
            reader.blocks.zero_()
            done = note(what, PoolDone, reader.timed(retrieve))
            if done.num_tokens != num_tokens:
                raise RuntimeError(f"{done}: {num_tokens} were stored")
            if not torch.equal(reader.blocks[there], writer.blocks[here]):
                raise RuntimeError("the retrieved rows are not those that were stored")
    return {name: round(statistics.median(values), 3) for name, values in seen.items()}


def plain_copy_ms(num_bytes: int, device: str) -> float:
    """Times a copy from device to host, or within the host if there is no device."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=source.is_cuda)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=integer(1), nargs="+", default=[256, 4096], metavar="N")
    parser.add_argument("--layers", type=integer(1), default=28)
    parser.add_argument("--kv-heads", type=integer(1), default=8)
    parser.add_argument("--head-dim", type=integer(1), default=128)
    parser.add_argument("--block-size", type=integer(1), default=16)
    parser.add_argument("--chunk-tokens", type=integer(1), default=256)
    parser.add_argument("--repeats", type=integer(1), default=5)
    options = parser.parse_args()
    check_writable(options.out)
    heads = tuple(range(options.kv_heads))
    layout = KVLayout.uniform(
        num_layers=options.layers,
        heads=heads,
        head_dim=options.head_dim,
        block_size=options.block_size,
        dtype="bfloat16",
    )
    total = sum(options.tokens) * options.repeats * layout.token_bytes
    config = PoolConfig(
        mode="start",
        chunk_tokens=options.chunk_tokens,
        l1_gib=1.5 * total / 2**30,
        request_deadline_ms=5000,
        max_store_fraction=1.0,
    )
    num_blocks = max(options.tokens) // options.block_size
    server = PoolServer(config)
    try:
        server.wait_ready()
        writer, reader = (
            Side(server.address, config, layout, num_blocks, options.device) for _ in range(2)
        )
        for num_tokens in options.tokens:
            num_bytes = num_tokens * layout.token_bytes
            row: Json = {
                "tokens": num_tokens,
                "mib": round(num_bytes / 2**20, 1),
                "device": options.device,
            }
            row |= measure(writer, reader, num_tokens, options.repeats, layout)
            row["copy_ms"] = round(plain_copy_ms(num_bytes, options.device), 3)
            for what in ("store", "retrieve", "retrieve_again", "copy"):
                row[f"{what}_gb_s"] = round(num_bytes / row[f"{what}_ms"] / 1e6, 2)
            print(row)
            if options.out is not None:
                append(options.out, circumstances() | row)
        writer.pool.close()
        reader.pool.close()
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
