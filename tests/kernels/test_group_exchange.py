"""Tests what the ranks of several homes exchange over a process group, and what is left of it with
one home. Each rank is a thread."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pdserve.kernels.collective.ops import ALONE, IDENTITY, HomeAlone, finished, slice_of
from pdserve.kernels.collective.reference import GroupExchange
from pdserve.parallel.bring_up import RankGroup
from pdserve.parallel.dims import ParallelDims
from pdserve.parallel.groups import cpu_group

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HOMES = [(2, 1), (3, 1), (2, 2)]


def on_ranks(dp: int, tp: int, work: Callable[[GroupExchange], None]) -> None:
    """Run it on every rank of the second stage of two; raises what one raised."""
    host = RankGroup.host(ParallelDims(tp=tp, dp=dp, pp=2))
    kept = []

    def join(rank: int) -> None:
        group = RankGroup.join(ParallelDims(tp=tp, dp=dp, pp=2, rank=rank), host.address)
        exchange = GroupExchange(cpu_group(group, group.dims.stage_ranks, 30.0), dp)
        assert (exchange.home, exchange.num_homes) == (group.dims.dp_rank, dp)
        assert (exchange.rank, exchange.size) == (rank - tp * dp, tp * dp)
        kept.append(exchange)  # what others still read is lost with it
        work(exchange)

    with ThreadPoolExecutor(dp * tp) as ranks:
        for done in [ranks.submit(join, dp * tp + rank) for rank in range(dp * tp)]:
            done.result()


def counts_of(call: int, dp: int) -> list[int]:
    return [((1, 7, 3), (1, 1, 1), (12, 1, 5), (4, 4, 4))[call][home] for home in range(dp)]


def parts(seed: int, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * 3).to(dtype) for _ in range(count)]


@pytest.mark.parametrize(("dp", "tp"), HOMES)
def test_rows_of_all_homes_come_together(dp: int, tp: int) -> None:
    def work(exchange: GroupExchange) -> None:
        for call in range(4):
            counts = counts_of(call, dp)
            for dtype in (*DTYPES, torch.int32):
                [rows] = parts(call, 1, (sum(counts), 5 + call), dtype)
                own = rows.split(counts)[exchange.home]
                assert torch.equal(exchange.gather_rows(own, counts), rows)

    on_ranks(dp, tp, work)


@pytest.mark.parametrize(("dp", "tp"), HOMES)
def test_sums_of_a_home_are_made_in_the_order_of_the_ranks(dp: int, tp: int) -> None:
    def work(exchange: GroupExchange) -> None:
        for call in range(4):
            counts = counts_of(call, dp)
            for dtype in DTYPES:
                *partials, stream = parts(call, dp * tp + 1, (sum(counts), 6), dtype)
                total = torch.zeros(stream.shape)
                for partial in partials:
                    total = total + partial.float()
                want = (stream + total.to(dtype)).split(counts)[exchange.home]
                own = stream.split(counts)[exchange.home].clone()
                left = exchange.add_rows(own, partials[exchange.rank], counts)
                assert torch.equal(finished(left), want)

    on_ranks(dp, tp, work)


def test_columns_and_numbers_are_those_of_all_ranks_of_the_stage() -> None:
    def work(exchange: GroupExchange) -> None:
        [logits] = parts(1, 1, (5, 250), torch.float32)
        own = logits[:, slice_of(250, exchange.rank, 4)]
        found = exchange.gather_columns(own, 250)
        assert torch.equal(found, own if exchange.rank else logits)
        numbers = torch.arange(9, dtype=torch.int32)
        given = torch.zeros_like(numbers) if exchange.rank else numbers
        assert torch.equal(exchange.broadcast(given), numbers)

    on_ranks(2, 2, work)


def test_one_home_exchanges_nothing() -> None:
    rows = torch.ones(3, 4)
    assert (ALONE.rank, ALONE.size, ALONE.home, ALONE.num_homes) == (0, 1, 0, 1)
    assert ALONE.gather_rows(rows, [3]) is rows
    assert torch.equal(finished(ALONE.add_rows(rows, 2 * rows, [3])), 3 * rows)
    assert ALONE.gather_columns(rows, 4) is rows and ALONE.broadcast(rows) is rows

    class Sums(type(IDENTITY)):  # type: ignore[misc]
        rank, size = 1, 2

        def sum(self, partial: torch.Tensor) -> torch.Tensor:
            raise AssertionError("a sum that is left to the next norm")

        def add(self, stream: torch.Tensor, partial: torch.Tensor) -> torch.Tensor:
            return stream - partial

    several = HomeAlone(Sums())
    assert (several.rank, several.size, several.num_homes) == (1, 2, 1)
    assert torch.equal(finished(several.add_rows(rows, 2 * rows, [3])), -rows)
