"""CUDA graphs of the decode step, one for each of a few batch sizes. A replay costs one launch
instead of hundreds.

A graph reads its inputs from one packed int32 tensor at a fixed address, and leaves hidden and
logits at fixed addresses. Both are valid until the next replay of any graph, because all graphs
share one memory. Knows neither model nor attention: it captures the function it is given. Used by
the model runner.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pdserve.engine.graph_sizes import nearest_size, representative
from pdserve.engine.stepping.packing import Arrays, blank, unpack
from pdserve.kernels.launching.ahead import compile_ahead
from pdserve.protocol.start_progress import Report

DecodeStep = Callable[[Arrays[Tensor]], tuple[Tensor, Tensor]]
"""Computes `(arrays) -> hidden [rows, width], logits [rows, vocab]`. It is queued on the current
stream and does not wait."""


class _Address:
    """Describes where a tensor lies (CUDA array interface), without keeping its memory."""

    def __init__(self, tensor: Tensor) -> None:
        integers = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
        self.__cuda_array_interface__ = integers.__cuda_array_interface__


def not_owning(tensor: Tensor) -> Tensor:
    """The same numbers at the same address, without keeping the memory. The dtype has 2 or 4
    bytes."""
    return torch.as_tensor(_Address(tensor), device=tensor.device).view(tensor.dtype)


@contextmanager
def capturing(device: torch.device) -> Iterator[Any]:
    """Lets graphs be captured inside, and gives the memory that all of them share. Kernels run on
    one stream of their own, because torch gives memory back to the stream alone that took it."""
    gc.collect()  # the graphs of a deleted engine cannot be freed during a capture
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield torch.cuda.graph_pool_handle()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # what the steps before each capture have taken


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    packed: Tensor
    arrays: Arrays[Tensor]
    hidden: Tensor
    logits: Tensor


class DecodeGraphs:
    """CUDA graphs of `step`. Capture them inside `capturing`, which gives the memory, before the
    first request."""

    def __init__(self, step: DecodeStep, device: torch.device, memory: Any) -> None:
        self._step = step
        self._device = device
        self._memory = memory
        self._sizes: list[int] = []
        self._graphs: dict[int, _Graph] = {}

    def capture(self, sizes: Sequence[int], report: Report) -> None:
        """Capture graphs of these sizes, largest first, so that the smaller ones fit into the
        memory of the largest. report: called after each capture.
        """
        ordered = sorted(sizes, reverse=True)
        compile_ahead(self._device, lambda: self._run(representative(sizes)))
        for size in tqdm(
            ordered, desc="capturing CUDA graphs", unit="graph", leave=False, disable=None
        ):
            self._graphs[size] = self._capture_one(size)
            report(len(self._graphs), len(ordered))
        self._sizes = sorted(self._graphs)

    def size_for(self, num_seqs: int) -> int:
        """The smallest captured size for this many sequences; 0 if they are too many."""
        return nearest_size(self._sizes, num_seqs)

    def replay(self, size: int, packed: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Queue a step. Returns hidden and logits `[size, ...]`, and the slots, int32 `[size]`."""
        entry = self._graphs[size]
        entry.packed.copy_(torch.from_numpy(packed).pin_memory(), non_blocking=True)
        entry.graph.replay()
        return entry.hidden, entry.logits, entry.arrays.slots

    def _run(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            self._step(self._blank(size)[1])

    def _blank(self, size: int) -> tuple[Tensor, Arrays[Tensor]]:
        """Inputs without context, whose rows all go to the null block: only the addresses matter.
        Returns them packed, and the arrays in that."""
        lengths = [size, size, size, size, size, 1]
        packed = torch.from_numpy(blank(lengths)).to(self._device)
        return packed, unpack(packed, lengths)

    def _capture_one(self, size: int) -> _Graph:
        packed, arrays = self._blank(size)
        self._step(arrays)  # loads the kernels, which is not allowed in a capture
        graph = torch.cuda.CUDAGraph()
        # Other threads (for example a connector's) may use CUDA meanwhile.
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        hidden, logits = self._step(arrays)
        graph.capture_end()
        # Graphs that are captured later may write to the same memory; their pool keeps it alive.
        return _Graph(graph, packed, arrays, not_owning(hidden), not_owning(logits))
