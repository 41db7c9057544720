"""Sums, gathers and tokens of two GPUs, against what one process computes of all ranks' parts."""

import pytest
import torch
from support.gpu_ranks import on_gpus

from pdserve.kernels.collective.ops import Unsummed, slice_of
from pdserve.kernels.collective.region import RegionLayout
from pdserve.kernels.collective.triton_ops import PeerCollective
from pdserve.kernels.norm import reference as norms
from pdserve.kernels.norm.ops import Norm

pytestmark = [pytest.mark.multigpu, pytest.mark.processes, pytest.mark.lengthy]

WIDTH = 4096
ROWS = (1, 2, 31, 32, 33, 64, 257, 512, 1, 2048, 8192, 9000, 7)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layout_of(dtype: torch.dtype) -> RegionLayout:
    return RegionLayout(2, WIDTH, dtype, max_rows=256, vocab_size=32_000, step_rows=8192)


def parts(
    seed: int, count: int, shape: tuple[int, ...], like: PeerCollective
) -> list[torch.Tensor]:
    """The same on every rank: drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    dtype = like._layout.dtype
    device = like._regions.device
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for _ in range(count)]


def sum_rows(collective: PeerCollective, device: torch.device) -> None:
    torch.cuda.set_device(device)
    for seed, rows in enumerate(ROWS):
        first, second, stream, weight = parts(seed, 4, (rows, WIDTH), collective)
        norm = Norm(weight[0].contiguous(), 1e-5)
        own = (first, second)[collective.rank]
        total = (first.float() + second.float()).to(own.dtype)
        assert torch.equal(collective.sum(own), total), rows
        want = stream + total
        left = collective.add(stream, own)
        assert isinstance(left, Unsummed)
        normed, finished = left.pending.add_norm(left.stream, norm)
        assert torch.equal(finished, want), rows
        close = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}[own.dtype]
        torch.testing.assert_close(normed, norms.rms_norm(want, norm), rtol=close, atol=close)
    torch.cuda.synchronize(device)
    collective.check()


def replay(collective: PeerCollective, device: torch.device) -> None:
    """A graph of several sums, replayed: inboxes and epochs are the device's own."""
    torch.cuda.set_device(device)
    held = {rows: parts(rows, 2, (rows, WIDTH), collective) for rows in (1, 64, 512)}
    owns = {rows: pair[collective.rank].clone() for rows, pair in held.items()}
    for own in owns.values():
        collective.sum(own)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        totals = {rows: collective.sum(own) for rows, own in owns.items()}
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize(device)
    collective.check()
    for rows, (first, second) in held.items():
        assert torch.equal(totals[rows], (first.float() + second.float()).to(first.dtype))


def move(collective: PeerCollective, device: torch.device) -> None:
    torch.cuda.set_device(device)
    own = slice_of(32_000, collective.rank, 2)
    for seed, rows in enumerate((1, 9, 256, 3, 3, 3)):
        [logits] = parts(seed, 1, (rows, 32_000), collective)
        found = collective.gather_columns(logits[:, own], 32_000)
        assert torch.equal(found, logits[:, own] if collective.rank else logits)
        collective.sum(torch.zeros(1, WIDTH, dtype=logits.dtype, device=device))
        tokens = torch.arange(rows, dtype=torch.int32, device=device) * 7 - 1
        given = tokens.clone() if collective.rank == 0 else torch.zeros_like(tokens)
        assert torch.equal(collective.broadcast(given), tokens)
    torch.cuda.synchronize(device)
    collective.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_any_number_of_rows(dtype: torch.dtype) -> None:
    on_gpus(layout_of(dtype), sum_rows)


def test_sums_in_a_graph() -> None:
    on_gpus(layout_of(torch.bfloat16), replay)


def test_logits_and_tokens() -> None:
    on_gpus(layout_of(torch.bfloat16), move)
