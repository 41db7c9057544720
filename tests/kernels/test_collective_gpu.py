"""Sums, gathers and tokens of two and four GPUs, against what one process computes of all ranks'
parts."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.gpu_ranks import on_gpus

from pdserve.kernels.collective.ops import Unsummed, finished, slice_of
from pdserve.kernels.collective.region import RegionLayout
from pdserve.kernels.collective.triton_ops import PeerCollective
from pdserve.kernels.norm import reference as norms
from pdserve.kernels.norm.ops import Norm

pytestmark = [pytest.mark.multigpu, pytest.mark.processes, pytest.mark.lengthy]

WIDTH = 4096
INNER = 1024  # of products
ROWS = (1, 2, 31, 32, 33, 64, 257, 512, 1, 2048, 8192, 9000, 7)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=(2, 4), ids=("two_ranks", "four_ranks"))
def size(request: pytest.FixtureRequest) -> int:
    """Returns the number of ranks; each has a GPU."""
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"{request.param} ranks take as many GPUs")
    ranks: int = request.param
    return ranks


def layout_of(size: int, dtype: torch.dtype) -> RegionLayout:
    return RegionLayout(
        size,
        WIDTH,
        dtype,
        max_rows=256,
        vocab_size=32_000,
        step_rows=8192,
        pulled_rows=1024,
        piece_rows=2048,
        least_inputs=0,
    )


def parts(
    seed: int, count: int, shape: tuple[int, ...], like: PeerCollective
) -> list[torch.Tensor]:
    """The same on every rank: drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    dtype = like._layout.dtype
    device = like._regions.device
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for _ in range(count)]


def total_of(partials: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in float32, in the order of ranks."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    return total.to(partials[0].dtype)


def sum_rows(collective: PeerCollective, device: torch.device) -> None:
    torch.cuda.set_device(device)
    for seed, rows in enumerate(ROWS):
        *partials, stream, weight = parts(seed, collective.size + 2, (rows, WIDTH), collective)
        norm = Norm(weight[0].contiguous(), 1e-5)
        own, total = partials[collective.rank], total_of(partials)
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
    sizes = (1, 64, 512, 5000, 8192)
    held = {rows: parts(rows, collective.size, (rows, WIDTH), collective) for rows in sizes}
    owns = {rows: partials[collective.rank].clone() for rows, partials in held.items()}
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
    for rows, partials in held.items():
        assert torch.equal(totals[rows], total_of(partials)), rows


def small_numbers(seed: int, shape: tuple[int, ...], like: PeerCollective) -> torch.Tensor:
    """Draws numbers whose products are exact, in whatever order they are added."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-1, 2, shape, generator=generator)
    return drawn.to(like._layout.dtype).to(like._regions.device)


def multiply(collective: PeerCollective, device: torch.device) -> None:
    """Runs layers of a product and a sum, launched without a pause. Each rank is late in some of
    them. Data of a rank must not be overwritten before it has gone, nor taken before it has come.
    """
    torch.cuda.set_device(device)
    weights = [
        small_numbers(1 + rank, (WIDTH, INNER), collective) for rank in range(collective.size)
    ]
    norm = Norm(torch.ones(WIDTH, dtype=weights[0].dtype, device=device), 1e-5)
    calls = 0

    def product(rows: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls % 7 == 3 * (collective.rank % 2):
            torch.cuda._sleep(1_000_000)  # half a millisecond
        return rows @ weights[collective.rank].T

    for rows in (2048, 2049, 3071, 3072, 4096, 5000, 8192, 9000, 8192, 40, 4500):
        layers = [small_numbers(rows + layer, (rows, INNER), collective) for layer in range(4)]
        wanted = []
        stream = torch.zeros(rows, WIDTH, dtype=norm.weight.dtype, device=device)
        for x in layers:
            stream = stream + total_of([x @ weight.T for weight in weights])
            wanted.append(stream)
        torch.cuda.synchronize(device)
        stream = torch.zeros_like(stream)
        found = []
        before = calls
        for number, x in enumerate(layers):
            left = collective.add_product(stream, x, product)
            assert isinstance(left, Unsummed)
            if number == 2:
                stream = stream + left.pending.sum()
            else:
                normed, stream = left.pending.add_norm(left.stream, norm)
            found.append(stream.clone())
        assert calls - before == len(layers) * len(collective._layout.product_rows(rows)), rows
        for stream, want in zip(found, wanted, strict=True):
            assert torch.equal(stream, want), rows
        torch.testing.assert_close(normed, norms.rms_norm(want, norm), rtol=4e-2, atol=4e-2)
    torch.cuda.synchronize(device)
    collective.check()


def read_in_graphs(collective: PeerCollective, device: torch.device) -> None:
    """Rows that are read where they were made, in steps of one to five sums, as graphs that are
    replayed in any order without a pause. Each rank is late in some of the products."""
    torch.cuda.set_device(device)
    ranks = range(collective.size)
    weights = [small_numbers(1 + rank, (WIDTH, INNER), collective) for rank in ranks]
    late = random.Random(collective.rank)

    def into(rows: torch.Tensor, out: torch.Tensor) -> None:
        if late.random() < 0.2:
            torch.cuda._sleep(200_000)  # a tenth of a millisecond
        torch.mm(rows, weights[collective.rank].T, out=out)

    def product(rows: torch.Tensor) -> torch.Tensor:
        raise AssertionError("these rows are written to where the others read them")

    steps = []
    for number, sizes in enumerate(((256, 1024), (65,), (300, 512, 96, 1000), (128,), (7, 512, 9))):
        xs = [small_numbers(10 * number + i, (n, INNER), collective) for i, n in enumerate(sizes)]
        wanted = [total_of([x @ weight.T for weight in weights]) for x in xs]
        steps.append((xs, wanted))

    def run(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        """A step begins with a sum that is sent, like the one of an embedding."""
        collective.begin()
        collective.sum(torch.zeros(1, WIDTH, dtype=xs[0].dtype, device=device))
        found = []
        for x in xs:
            stream = torch.zeros(len(x), WIDTH, dtype=x.dtype, device=device)
            few = len(x) <= collective._layout.few_rows
            left = collective.add_product(stream, x, few_product if few else product, into)
            found.append(finished(left))
        return found

    def few_product(rows: torch.Tensor) -> torch.Tensor:
        return rows @ weights[collective.rank].T

    graphs = []
    for xs, _ in steps:
        run(xs)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(xs)
        graphs.append((graph, found))
    order = random.Random(5)  # the same on all ranks
    for _ in range(300):
        number = order.randrange(len(steps))
        graph, found = graphs[number]
        graph.replay()
        kept = [each.clone() for each in found]
        if order.random() < 0.1:
            for each, want in zip(kept, steps[number][1], strict=True):
                assert torch.equal(each, want), number
    torch.cuda.synchronize(device)
    collective.check()


def multiply_in_graph(collective: PeerCollective, device: torch.device) -> None:
    """Rows are sent on a second stream there too, which becomes a branch of the graph."""
    torch.cuda.set_device(device)
    weights = [
        small_numbers(1 + rank, (WIDTH, INNER), collective) for rank in range(collective.size)
    ]
    x = small_numbers(3, (8192, INNER), collective)
    stream = torch.zeros(8192, WIDTH, dtype=x.dtype, device=device)
    sizes = []

    def product(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return rows @ weights[collective.rank].T

    finished(collective.add_product(stream, x, product))
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = finished(collective.add_product(stream, x, product))
    finished(collective.add_product(stream, x, product))
    for _ in range(20):
        graph.replay()
    finished(collective.add_product(stream, x, product))
    torch.cuda.synchronize(device)
    collective.check()
    assert sizes == [2048] * 16, "four pieces in each of four calls, one of them captured"
    assert torch.equal(found, total_of([x @ weight.T for weight in weights]))


def move(collective: PeerCollective, device: torch.device) -> None:
    torch.cuda.set_device(device)
    own = slice_of(32_000, collective.rank, collective.size)
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
def test_sums_of_any_number_of_rows(size: int, dtype: torch.dtype) -> None:
    on_gpus(layout_of(size, dtype), sum_rows)


def test_sums_of_many_rows_in_one_piece(size: int) -> None:
    on_gpus(replace(layout_of(size, torch.bfloat16), piece_rows=8192), sum_rows)


def test_sums_in_a_graph(size: int) -> None:
    on_gpus(layout_of(size, torch.bfloat16), replay)


def test_products_beside_their_sums(size: int) -> None:
    on_gpus(layout_of(size, torch.bfloat16), multiply)


def test_products_and_sums_in_a_graph(size: int) -> None:
    on_gpus(layout_of(size, torch.bfloat16), multiply_in_graph)


def test_products_that_others_read(size: int) -> None:
    on_gpus(layout_of(size, torch.bfloat16), read_in_graphs)


def test_logits_and_tokens(size: int) -> None:
    on_gpus(layout_of(size, torch.bfloat16), move)
