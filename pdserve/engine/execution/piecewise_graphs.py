"""CUDA graphs of steps with prompts: of all that lies between their attention calls, for a few
numbers of rows.

How attention is launched depends on a step's sequences and chunks. All else depends on its number
of rows alone. So a step replays a graph, attends, replays the next graph, and so on. That spares
the host most launches, which take longer than the device needs for such rows. Graphs read rows and
leave results at fixed addresses; all of them share one memory. Knows neither model nor attention:
it captures the function it is given, which calls back between two graphs. Used by the model runner.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pdserve.engine.execution.cuda_graphs import not_owning
from pdserve.engine.graph_sizes import fast_sizes, nearest_size, representative
from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.launching.ahead import compile_ahead
from pdserve.kernels.launching.repeat import Given, number_of
from pdserve.protocol.start_progress import Report

TIMED = 3  # replays of a graph whose time is measured


@dataclass(frozen=True)
class AttentionCall:
    """The attention of a layer between two graphs: rotated rows and where the result goes.

    q, out: `[rows, Hq, D]`; k, v: `[rows, Hk, D]`; kv: the layer of the KV cache; v_scales, sinks:
    as `AttentionOps` takes them.
    """

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    kv: Tensor
    v_scales: Tensor | None
    sinks: Tensor | None
    out: Tensor

    @cached_property
    def given(self) -> Given:
        """The tensors, for launches that are repeated."""
        return Given(self.q, self.k, self.v, self.kv, self.v_scales, self.sinks, self.out)

    @cached_property
    def kind(self) -> int:
        """A number that calls have in common if one step launches the same for them."""
        return number_of((self.spec, self.given.likeness))


Cut = Callable[[AttentionCall], None]
"""Is called where a step attends. It ends a graph and begins the next one."""

PieceStep = Callable[[Tensor, Cut], Tensor]
"""Computes `(rows, cut) -> hidden [size, width]`. rows: int32 `[3, size]`: ids, positions and slots
(packing.Arrays)."""


@dataclass(frozen=True)
class _Pieces:
    rows: Tensor
    graphs: list[torch.cuda.CUDAGraph]
    calls: list[AttentionCall]
    hidden: Tensor


class PiecewiseGraphs:
    """CUDA graphs of `step`. Capture them inside `capturing`, which gives the memory, before the
    first request."""

    def __init__(self, step: PieceStep, device: torch.device, memory: Any) -> None:
        self._step = step
        self._device = device
        self._memory = memory
        self._pieces: dict[int, _Pieces] = {}
        self._sizes: list[int] = []

    def capture(self, sizes: Sequence[int], report: Report) -> None:
        """Capture graphs of these sizes, largest first, so that the smaller ones fit into the
        memory of the largest. report: called after each size."""
        ordered = sorted(sizes, reverse=True)
        compile_ahead(self._device, lambda: self._run(representative(sizes)))
        for size in tqdm(
            ordered, desc="capturing graphs of prompts", unit="size", leave=False, disable=None
        ):
            self._pieces[size] = self._capture_one(size)
            report(len(self._pieces), len(ordered))
        self._sizes = sorted(self._pieces)
        if self._device.type == "cuda":
            # Rank 0 chooses sizes. The others keep all graphs, and replay them here too, because
            # graphs of several ranks wait for each other.
            self._sizes = fast_sizes({size: self._seconds(size) for size in ordered})

    def size_for(self, num_rows: int) -> int:
        """The captured size for a step of so many rows; 0 if it runs without graphs."""
        return nearest_size(self._sizes, num_rows)

    def has(self, num_rows: int) -> bool:
        """True if steps of exactly this many rows were captured."""
        return num_rows in self._pieces

    def replay(self, rows: Tensor, attend: Cut) -> Tensor:
        """Queue a step. rows: int32 `[3, size]`, of a captured size. attend: queues an attention
        call. Returns hidden `[size, width]`, valid until the next replay of any graph."""
        pieces = self._pieces[rows.shape[1]]
        pieces.rows.copy_(rows)
        *before, last = pieces.graphs
        for graph, call in zip(before, pieces.calls, strict=True):
            graph.replay()
            attend(call)
        last.replay()
        return pieces.hidden

    def _seconds(self, size: int) -> float:
        """Returns the least time of a few replays, without attention."""
        times = []
        for _ in range(TIMED):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            for graph in self._pieces[size].graphs:
                graph.replay()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) / 1e3)
        return min(times)

    def _run(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            self._step(self._blank(size), _zeros)

    def _blank(self, size: int) -> Tensor:
        """Rows that all go to the null block: only the addresses matter."""
        return torch.zeros(3, size, dtype=torch.int32, device=self._device)

    def _capture_one(self, size: int) -> _Pieces:
        rows = self._blank(size)
        self._step(rows, _zeros)  # loads the kernels, which is not allowed in a capture
        graphs: list[torch.cuda.CUDAGraph] = []
        calls: list[AttentionCall] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._memory, capture_error_mode="thread_local")

        def cut(call: AttentionCall) -> None:
            graphs[-1].capture_end()
            # Later graphs may write to the same memory; their pool keeps it alive.
            q, k, v, out = map(not_owning, (call.q, call.k, call.v, call.out))
            calls.append(replace(call, q=q, k=k, v=v, out=out))
            _ = calls[-1].kind  # found out now, not while the first step waits
            begin()

        begin()
        hidden = self._step(rows, cut)
        graphs[-1].capture_end()
        return _Pieces(rows, graphs, calls, not_owning(hidden))


def _zeros(call: AttentionCall) -> None:
    call.out.zero_()
