"""NCCL between two ranks, with a library on paper: what it returns becomes an error, and what was
called off says so. tests/engine/test_stages_gpu.py has the real one."""

import ctypes
import threading
from typing import Any

import pytest
import torch

from pdserve.parallel import nccl
from pdserve.parallel.nccl import NcclPair

SYSTEM_ERROR = 2


class PaperNccl:
    """Notes the calls. `results`: what a call returns, if not 0. lost: what it says has happened
    meanwhile."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.results: dict[str, int] = {}
        self.lost = 0
        self.aborted = threading.Event()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            return self.results.get(name, 0)

        return call

    def ncclCommInitRankConfig(
        self, comm: Any, size: int, name: Any, place: int, config: Any
    ) -> int:
        ctypes.cast(comm, ctypes.POINTER(ctypes.c_void_p))[0] = 77
        self.calls.append(("init", size, bytes(name)[:4], place, config._obj.max_blocks))
        return self.results.get("init", 0)

    def ncclCommGetAsyncError(self, comm: Any, error: Any) -> int:
        error._obj.value = self.lost
        return 0

    def ncclCommAbort(self, comm: Any) -> int:
        self.aborted.set()
        return 0

    def ncclGetErrorString(self, error: int) -> bytes:
        return b"unhandled system error"

    def ncclGetLastError(self, comm: Any) -> bytes:
        return b"connection refused"


class PaperStream:
    cuda_stream = 5


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> PaperNccl:
    paper = PaperNccl()
    monkeypatch.setattr(nccl, "library", lambda: paper)
    return paper


def pair_of(place: int) -> NcclPair:
    return NcclPair(b"name" + bytes(nccl.UNIQUE_ID_BYTES - 4), place)


def test_rows_go_to_the_other_rank_as_bytes(paper: PaperNccl) -> None:
    stream: Any = PaperStream()
    rows = torch.ones(3, 4, dtype=torch.bfloat16)
    pair_of(1).send(rows, stream)
    receiving = pair_of(0)
    receiving.recv(rows, stream)
    receiving.check()
    (init, send), (other_init, recv) = paper.calls[:2], paper.calls[2:4]
    assert init == ("init", 2, b"name", 1, nccl.MAX_BLOCKS) and other_init[3] == 0
    assert send[:5] == ("ncclSend", rows.data_ptr(), 24, nccl.BYTES, 0)
    assert recv[:5] == ("ncclRecv", rows.data_ptr(), 24, nccl.BYTES, 1)
    assert send[-1] == recv[-1] == 5


def test_what_fails_says_why(paper: PaperNccl) -> None:
    paper.results["init"] = SYSTEM_ERROR
    with pytest.raises(RuntimeError, match=r"ncclCommInitRank failed: .*connection refused"):
        pair_of(0)
    paper.results.clear()
    pair = pair_of(0)
    paper.lost = nccl.IN_PROGRESS
    pair.check()
    paper.lost = SYSTEM_ERROR
    with pytest.raises(RuntimeError, match="a transfer of rows between stages failed"):
        pair.check()


def test_rows_of_a_pair_that_was_called_off_are_not_valid(paper: PaperNccl) -> None:
    pair, stream = pair_of(0), PaperStream()
    pair.check()
    pair.call_off()
    pair.call_off()
    assert paper.aborted.wait(5.0)
    for late in (pair.check, lambda: pair.recv(torch.ones(1, 1), stream)):  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="called off"):
            late()


def test_a_torch_without_nccl_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(nccl.ctypes, "CDLL", missing)
    nccl.library.cache_clear()
    with pytest.raises(ValueError, match="install a build of torch for CUDA, or put all stages on"):
        nccl.library()
    nccl.library.cache_clear()
