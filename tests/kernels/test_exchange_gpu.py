"""Rows that homes exchange on GPUs, against what one process computes of all ranks' parts. Ranks
share one GPU where there is only one."""

import pytest
import torch
from support.gpu_ranks import on_gpus

from pdserve.kernels.collective.ops import Unsummed, finished, slice_of
from pdserve.kernels.collective.peer_exchange import PeerExchange
from pdserve.kernels.collective.region import ExchangeLayout
from pdserve.kernels.norm import reference as norms
from pdserve.kernels.norm.ops import Norm

pytestmark = [pytest.mark.gpu, pytest.mark.processes, pytest.mark.lengthy]

WIDTH, VOCAB = 4096, 32_000
COUNTS = ((1, 1), (1, 64), (300, 7), (1024, 1025), (3000, 1), (5, 5), (257, 2048), (2, 1))
REPLAYS = 50


def layout_of(tp: int, dtype: torch.dtype) -> ExchangeLayout:
    return ExchangeLayout(2, tp, WIDTH, dtype, max_rows=256, vocab_size=VOCAB, step_rows=4096)


def parts(seed: int, count: int, rows: int, like: PeerExchange) -> list[torch.Tensor]:
    """The same on every rank: drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    dtype, device = like._layout.dtype, like._regions.device
    return [
        torch.randn(rows, WIDTH, generator=generator).to(dtype).to(device) for _ in range(count)
    ]


def total_of(partials: list[torch.Tensor]) -> torch.Tensor:
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    return total.to(partials[0].dtype)


def exchange_rows(exchange: PeerExchange, device: torch.device) -> None:
    torch.cuda.set_device(device)
    home = exchange.home
    for call, both in enumerate(COUNTS):
        counts = list(both)
        *partials, stream = parts(call, exchange.size + 1, sum(counts), exchange)
        own = stream.split(counts)[home].clone()
        assert torch.equal(exchange.gather_rows(own, counts), stream), counts
        choice = torch.arange(16 * sum(counts), dtype=torch.int32, device=device).view(-1, 16)
        found = exchange.gather_rows(choice.split(counts)[home], counts)
        assert torch.equal(found, choice), counts
        want = (stream + total_of(partials)).split(counts)[home]
        left = exchange.add_rows(own, partials[exchange.rank], counts)
        assert isinstance(left, Unsummed)
        assert torch.equal(finished(left), want), counts
        norm = Norm(torch.linspace(0.5, 2, WIDTH, dtype=own.dtype, device=device), 1e-5)
        normed, stream_then = left.pending.add_norm(left.stream, norm)
        assert torch.equal(stream_then, want), counts
        close = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}[own.dtype]
        torch.testing.assert_close(normed, norms.rms_norm(want, norm), rtol=close, atol=close)
    torch.cuda.synchronize(device)
    exchange.check()


def replay(exchange: PeerExchange, device: torch.device) -> None:
    """A graph of gathers and sums, replayed: areas and epochs are the device's own."""
    torch.cuda.set_device(device)
    sizes = (1, 8, 300)
    held = {rows: parts(rows, exchange.size + 1, 2 * rows, exchange) for rows in sizes}
    streams = {
        rows: tensors[-1].split(rows)[exchange.home].clone() for rows, tensors in held.items()
    }

    def step() -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        found = {}
        for rows, stream in streams.items():
            counts = [rows, rows]
            gathered = exchange.gather_rows(stream, counts)
            left = exchange.add_rows(stream, held[rows][exchange.rank], counts)
            found[rows] = gathered, finished(left)
        return found

    step()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize(device)
    exchange.check()
    for rows, (*partials, stream) in held.items():
        gathered, added = found[rows]
        assert torch.equal(gathered, stream)
        assert torch.equal(added, (stream + total_of(partials)).split(rows)[exchange.home])


def move(exchange: PeerExchange, device: torch.device) -> None:
    torch.cuda.set_device(device)
    own = slice_of(VOCAB, exchange.rank, exchange.size)
    for call, rows in enumerate((1, 9, 256, 3)):
        generator = torch.Generator().manual_seed(call)
        logits = torch.randn(rows, VOCAB, generator=generator).to(torch.bfloat16).to(device)
        found = exchange.gather_columns(logits[:, own], VOCAB)
        assert torch.equal(found, logits[:, own] if exchange.rank else logits)
        tokens = torch.arange(rows, dtype=torch.int32, device=device) * 7 - 1
        given = torch.zeros_like(tokens) if exchange.rank else tokens.clone()
        assert torch.equal(exchange.broadcast(given), tokens)
    torch.cuda.synchronize(device)
    exchange.check()


@pytest.mark.parametrize(
    ("tp", "dtype"),
    [(1, torch.bfloat16), (1, torch.float32), (1, torch.float16), (2, torch.bfloat16)],
    ids=str,
)
def test_rows_are_gathered_and_added_up(tp: int, dtype: torch.dtype) -> None:
    on_gpus(layout_of(tp, dtype), exchange_rows)


def test_rows_in_a_graph() -> None:
    on_gpus(layout_of(1, torch.bfloat16), replay)


def test_logits_and_tokens() -> None:
    on_gpus(layout_of(2, torch.bfloat16), move)
