"""A pipe between stages with GPUs on several nodes. It uses NCCL, which takes InfiniBand or RoCE
where there is one, and TCP otherwise.

Rows have fixed places in memory, which is taken before the KV cache is sized. Many rows are
received on a stream of their own, so they arrive while the device still computes the step before. A
few are received in turn: NCCL holds them ready, and its kernel would disturb those of a decode
step. Knows no model.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import Tensor

from pdserve.parallel import nodes
from pdserve.parallel.bring_up import LOOK_S, RankFailed, RankGroup
from pdserve.parallel.nccl import NcclPair, unique_id

T = TypeVar("T")

CONNECT_S = 120.0
EARLY_BYTES = 4 << 20  # NCCL's buffer of a connection; more rows are received early


class NodePipe:
    """Implements `parallel.pipe.Pipe` for rows of at most `[step_rows, width]` on `device`.

    Ranks are counted from the last stage (ParallelDims), so rows go to the rank one lower. A sender
    is one step ahead and no more. All ranks must make one at the same time, once. RankFailed if two
    stages find no way to each other.
    """

    def __init__(
        self,
        group: RankGroup,
        width: int,
        dtype: torch.dtype,
        step_rows: int,
        device: torch.device,
    ) -> None:
        def memory(is_used: bool) -> Tensor:
            rows = step_rows if is_used else 0
            return torch.zeros(rows, width, dtype=dtype, device=device)

        dims = group.dims
        self._device = device
        self._arrived, self._leaving = (
            memory(not dims.is_first_stage),
            memory(not dims.is_last_stage),
        )
        self.landing: Tensor | None = memory(not dims.is_first_stage)
        self._receives, self._sends = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._landed, self._left = torch.cuda.Event(), torch.cuda.Event()
        # NCCL takes the same ranks for neighbours as `nodes` does
        os.environ.setdefault("NCCL_HOSTID", nodes.node_name(group))
        own = b"" if dims.is_first_stage else unique_id()
        said = group.agree("stages meet", own.hex())
        self._previous = self._next = None
        if not dims.is_first_stage:
            self._previous = self._meet(group, own, 0, dims.ranks_along("pp")[dims.pp_rank + 1])
        if not dims.is_last_stage:
            next_one = dims.ranks_along("pp")[dims.pp_rank - 1]
            self._next = self._meet(group, bytes.fromhex(said[next_one]), 1, next_one)

    def send(self, rows: Tensor) -> None:
        assert self._next is not None, "rows are sent to the next stage, but there is none"
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(self._left)
        leaving = self._leaving[: len(rows)].copy_(rows)
        self._sends.wait_stream(computing)
        self._next.send(leaving, self._sends)
        self._left.record(self._sends)

    def recv(self, num_rows: int) -> Tensor:
        assert self.landing is not None
        assert self._previous is not None, "rows are received, but there is no previous stage"
        computing = torch.cuda.current_stream(self._device)
        landing, arrived = self.landing[:num_rows], self._arrived[:num_rows]
        if landing.nbytes <= EARLY_BYTES:
            self._previous.recv(landing, computing)
            return landing
        self._receives.wait_event(self._landed)
        self._previous.recv(arrived, self._receives)
        computing.wait_stream(self._receives)
        landing.copy_(arrived)
        self._landed.record(computing)
        return landing

    def flush(self) -> None:
        """Does nothing: the device sends without any help."""

    def call_off(self) -> None:
        for pair in self._pairs:
            pair.call_off()

    def check(self) -> None:
        for pair in self._pairs:
            pair.check()

    @property
    def _pairs(self) -> list[NcclPair]:
        return [pair for pair in (self._previous, self._next) if pair is not None]

    def _meet(self, group: RankGroup, name: bytes, place: int, other: int) -> NcclPair:
        """Connects this rank with another one. NCCL connects two ranks when they first exchange
        something, so they do."""

        def meet() -> NcclPair:
            torch.cuda.set_device(self._device)
            pair = NcclPair(name, place)
            stream = torch.cuda.Stream(self._device)
            if place:
                pair.send(self._leaving, stream)
            else:
                pair.recv(self._arrived, stream)
            stream.synchronize()
            pair.check()
            return pair

        met = _started(meet)
        until = time.monotonic() + CONNECT_S
        while not met.done():
            group.check()
            if time.monotonic() > until:
                raise RankFailed(
                    f"rank {group.dims.rank} was not connected with rank {other}, another stage, "
                    f"within {CONNECT_S:g} s: let their nodes reach each other at all ports, or "
                    "name the network interface in NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO shows what "
                    "is tried"
                )
            time.sleep(LOOK_S)
        return met.result()


def _started(work: Callable[[], T]) -> "Future[T]":
    """Starts work on a thread that does not keep the process alive."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="stages meet", daemon=True).start()
    return done
