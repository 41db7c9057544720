"""CUDA graphs on paper: a capture notes the operations of torch, and a replay does them again with
the same tensors. So what a graph would read at a fixed address is read there, and nothing else."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pdserve.engine.execution import piecewise_graphs


class _Notes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class PaperGraph:
    """Stands in for torch.cuda.CUDAGraph. replays: how often any of them was replayed."""

    replays = 0

    def __init__(self) -> None:
        self._notes = _Notes()

    def capture_begin(self, pool: object = None, capture_error_mode: str = "") -> None:
        self._notes.__enter__()

    def capture_end(self) -> None:
        self._notes.__exit__(None, None, None)

    def replay(self) -> None:
        PaperGraph.replays += 1
        for func, args, kwargs, out in self._notes.calls:
            again = func(*args, **kwargs)
            if isinstance(out, Tensor):
                _put(again, out)
            elif isinstance(out, (tuple, list)):
                for new, old in zip(again, out, strict=True):
                    _put(new, old)


def _put(new: Any, old: Any) -> None:
    """A result goes where it went when it was captured; a view is there already."""
    if isinstance(old, Tensor) and new.data_ptr() != old.data_ptr():
        old.copy_(new)


class _PaperStream:
    def __init__(self, device: object = None) -> None: ...

    def wait_stream(self, other: object) -> None: ...


@pytest.fixture
def paper_graphs(monkeypatch: pytest.MonkeyPatch) -> type[PaperGraph]:
    """CPU engines may capture."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PaperGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", _PaperStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", _PaperStream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(piecewise_graphs, "not_owning", lambda tensor: tensor)
    monkeypatch.setattr(PaperGraph, "replays", 0)
    return PaperGraph
