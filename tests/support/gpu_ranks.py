"""Runs work on ranks that have a GPU each, or share GPUs where there are fewer: processes of their
own, joined as an engine's are."""

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from pdserve.kernels.collective.faults import Faults
from pdserve.kernels.collective.peer_exchange import PeerExchange
from pdserve.kernels.collective.region import ExchangeLayout, RegionLayout
from pdserve.kernels.collective.triton_ops import PeerCollective
from pdserve.parallel.bring_up import RankGroup
from pdserve.parallel.dims import ParallelDims
from pdserve.parallel.peer_memory import PeerMemory

Layout = RegionLayout | ExchangeLayout
Work = Callable[[Any, torch.device], None]
"""Gets the PeerCollective of a RegionLayout, or the PeerExchange of an ExchangeLayout."""
WAIT_S = 300.0


def on_gpus(layout: Layout, work: Work) -> None:
    """Runs `work` on each rank. It must be a function of a module, because processes get it by
    name.

    Raises AssertionError with what failed on a rank.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(layout.size)]
    processes = [
        context.Process(target=_run, args=(rank, layout, work, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        address = pipes[0][0].recv()
        for ours, _ in pipes[1:]:
            ours.send(address)
        for rank, (ours, _) in enumerate(pipes):
            assert ours.poll(WAIT_S), f"rank {rank} does not end"
            said = ours.recv()
            assert said == "", f"rank {rank}:\n{said}"
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(rank: int, layout: Layout, work: Work, pipe: Connection) -> None:
    dims = ParallelDims(tp=layout.size, rank=rank)
    if rank == 0:
        group = RankGroup.host(dims)
        pipe.send(group.address)
    else:
        group = RankGroup.join(dims, pipe.recv(), device_index=rank)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    try:
        memory = PeerMemory(group, range(layout.size), layout.num_bytes, device)
        faults = Faults.on(device)
        if isinstance(layout, ExchangeLayout):
            work(PeerExchange(layout, rank, memory.addresses, faults, memory), device)
        else:
            addresses = memory.addresses
            work(PeerCollective(layout, rank, addresses, faults, memory, memory.own), device)
        torch.cuda.synchronize(device)
        group.agree("work")
        pipe.send("")
    except BaseException:
        pipe.send(traceback.format_exc())
    signal.pause()  # others may still write to its memory, or ask rank 0's store
