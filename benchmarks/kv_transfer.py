"""Latency and bandwidth of KV pulls between two processes of this host, through the connector as the engine uses it.

    python benchmarks/kv_transfer.py --block-kib 64 2048 --total-mib 1 64 [--ucx-tls tcp] [--ray] [--output FILE]
    python benchmarks/kv_transfer.py --source-device cuda:0 --device cuda:1

A pull is timed from the call to its PullDone, so it holds the data read, the generation check and the hand-over between
threads. `contiguous` blocks merge into one descriptor, `scattered` ones do not. Beside it stands a plain torch copy of
the same blocks inside one process (the ceiling without a process boundary) and, with --ray, the same blocks gathered,
put into Ray's object store by one actor, fetched and scattered by another. Medians; every result is checked bit for
bit.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from pdserve.configs.kv_layout import KVLayout
from pdserve.configs.schema import TransferConfig
from pdserve.engine.protocol import PeerStatus, RequestKey, Ticket
from pdserve.kvtransfer.build import build_connector
from pdserve.kvtransfer.connector import KVReceiver, KVSender, PoolMemory, PullDone, ReceiverEvent

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Row:
    """One line of the table. gb_per_s: 1e9 bytes a second, of the median."""

    path: str
    pattern: str
    block_kib: int
    num_blocks: int
    descriptors: int
    median_ms: float
    worst_ms: float
    gb_per_s: float


def layout_of(block_kib: int) -> KVLayout:
    """A layout with blocks of this size: 2 planes x 16 tokens x 64 float16 is 4 KiB a layer of one head."""
    return KVLayout.uniform(num_layers=block_kib // 4, heads=(0,), head_dim=64, block_size=16, dtype="float16")


def make_pool(num_blocks: int, block_kib: int, device: str, seed: int | None) -> torch.Tensor:
    pool = torch.zeros(num_blocks, *layout_of(block_kib).block_shape, dtype=torch.float16, device=device)
    if seed is not None:
        generator = torch.Generator(device).manual_seed(seed)
        pool.view(-1).view(torch.int16).random_(0, 1 << 14, generator=generator)
    return pool


def connector(
    pool: torch.Tensor, block_kib: int, engine_id: str, config: TransferConfig
) -> tuple[KVSender, KVReceiver]:
    generations = np.zeros(pool.shape[0], np.int64)
    memory = PoolMemory(pool, generations, layout_of(block_kib), "benchmark")
    return build_connector(config, memory, engine_id, time.time_ns(), lambda: None)


def serve(pipe: Connection, num_blocks: int, block_kib: int, device: str, config: TransferConfig) -> None:
    """The source process: answers lists of block ids with tickets until it is told None."""
    sender, receiver = connector(make_pool(num_blocks, block_kib, device, seed=0), block_kib, "source", config)
    pipe.send(sender.meta())
    count = 0
    while (block_ids := pipe.recv()) is not None:
        count += 1
        key = RequestKey(router_id="benchmark", session=1, request_id=str(count))
        pipe.send(sender.publish(key, block_ids, 16 * len(block_ids), b""))
        sender.poll()
    receiver.close()
    sender.close()


def patterns(num_blocks: int, count: int) -> Iterator[tuple[str, list[int]]]:
    """Blocks to read, out of a pool at least twice as large."""
    yield "contiguous", list(range(count))
    if count > 1:
        yield "scattered", [2 * i for i in range(count)]


def timed(repeats: int, once: Callable[[], None]) -> list[float]:
    once()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return times


def row(path: str, pattern: str, block_kib: int, count: int, descriptors: int, times: list[float]) -> Row:
    median = statistics.median(times)
    rate = count * block_kib * 1024 / median / 1e9
    return Row(path, pattern, block_kib, count, descriptors, median * 1e3, max(times) * 1e3, rate)


def wait_for(receiver: KVReceiver, kind: type) -> ReceiverEvent:
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        for event in receiver.poll():
            if isinstance(event, kind):
                return event
            if not isinstance(event, PeerStatus):
                raise RuntimeError(f"expected {kind.__name__}, got {event}")
        time.sleep(50e-6)
    raise TimeoutError(f"no {kind.__name__} within {TIMEOUT_S:g} s")


def measure_pulls(arguments: argparse.Namespace, block_kib: int, counts: list[int]) -> Iterator[Row]:
    config = TransferConfig(connector="nixl", ucx_tls=arguments.ucx_tls, progress_delay_us=arguments.progress_delay_us)
    num_blocks = 2 * max(counts)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child_arguments = (theirs, num_blocks, block_kib, arguments.source_device, config)
    child = context.Process(target=serve, args=child_arguments, daemon=True)
    child.start()
    pool = make_pool(num_blocks, block_kib, arguments.device, seed=None)
    expected = make_pool(num_blocks, block_kib, arguments.source_device, seed=0).to(arguments.device)
    sender, receiver = connector(pool, block_kib, "sink", config)
    try:
        receiver.connect(pipe.recv())
        status = wait_for(receiver, PeerStatus)
        assert isinstance(status, PeerStatus) and status.connected, status
        pull_id = 0
        for count in counts:
            for pattern, blocks in patterns(num_blocks, count):
                times, done = [], None
                for _ in range(arguments.repeats + 1):
                    pipe.send(blocks)
                    ticket: Ticket = pipe.recv()
                    pull_id += 1
                    start = time.perf_counter()
                    receiver.pull(pull_id, ticket, blocks, 0, TIMEOUT_S)
                    done = wait_for(receiver, PullDone)
                    times.append(time.perf_counter() - start)
                assert isinstance(done, PullDone) and torch.equal(pool[blocks], expected[blocks])
                pool.zero_()
                yield row(f"nixl/{done.transport}", pattern, block_kib, count, done.num_descriptors, times[1:])
    finally:
        pipe.send(None)
        receiver.close()
        sender.close()
        child.join(10)


def measure_copies(arguments: argparse.Namespace, block_kib: int, counts: list[int]) -> Iterator[Row]:
    source = make_pool(2 * max(counts), block_kib, arguments.source_device, seed=0)
    target = make_pool(2 * max(counts), block_kib, arguments.device, seed=None)
    for count in counts:
        for pattern, blocks in patterns(len(source), count):

            def copy(blocks: list[int] = blocks, pattern: str = pattern) -> None:
                if pattern == "contiguous":
                    target[: len(blocks)].copy_(source[: len(blocks)])
                else:
                    for block in blocks:
                        target[block].copy_(source[block])
                if target.is_cuda:
                    torch.cuda.synchronize(target.device)

            times = timed(arguments.repeats, copy)
            assert torch.equal(target[blocks].cpu(), source[blocks].cpu())
            num_copies = 1 if pattern == "contiguous" else count
            yield row("torch copy", pattern, block_kib, count, num_copies, times)


def measure_ray(arguments: argparse.Namespace, block_kib: int, counts: list[int]) -> Iterator[Row]:
    """Host memory only. The reply of the sink actor is in the time, as PullDone is in a pull's."""
    import ray

    class Source:
        def __init__(self, num_blocks: int) -> None:
            self.pool = make_pool(num_blocks, block_kib, "cpu", seed=0)

        def gather(self, blocks: list[int]) -> np.ndarray:
            return self.pool[blocks].numpy()

    class Sink:
        def __init__(self, num_blocks: int) -> None:
            self.pool = make_pool(num_blocks, block_kib, "cpu", seed=None)
            self.expected = make_pool(num_blocks, block_kib, "cpu", seed=0)

        def scatter(self, data: np.ndarray, blocks: list[int]) -> None:
            self.pool[blocks] = torch.from_numpy(data.copy())

        def check(self, blocks: list[int]) -> bool:
            return torch.equal(self.pool[blocks], self.expected[blocks])

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        num_blocks = 2 * max(counts)
        remote: Any = ray.remote
        source, sink = remote(Source).remote(num_blocks), remote(Sink).remote(num_blocks)
        for count in counts:
            for pattern, blocks in patterns(num_blocks, count):

                def move(blocks: list[int] = blocks) -> None:
                    ray.get(sink.scatter.remote(source.gather.remote(blocks), blocks), timeout=TIMEOUT_S)

                times = timed(arguments.repeats, move)
                assert ray.get(sink.check.remote(blocks))
                yield row("ray object", pattern, block_kib, count, 1, times)
    finally:
        ray.shutdown()


def counts_for(block_kib: int, total_mib: list[float]) -> list[int]:
    return sorted({max(1, round(total * 1024 / block_kib)) for total in total_mib})


def describe_machine(arguments: argparse.Namespace) -> dict[str, object]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "benchmark": "kv_transfer",
        "commit": commit.stdout.strip(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "arguments": vars(arguments),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--block-kib", type=int, nargs="+", default=[64, 512, 2048], help="multiples of 4")
    parser.add_argument("--total-mib", type=float, nargs="+", default=[0.0625, 1, 16, 64])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ucx-tls", help="UCX_TLS; left to UCX without")
    parser.add_argument("--progress-delay-us", type=int, default=1000)
    parser.add_argument("--source-device", default="cpu")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ray", action="store_true", help="also measure Ray's object store (starts a local Ray)")
    parser.add_argument("--output", help="append JSON lines to this file")
    arguments = parser.parse_args()
    if any(size < 4 or size % 4 for size in arguments.block_kib):
        parser.error("--block-kib takes multiples of 4")
    return arguments


def main() -> None:
    arguments = parse()
    machine = describe_machine(arguments)
    print(
        f"{'path':12} {'pattern':11} {'block':>9} {'blocks':>7} {'descr.':>7} {'median':>10} {'worst':>10} {'GB/s':>7}"
    )
    measures = [measure_pulls, measure_copies] + ([measure_ray] if arguments.ray else [])
    for block_kib in arguments.block_kib:
        for measure in measures:
            for r in measure(arguments, block_kib, counts_for(block_kib, arguments.total_mib)):
                print(
                    f"{r.path:12} {r.pattern:11} {r.block_kib:5} KiB {r.num_blocks:7} {r.descriptors:7} "
                    f"{r.median_ms:7.2f} ms {r.worst_ms:7.2f} ms {r.gb_per_s:7.2f}",
                    flush=True,
                )
                if arguments.output:
                    with open(arguments.output, "a") as file:
                        file.write(json.dumps({**machine, **asdict(r)}) + "\n")


if __name__ == "__main__":
    main()
