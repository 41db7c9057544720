"""Tests what the ranks of several homes exchange in each other's memory. The kernels run in
Triton's interpreter, each rank is a process, and the memory is shared between them."""

import ctypes
import mmap
import os
import traceback
from collections.abc import Callable
from functools import partial

import pytest
import torch

from pdserve.kernels.collective.faults import Faults
from pdserve.kernels.collective.ops import Unsummed, finished, slice_of
from pdserve.kernels.collective.peer_exchange import PeerExchange
from pdserve.kernels.collective.region import ExchangeLayout
from pdserve.kernels.norm import reference as norms
from pdserve.kernels.norm.ops import Norm

pytestmark = [
    pytest.mark.lengthy,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="its ranks share memory of the host, in the interpreter"
    ),
]

HOMES = [(2, 1), (3, 1), (2, 2)]
WIDTH, HELD, PROGRAMS = 48, 6, 3
COUNTS = ((1, 2, 1), (HELD, 1, 3), (1, 1, 1), (2, 2 * HELD + 1, 1), (4, 5, 2), (1, 1, 4), (2, 2, 2))
"""Rows of each home in each call: as many programs or fewer, several rows a program, and more rows
than an inbox holds."""


class Host:
    """Memory that ranks of this machine share, as they would their GPUs'."""

    def __init__(self, dp: int, tp: int, dtype: torch.dtype) -> None:
        self.layout = ExchangeLayout(
            dp,
            tp,
            WIDTH,
            dtype,
            max_rows=40,
            vocab_size=250,
            step_rows=64,
            most_rows=HELD,
            programs=PROGRAMS,
            token_block=16,
            chunk=512,
        )
        self.regions = [mmap.mmap(-1, self.layout.num_bytes) for _ in range(dp * tp)]
        self._addresses = [
            ctypes.addressof(ctypes.c_char.from_buffer(region)) for region in self.regions
        ]

    def exchange(self, rank: int, limit: int = 40_000, fault: int = 0) -> PeerExchange:
        faults = Faults(torch.tensor([fault], dtype=torch.int32), torch.device("cpu"))
        made = PeerExchange(self.layout, rank, torch.tensor(self._addresses), faults, memory=self)
        made.limit = limit
        return made


def started(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def on_ranks(
    dp: int, tp: int, work: Callable[[PeerExchange], None], dtype: torch.dtype = torch.float32
) -> None:
    """Run it on every rank; AssertionError when one fails."""
    host = Host(dp, tp, dtype)

    def run(rank: int) -> None:
        work(host.exchange(rank))

    children = [started(partial(run, rank)) for rank in range(dp * tp)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * (dp * tp)


def assert_equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """To the last bit, but that the interpreter cuts bfloat16 off where a GPU rounds."""
    if found.dtype == torch.bfloat16:
        torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-6, atol=2**-3)
    else:
        assert torch.equal(found, wanted)


def parts(seed: int, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Draws the parts of all ranks. Every rank can draw them all."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * 3).to(dtype) for _ in range(count)]


def total_of(partials: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(partials[0].shape)
    for part in partials:
        total = total + part.float()
    return total.to(partials[0].dtype)


KINDS = (
    (torch.bfloat16, WIDTH),
    (torch.int32, 16),
    (torch.float32, WIDTH),
    (torch.int32, 6),
    (torch.float16, 7),
    (torch.bool, 5),
)
"""Dtype and width of the gathered rows, which change from call to call."""


@pytest.mark.parametrize(("dp", "tp"), HOMES)
def test_rows_of_all_homes_come_together_whatever_comes_between(dp: int, tp: int) -> None:
    def work(exchange: PeerExchange) -> None:
        for call in range(14):
            counts = COUNTS[call % len(COUNTS)][:dp]
            dtype, width = KINDS[call % len(KINDS)]
            [rows] = parts(call, 1, (sum(counts), width), dtype)
            own = rows.split(list(counts))[exchange.home]
            found = exchange.gather_rows(own, counts)
            assert found.dtype == dtype and torch.equal(found, rows), call
        exchange.check()

    on_ranks(dp, tp, work)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("dp", "tp", "dtype"),
    [
        (2, 1, torch.float16),
        (2, 1, torch.bfloat16),
        (3, 1, torch.float32),
        (2, 2, torch.float32),
    ],
    ids=str,
)
def test_sums_of_a_home_are_exact(dp: int, tp: int, dtype: torch.dtype) -> None:
    """In the order of the ranks, also while rows are gathered in between; every other sum is left
    to a norm."""

    def work(exchange: PeerExchange) -> None:
        for call, all_counts in enumerate(COUNTS):
            counts = list(all_counts[:dp])
            *partials, stream = parts(call, dp * tp + 1, (sum(counts), WIDTH), dtype)
            want = (stream + total_of(partials)).split(counts)[exchange.home]
            own = stream.split(counts)[exchange.home].clone()
            left = exchange.add_rows(own, partials[exchange.rank], counts)
            assert isinstance(left, Unsummed)
            if call % 2:
                assert_equal(finished(left), want)
            else:
                norm = Norm(torch.linspace(0.5, 2, WIDTH, dtype=dtype), 1e-5)
                normed, found = left.pending.add_norm(left.stream, norm)
                assert_equal(found, want)
                close = {torch.float32: 1e-6, torch.float16: 2e-2, torch.bfloat16: 0.1}[dtype]
                wanted = norms.rms_norm(want, norm).float()
                torch.testing.assert_close(normed.float(), wanted, rtol=close, atol=close)
            if call % 3 == 0:
                gathered = exchange.gather_rows(stream.split(counts)[exchange.home], counts)
                assert torch.equal(gathered, stream)
        exchange.check()

    on_ranks(dp, tp, work, dtype)


def test_columns_and_numbers_are_those_of_all_ranks_of_the_stage() -> None:
    def work(exchange: PeerExchange) -> None:
        own = slice_of(250, exchange.rank, 4)
        for call, rows in enumerate((1, 40, 17, 3)):
            [logits] = parts(call, 1, (rows, 250), torch.float32)
            found = exchange.gather_columns(logits[:, own], 250)
            assert torch.equal(found, logits[:, own] if exchange.rank else logits)
            tokens = torch.arange(rows, dtype=torch.int32) * 7 - 1
            given = torch.zeros_like(tokens) if exchange.rank else tokens
            assert torch.equal(exchange.broadcast(given), tokens)
            counts = (1 + call, rows)
            rows_of = torch.full((counts[exchange.home], 5), exchange.home)
            gathered = exchange.gather_rows(rows_of, counts)
            assert gathered[:, 0].tolist() == [0] * counts[0] + [1] * counts[1]
        exchange.check()

    on_ranks(2, 2, work)


def gather(exchange: PeerExchange) -> torch.Tensor:
    counts = [2] * exchange.num_homes
    return exchange.gather_rows(torch.ones(2, WIDTH), counts) * exchange.size


def add(exchange: PeerExchange) -> torch.Tensor:
    counts = [2] * exchange.num_homes
    ones = torch.ones(sum(counts), WIDTH)
    return finished(exchange.add_rows(torch.zeros(2, WIDTH), ones, counts))


@pytest.mark.parametrize("work", [gather, add])
def test_a_rank_that_does_not_come_is_noticed_and_nobody_takes_nonsense(
    work: Callable[[PeerExchange], torch.Tensor],
) -> None:
    """The others answer once and are gone."""
    host = Host(3, 1, torch.float32)

    def once(rank: int) -> None:
        assert (work(host.exchange(rank)) == 3).all()

    children = [started(partial(once, rank)) for rank in (1, 2)]
    exchange = host.exchange(0)
    try:
        assert (work(exchange) == 3).all()
        exchange.check()
        exchange.limit = 200
        work(exchange)
        with pytest.raises(RuntimeError, match="did not answer in time"):
            exchange.check()
        before = [bytes(region) for region in host.regions[1:]]
        gather(exchange)
        add(exchange)
        exchange.broadcast(torch.ones(3, dtype=torch.int32))
        assert [bytes(region) for region in host.regions[1:]] == before, (
            "who has missed a rank sends no more"
        )
    finally:
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]


@pytest.mark.parametrize("work", [gather, add])
def test_the_host_ends_a_wait(work: Callable[[PeerExchange], torch.Tensor]) -> None:
    exchange = Host(2, 1, torch.float32).exchange(0, limit=1 << 40)
    exchange.call_off()
    work(exchange)
    with pytest.raises(RuntimeError, match="did not answer"):
        exchange.check()


def test_what_does_not_fit_is_refused() -> None:
    exchange = Host(2, 1, torch.bfloat16).exchange(0)
    with pytest.raises(ValueError, match="rows of 208 bytes do not fit areas of 192"):
        exchange.gather_rows(torch.zeros(1, 52), [1, 1])
    with pytest.raises(ValueError, match=r"3 rows do not go with 2 homes that have \[2, 1\]"):
        exchange.gather_rows(torch.zeros(3, 4), [2, 1])
    with pytest.raises(ValueError, match=r"1 rows do not go with 2 homes that have \[1, 0\]"):
        exchange.gather_rows(torch.zeros(1, 4), [1, 0])
    with pytest.raises(ValueError, match="numbers must be int32, at most 40"):
        exchange.broadcast(torch.zeros(41, dtype=torch.int32))
    too_many = ExchangeLayout(9, 1, 8, torch.float32, max_rows=1, vocab_size=16, step_rows=1)
    with pytest.raises(ValueError, match="9 homes: at most 8"):
        PeerExchange(too_many, 0, torch.zeros(9, dtype=torch.int64), exchange._faults)
