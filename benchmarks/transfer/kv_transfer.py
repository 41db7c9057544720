"""Bandwidth and latency of transfers between two engines' KV caches, beside a plain copy of as many
bytes.

    python -m benchmarks.transfer.kv_transfer --out benchmarks/results/kv-transfer-h200.jsonl
    python -m benchmarks.transfer.kv_transfer --device cpu --tokens 512 2048 --tls default tcp --ray
    python -m benchmarks.transfer.kv_transfer --device cpu --tokens 2048 --tls tcp --netns p d

The first command needs two GPUs, the others none. The last one runs in two namespaces of `ip
netns`.

A source and a sink process have a KV cache and a connector each, like engines. A transfer is timed
from `pull` to the event that says that its bytes have arrived and its generations were verified.
"aged" KV caches have served 2,000 random requests before, so that a prompt's blocks are scattered.
The bytes of the first transfer of every case are checked. Between blocks of different sizes
(--sink-block-sizes), bytes pass through the sink's staging ring. With --ray the same bytes also go
through Ray's object store: one actor gathers and returns them, and another scatters them.
"""

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.support.markdown import table
from benchmarks.support.places import SHAPES
from benchmarks.transfer.transfer_sides import Case, sink, source
from pdserve.bench.option_values import integer
from pdserve.bench.record import Json, append, check_writable, circumstances
from pdserve.configs.kv_layout import KVLayout
from pdserve.configs.transfer import TransferConfig
from pdserve.models.config import read_spec

AGES = ("fresh", "aged")


def run_case(case: Case) -> Iterator[Json]:
    """Yields the results of one pair of processes. Raises ValueError if one of them fails."""
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
                raise ValueError("the sink process ended without a message") from error
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
    """Times a copy between the two devices, or within host memory."""
    pair = [
        torch.device(device, index) if device == "cuda" else torch.device("cpu") for index in (0, 1)
    ]
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
    """Times Ray's object store: one actor gathers blocks and returns them, and another gets and
    scatters them. Starts a Ray of its own."""
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


def report(rows: list[Json]) -> str:
    """Returns a table as Markdown."""
    head = [
        "tokens",
        "MiB",
        "block size",
        "to",
        "pool",
        "UCX_TLS",
        "transport",
        "descriptors",
        "ms",
        "worst",
        "GB/s",
    ]
    more = [name for name in ("plain copy", "object store") if any(name in row for row in rows)]
    lines = []
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
        cells += [
            f"{row['gb_per_s']:.1f}",
            *(f"{row['bytes'] / row[name] / 1e6:.1f}" for name in more),
        ]
        lines.append(cells)
    return table([*head, *(f"{name}, GB/s" for name in more)], lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default=str(SHAPES / "llama-3.1-8b"), help="folder whose KV shape is used"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--tokens", type=integer(1), nargs="+", default=[1024, 8192])
    parser.add_argument(
        "--block-sizes", type=int, nargs="+", default=[16, 64, 128], choices=[16, 32, 64, 128]
    )
    parser.add_argument(
        "--sink-block-sizes",
        type=int,
        nargs="+",
        choices=[16, 32, 64, 128],
        help="each is combined with each block size of the source (default: the same size)",
    )
    parser.add_argument(
        "--ages",
        nargs="+",
        default=list(AGES),
        choices=AGES,
        help="ages of the KV caches, in this order",
    )
    parser.add_argument(
        "--tls", nargs="+", default=["default"], help="values of UCX_TLS; default leaves it to UCX"
    )
    parser.add_argument(
        "--netns", nargs=2, default=[], metavar=("SOURCE", "SINK"), help="network namespaces (root)"
    )
    parser.add_argument(
        "--pool-tokens",
        type=integer(1),
        help="size of the KV caches in tokens (default: four times the longest of --tokens)",
    )
    parser.add_argument(
        "--progress-delay-us",
        type=integer(0),
        default=TransferConfig().progress_delay_us,
        help="delay of NIXL's progress thread (default %(default)s)",
    )
    parser.add_argument(
        "--repeats", type=integer(1), default=7, help="timed transfers per row (median; default 7)"
    )
    parser.add_argument("--ray", action="store_true", help="also measure Ray's object store")
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    parser.add_argument("--commit", help="revision to note in --out (default: git's)")
    options = parser.parse_args()
    device = (
        ("cuda" if torch.cuda.device_count() > 1 else "cpu")
        if options.device == "auto"
        else options.device
    )
    if device == "cuda" and torch.cuda.device_count() < 2:
        parser.error(
            f"--device cuda needs two GPUs, torch sees {torch.cuda.device_count()}: use cpu"
        )
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
            delay_us = options.progress_delay_us
            netns = tuple(options.netns)
            cases.append(Case(layouts, pool_tokens, *wanted, device, chosen, delay_us, netns))
    rows: list[Json] = []
    with tqdm(
        total=len(cases) * len(options.ages) * len(options.tokens), unit="row", leave=False
    ) as bar:
        for case in cases:
            try:
                measured = []
                for row in run_case(case):
                    measured.append(row)
                    bar.update()
                for row in measured:  # only after both processes have ended
                    row["plain copy"] = plain_copy_ms(row["bytes"], device, options.repeats)
                    if options.ray:
                        layout = case.layouts[0]
                        blocks = layout.num_blocks_for(row["tokens"])
                        row["object store"] = object_store_ms(
                            blocks, layout.block_bytes, options.repeats
                        )
                    append(
                        options.out,
                        {"benchmark": "kv_transfer", **row, **circumstances(options.commit)},
                    )
                    rows.append(row)
            except ValueError as error:
                print(f"kv_transfer: UCX_TLS {case.tls or 'default'}: {error}", file=sys.stderr)
                return 1
    print(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
