"""Sums over the GPUs of one host, ours against NCCL: microseconds of one call in a CUDA graph, by
size. Each rank is a process.

    python -m benchmarks.engine.sums --ranks 2 --out benchmarks/results/sums-h200.jsonl
    python -m benchmarks.engine.sums --ranks 2 --late     # layers in which a rank comes late
    python -m benchmarks.engine.sums --ranks 2 --products --set piece_rows=1024

Rows are 4,096 wide, in bfloat16. `alone` is the sum. `with norm` also adds the residual stream and
norms it, which with NCCL takes another kernel (not counted here). `pulled` does the same with rows
that a product has written to where other ranks read them. Of more rows than the layout says, it is
what `with norm` is: those are sent.

--late launches layers of a product and a sum one by one, as a prefill does, while the last rank is
late in each of them. It prints microseconds of a layer, which are at least the delay.

--products prints microseconds of a layer with a product of `inner` columns, a sum and a norm. There
are three ways: the `product` alone, with the sum `after` it, and with rows sent `beside` it.
Figures are medians of rounds in which the three take turns.

--set changes numbers of the region's layout (`RegionLayout`) for any of these.
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pdserve.bench.record import append, git_commit
from pdserve.kernels.collective.faults import Faults
from pdserve.kernels.collective.ops import normed
from pdserve.kernels.collective.region import RegionLayout
from pdserve.kernels.collective.triton_ops import PeerCollective
from pdserve.kernels.norm import triton_ops as norms
from pdserve.kernels.norm.ops import Norm
from pdserve.parallel.bring_up import RankGroup
from pdserve.parallel.dims import ParallelDims
from pdserve.parallel.peer_memory import PeerMemory

WIDTH = 4096
KIB = 2 * WIDTH // 1024  # size of a row
SIZES = [8 << power for power in range(14)]  # KiB, up to 64 MiB
CALLS = 20  # calls in a graph
ROUNDS = 15
LAYERS = 32
LATE_ROWS = (64, 128, 1024, 8192)
LATE_US = (0, 10, 50, 200, 1000)
LATE_ROUNDS = 7
PRODUCT_ROWS = (2048, 3072, 4096, 6144, 8192)
INNERS = (2048, 7168)  # columns of o and of down in an 8B model on two ranks
CYCLES_A_US = 1700  # cycles of torch's sleeping kernel per microsecond, roughly
HEAD_START_US = 5000  # head start of the hosts before what is measured
END_S = 1.0


def begin_together(collective: PeerCollective) -> None:
    """Queues what lets this rank's device begin its next work when the others' devices do.

    Its sleep gives the host a head start, and then a first sum waits for the others. Otherwise, a
    host that leaves a barrier late would delay all devices.
    """
    torch.cuda._sleep(HEAD_START_US * CYCLES_A_US)
    device = torch.device("cuda", collective.rank)
    collective.sum(torch.zeros(1, WIDTH, device=device, dtype=torch.bfloat16))


def microseconds(collective: PeerCollective, call: Callable[[], object]) -> float:
    """Returns the median time of one call, by replays of a graph of many calls."""
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
        begin_together(collective)
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1000 / CALLS)
    return statistics.median(times)


def measure(collective: PeerCollective, kib: int) -> dict[str, float]:
    """Measures one size on this rank."""
    device = torch.device("cuda", collective.rank)
    partial = torch.randn(kib // KIB, WIDTH, device=device, dtype=torch.bfloat16)
    stream = torch.zeros_like(partial)
    norm = Norm(torch.ones(WIDTH, device=device, dtype=torch.bfloat16), 1e-5)

    def product(rows: torch.Tensor) -> torch.Tensor:
        return rows

    def into(rows: torch.Tensor, out: torch.Tensor) -> None:
        """Leaves what is there: the time of a product is not measured."""

    times = {
        "alone": microseconds(collective, lambda: collective.sum(partial)),
        "with norm": microseconds(
            collective, lambda: normed(collective.add(stream, partial), norm, norms)
        ),
        "pulled": microseconds(
            collective,
            lambda: normed(collective.add_product(stream, partial, product, into), norm, norms),
        ),
        "NCCL": microseconds(collective, lambda: dist.all_reduce(partial)),
    }
    collective.check()
    return times


def layer_microseconds(collective: PeerCollective, layer: Callable[[], object]) -> float:
    """Returns the time of a layer on this rank's device, from LAYERS that are launched one by
    one."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_together(collective)
    began.record()
    for _ in range(LAYERS):
        layer()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) * 1000 / LAYERS


def late_layers(
    collective: PeerCollective, group: RankGroup, num_rows: int, late_us: int
) -> list[float]:
    """Returns the microseconds of a layer on this rank, by round."""
    device = torch.device("cuda", collective.rank)
    weight = torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) / WIDTH**0.5
    norm = Norm(torch.ones(WIDTH, device=device, dtype=torch.bfloat16), 1e-5)
    cycles = late_us * CYCLES_A_US if collective.rank == collective.size - 1 else 0
    times = []
    for number in range(1 + LATE_ROUNDS):
        x = torch.randn(num_rows, WIDTH, device=device, dtype=torch.bfloat16)
        stream = torch.zeros_like(x)
        torch.cuda.synchronize()
        group.agree(f"{num_rows} rows, {late_us} us late, round {number}")

        rows = [x, stream]

        def layer(rows: list[torch.Tensor] = rows) -> None:
            partial = rows[0] @ weight
            if cycles:
                torch.cuda._sleep(cycles)
            rows[:] = normed(collective.add(rows[1], partial), norm, norms)

        times.append(layer_microseconds(collective, layer))
    collective.check()
    return times[1:]


def measure_late(collective: PeerCollective, group: RankGroup, pipe: Connection) -> None:
    for num_rows in LATE_ROWS:
        for late_us in LATE_US:
            times = late_layers(collective, group, num_rows, late_us)
            if collective.rank == 0:
                words = {"least": min(times), "median": statistics.median(times)}
                words |= {"most": max(times)}
                row = {"rows": num_rows, "late_us": late_us, "ranks": collective.size}
                pipe.send(row | words)


def product_layers(
    collective: PeerCollective, group: RankGroup, num_rows: int, inner: int
) -> dict[str, float]:
    """Returns the microseconds of a layer on this rank, by its kind."""
    device = torch.device("cuda", collective.rank)
    weight = torch.randn(WIDTH, inner, device=device, dtype=torch.bfloat16) / inner**0.5
    x = torch.randn(num_rows, inner, device=device, dtype=torch.bfloat16)
    stream = torch.zeros(num_rows, WIDTH, device=device, dtype=torch.bfloat16)
    norm = Norm(torch.ones(WIDTH, device=device, dtype=torch.bfloat16), 1e-5)

    def product(rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows, weight)

    ways: dict[str, Callable[[], object]] = {
        "product": lambda: product(x),
        "after": lambda: normed(collective.add(stream, product(x)), norm, norms),
        "beside": lambda: normed(collective.add_product(stream, x, product), norm, norms),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(1 + LATE_ROUNDS):
        for way, layer in ways.items():
            stream.zero_()
            torch.cuda.synchronize()
            group.agree(f"{num_rows} rows of {inner}, {way}, round {number}")
            times[way].append(layer_microseconds(collective, layer))
    collective.check()
    return {way: statistics.median(found[1:]) for way, found in times.items()}


def measure_products(collective: PeerCollective, group: RankGroup, pipe: Connection) -> None:
    for inner in INNERS:
        for num_rows in PRODUCT_ROWS:
            times = product_layers(collective, group, num_rows, inner)
            if collective.rank == 0:
                row = {"rows": num_rows, "inner": inner, "ranks": collective.size}
                pipe.send(row | times)


def be_rank(
    rank: int, ranks: int, port: int, kind: str, numbers: dict[str, Any], pipe: Connection
) -> None:
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
    layout = replace(layout, **numbers)
    memory = PeerMemory(group, range(ranks), layout.num_bytes, device)
    collective = PeerCollective(
        layout, rank, memory.addresses, Faults.on(device), memory, memory.own
    )
    if kind == "late":
        measure_late(collective, group, pipe)
    elif kind == "products":
        measure_products(collective, group, pipe)
    else:
        for kib in SIZES:
            times = measure(collective, kib)
            if rank == 0:
                pipe.send({"kib": kib, "ranks": ranks, **times})
    group.agree("end")
    if rank == 0:
        pipe.send(None)
        time.sleep(END_S)  # its store must still tell the others that all ranks are here
    os._exit(0)  # process groups are not destroyed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--late",
        action="store_const",
        const="late",
        dest="kind",
        help="measure layers in which a rank is late",
    )
    kinds.add_argument(
        "--products",
        action="store_const",
        const="products",
        dest="kind",
        help="measure layers of a product and a sum",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="change a number of the region's layout",
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default=git_commit(), help="noted in --out (default: git's)")
    given = parser.parse_args()
    kind = given.kind or "sizes"
    numbers = {name: int(number) for name, number in (said.split("=") for said in given.set)}
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast stays off
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(given.ranks)]
    processes = [
        context.Process(
            target=be_rank, args=(rank, given.ranks, port, kind, numbers, theirs), daemon=True
        )
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    address = pipes[0][0].recv()
    for ours, _ in pipes[1:]:
        ours.send(address)
    names = {
        "sizes": ["kib", "alone", "with norm", "pulled", "NCCL"],
        "late": ["rows", "late_us", "least", "median", "most"],
        "products": ["rows", "inner", "product", "after", "beside"],
    }[kind]
    print(" ".join(f"{name:>9}" for name in names), "  (microseconds)")
    while (row := pipes[0][0].recv()) is not None:
        print(" ".join(f"{row[name]:>9,.5g}" for name in names), flush=True)
        append(given.out, {"commit": given.commit, **row, **numbers})
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
