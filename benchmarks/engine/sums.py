"""Sums over the GPUs of one host, ours against NCCL: microseconds of one call in a CUDA graph, by
size; a rank a process.

    python -m benchmarks.engine.sums --ranks 2 --out benchmarks/results/sums-h200.jsonl

Rows are 4,096 wide, bfloat16. `alone` is the sum; `with norm` also adds the residual stream and
norms it, which with NCCL takes another kernel (not counted here).
"""

import argparse
import multiprocessing
import os
import socket
import statistics
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from pdserve.bench.record import append, git_commit
from pdserve.kernels.collective.faults import Faults
from pdserve.kernels.collective.region import RegionLayout
from pdserve.kernels.collective.triton_ops import PeerCollective
from pdserve.kernels.norm.ops import Norm
from pdserve.parallel.bring_up import RankGroup
from pdserve.parallel.dims import ParallelDims
from pdserve.parallel.peer_memory import PeerMemory

WIDTH = 4096
KIB = 2 * WIDTH // 1024  # of a row
SIZES = [8 << power for power in range(14)]  # KiB: to 64 MiB
CALLS = 20  # in a graph
ROUNDS = 15


def microseconds(call: Callable[[], object]) -> float:
    """Median time of one call, by replays of a graph of many."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(ROUNDS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda.synchronize()
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1000 / CALLS)
    return statistics.median(times)


def measure(collective: PeerCollective, kib: int) -> dict[str, float]:
    """The times of one size, on this rank."""
    device = torch.device("cuda", collective.rank)
    partial = torch.randn(kib // KIB, WIDTH, device=device, dtype=torch.bfloat16)
    stream = torch.zeros_like(partial)
    norm = Norm(torch.ones(WIDTH, device=device, dtype=torch.bfloat16), 1e-5)
    times = {
        "alone": microseconds(lambda: collective.sum(partial)),
        "with norm": microseconds(
            lambda: collective.add_norm(collective.add(stream, partial), norm)
        ),
        "NCCL": microseconds(lambda: dist.all_reduce(partial)),
    }
    collective.check()
    return times


def be_rank(rank: int, ranks: int, port: int, pipe: Connection) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, device_id=device
    )
    dims = ParallelDims(tp=ranks, rank=rank)
    if rank == 0:
        group = RankGroup.host(dims)
        pipe.send(group.address)
    else:
        group = RankGroup.join(dims, pipe.recv(), device_index=rank)
    layout = RegionLayout(
        ranks, WIDTH, torch.bfloat16, max_rows=512, vocab_size=128_256, step_rows=8192
    )
    memory = PeerMemory(group, layout.num_bytes, device)
    collective = PeerCollective(layout, rank, memory.addresses, Faults.on(device), memory)
    for kib in SIZES:
        times = measure(collective, kib)
        if rank == 0:
            pipe.send({"kib": kib, "ranks": ranks, **times})
    group.agree("end")
    os._exit(0)  # groups are left, not taken apart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast stays off
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(given.ranks)]
    processes = [
        context.Process(target=be_rank, args=(rank, given.ranks, port, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    address = pipes[0][0].recv()
    for ours, _ in pipes[1:]:
        ours.send(address)
    print("      KiB     alone with norm      NCCL   (microseconds)")
    for kib in SIZES:
        row = pipes[0][0].recv()
        print(
            f"{kib:9,} {row['alone']:9.2f} {row['with norm']:9.2f} {row['NCCL']:9.2f}", flush=True
        )
        append(given.out, {"commit": git_commit(), **row})
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
