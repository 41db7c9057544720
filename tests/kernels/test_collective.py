"""Tests what ranks compute together in each other's memory. The kernels run in Triton's
interpreter, each rank is a process, and the memory is shared between them."""

import ctypes
import mmap
import os
import random
import time
import traceback
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pdserve.kernels.collective.faults import Faults
from pdserve.kernels.collective.ops import Unsummed, finished, slice_of
from pdserve.kernels.collective.region import RegionLayout
from pdserve.kernels.collective.triton_ops import PeerCollective
from pdserve.kernels.norm import reference as norms
from pdserve.kernels.norm.ops import Norm

pytestmark = [
    pytest.mark.lengthy,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="its ranks share memory of the host, in the interpreter"
    ),
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Work = Callable[[PeerCollective], None]
FEW, PIECE, PULLED, MOST = 4, 5, 9, 14


class Host:
    """Memory that ranks of this machine share, as they would a GPU's."""

    def __init__(self, layout: RegionLayout) -> None:
        self.layout = layout
        self.regions = [mmap.mmap(-1, layout.num_bytes) for _ in range(layout.size)]
        self._addresses = [
            ctypes.addressof(ctypes.c_char.from_buffer(region)) for region in self.regions
        ]

    def collective(self, rank: int, limit: int = 20_000, fault: int = 0) -> PeerCollective:
        faults = Faults(torch.tensor([fault], dtype=torch.int32), torch.device("cpu"))
        addresses = torch.tensor(self._addresses)
        own = torch.frombuffer(self.regions[rank], dtype=torch.uint8)
        made = PeerCollective(self.layout, rank, addresses, faults, memory=self, own=own)
        made.limit = limit
        return made


def on_ranks(layout: RegionLayout, work: Work) -> None:
    """Run it on every rank; AssertionError when one fails."""
    host = Host(layout)
    children: list[int] = []
    for rank in range(layout.size):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            work(host.collective(rank))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    assert statuses == [0] * layout.size


def layout_for(
    size: int, dtype: torch.dtype, width: int = 48, vocab_size: int = 250
) -> RegionLayout:
    """Small in all its numbers, so that few rows fill it."""
    return RegionLayout(
        size,
        width,
        dtype,
        max_rows=40,
        vocab_size=vocab_size,
        step_rows=64,
        few_rows=FEW,
        pulled_rows=PULLED,
        most_rows=MOST,
        piece_rows=PIECE,
        least_inputs=0,
        programs=3,
        send_programs=1,
        send_tile=2,
        token_block=16,
        chunk=512,
    )


def assert_equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """To the last bit, but that the interpreter cuts bfloat16 off where a GPU rounds."""
    if found.dtype == torch.bfloat16:
        torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-6, atol=2**-3)
    else:
        assert torch.equal(found, wanted)


def parts(seed: int, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Draws the parts of all ranks. Every rank can draw them all."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * 3).to(dtype) for _ in range(size)]


def total_of(partials: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(partials[0].shape)
    for partial in partials:
        total = total + partial.float()
    return total.to(partials[0].dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_exact_whatever_comes_between(size: int, dtype: torch.dtype) -> None:
    """Calls of several sizes one after another, which use the same inboxes again and again: few
    rows, many, and more than fit at once."""

    def work(collective: PeerCollective) -> None:
        for seed, rows in enumerate((1, 7, 2, FEW, 33, MOST, FEW + 1, 3)):
            partials = parts(seed, size, (rows, 48), dtype)
            total = collective.sum(partials[collective.rank])
            assert_equal(total, total_of(partials))
        collective.check()

    on_ranks(layout_for(size, dtype), work)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plus_one", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("size", "dtype"),
    [*((2, dtype) for dtype in DTYPES), (3, torch.float32), (3, torch.bfloat16)],
    ids=str,
)
def test_a_sum_is_added_and_normed_in_one(size: int, dtype: torch.dtype, plus_one: bool) -> None:
    def work(collective: PeerCollective) -> None:
        for seed, rows in enumerate((1, 5, FEW, MOST + 3, 2)):
            *partials, stream = parts(seed, size + 1, (rows, 48), dtype)
            weight = parts(99, 1, (48,), dtype)[0]
            norm = Norm(weight, 1e-5, plus_one)
            want = stream + total_of(partials)
            left = collective.add(stream, partials[collective.rank])
            assert isinstance(left, Unsummed)
            normed, finished = left.pending.add_norm(left.stream, norm)
            assert_equal(finished, want)
            tolerance = {torch.float32: 1e-6, torch.float16: 2e-2, torch.bfloat16: 0.1}[dtype]
            torch.testing.assert_close(
                normed.float(), norms.rms_norm(want, norm).float(), rtol=tolerance, atol=tolerance
            )
        collective.check()

    on_ranks(layout_for(size, dtype), work)


def tripled(rows: torch.Tensor) -> torch.Tensor:
    """A product whose bits do not depend on how many rows it is of."""
    return rows * 3


def tripled_into(rows: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(tripled(rows))


def test_rows_are_read_up_to_a_number_of_bytes() -> None:
    wide = RegionLayout(2, 4096, torch.bfloat16, max_rows=1, vocab_size=2, step_rows=8192)
    assert wide.most_pulled == 1024 and replace(wide, size=4).most_pulled == 256
    assert replace(wide, step_rows=100).most_pulled == 100
    assert replace(wide, pulled_rows=512).most_pulled == 512
    assert replace(wide, step_rows=64).most_pulled == 0
    assert replace(wide, pulled_rows=1).most_pulled == 0
    assert replace(wide, size=4, width=32_768).most_pulled == 0


def test_a_layout_may_have_no_rows_to_be_read() -> None:
    layout = replace(layout_for(2, torch.float32), pulled_rows=1)
    collective = Host(layout).collective(0, limit=10)
    made = []

    def product(rows: torch.Tensor) -> torch.Tensor:
        made.append(len(rows))
        return tripled(rows)

    x = torch.ones(FEW + 1, 48)
    collective.add_product(torch.zeros_like(x), x, product, tripled_into)
    assert made == [FEW + 1]


def test_calls_are_cut_at_fixed_places() -> None:
    layout = layout_for(2, torch.float32)  # pieces of 5, 5 and 4 rows
    for rows, cuts in {
        6: [slice(0, 6)],
        7: [slice(0, 7)],
        8: [slice(0, 5), slice(5, 8)],
        12: [slice(0, 5), slice(5, 12)],
        13: [slice(0, 5), slice(5, 10), slice(10, 13)],
        31: [slice(0, 5), slice(5, 10), slice(10, 31)],
    }.items():
        assert layout.product_rows(rows) == cuts, rows
    found = [[(p.number, p.rows, p.slot) for p in pieces] for pieces in layout.rounds(21)]
    first = [(0, slice(0, 5), 0), (1, slice(5, 10), 5), (2, slice(10, 14), 10)]
    assert found == [first, [(0, slice(14, 19), 0), (1, slice(19, 21), 5)]]
    of_three = layout_for(3, torch.float32)  # a slot has three rows, and so has a piece
    assert [p.rows.stop for p in of_three.rounds(14)[0]] == [3, 6, 9, 12, 14]
    assert of_three.product_rows(5) == [slice(0, 3), slice(3, 5)]
    large = RegionLayout(2, 4096, torch.bfloat16, max_rows=1, vocab_size=2, step_rows=8192)
    assert [p.slot for p in large.rounds(8192)[0]] == [0, 2048, 4096, 6144]
    assert len(large.product_rows(3071)) == 1 and len(large.product_rows(3072)) == 2


@pytest.mark.parametrize(
    ("width", "step_rows", "slots"),
    [
        (2048, 8192, [0]),
        (2048, 16384, [0]),
        (2880, 8192, [0, 2048, 4096, 6144]),
        (8192, 8192, [0, 2048, 4096, 6144]),
        (8192, 2048, [0]),
        (64, 512, [0]),
    ],
)
def test_pieces_have_about_the_same_bytes(width: int, step_rows: int, slots: list[int]) -> None:
    layout = RegionLayout(2, width, torch.bfloat16, 1, 2, step_rows)
    assert [piece.slot for piece in layout.rounds(step_rows)[0]] == slots


def test_short_products_are_not_cut() -> None:
    layout = replace(layout_for(2, torch.float32), least_inputs=49)
    collective = Host(layout).collective(0, limit=10)
    cuts = []

    def product(rows: torch.Tensor) -> torch.Tensor:
        cuts.append(len(rows))
        return tripled(rows[:, :48])

    x = torch.ones(PIECE * 2, 49)
    collective.add_product(torch.zeros(PIECE * 2, 48), x[:, :48], product)
    assert cuts == [PIECE * 2]
    collective.add_product(torch.zeros(PIECE * 2, 48), x, product)
    assert cuts[1:] == [PIECE, PIECE]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_rows_are_sent_while_others_are_made(size: int, dtype: torch.dtype) -> None:
    """The same bits as when all are made first, in calls of all kinds one after another, by ranks
    that come at different times."""

    def work(collective: PeerCollective) -> None:
        late = random.Random(collective.rank)
        norm = Norm(parts(99, 1, (48,), dtype)[0], 1e-5)

        def product(rows: torch.Tensor) -> torch.Tensor:
            cuts.append(len(rows))
            time.sleep(late.choice((0, 0, 0.01)))
            return tripled(rows)

        for seed, rows in enumerate((8, 13, 3, 6, MOST, 7, 33, 5, 10, MOST + 1, 12)):
            *xs, stream = parts(seed, size + 1, (rows, 48), dtype)
            x = xs[collective.rank]
            cuts: list[int] = []
            left = collective.add_product(stream.clone(), x, product)
            assert isinstance(left, Unsummed)
            wanted = collective._layout.product_rows(rows) if rows > FEW else [slice(0, rows)]
            assert cuts == [cut.stop - cut.start for cut in wanted]
            if seed % 3 == 2:
                total = left.pending.sum()
                assert_equal(total, total_of([tripled(x) for x in xs]))
                assert torch.equal(total, collective.sum(tripled(x)))
                continue
            normed, finished = left.pending.add_norm(left.stream, norm)
            assert_equal(finished, stream + total_of([tripled(x) for x in xs]))
            whole = collective.add(stream.clone(), tripled(x))
            for found, want in zip(
                (normed, finished), whole.pending.add_norm(whole.stream, norm), strict=True
            ):
                assert torch.equal(found, want), rows
        collective.check()

    on_ranks(layout_for(size, dtype), work)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_rows_are_read_where_they_were_made(size: int, dtype: torch.dtype) -> None:
    """The same bits as when they are sent, in steps of one to four sums, by ranks that come at
    different times. The number of rows, and so of programs, changes from call to call. A rank's
    next rows must not replace what others still read."""

    def work(collective: PeerCollective) -> None:
        late = random.Random(collective.rank)
        norm = Norm(parts(99, 1, (48,), dtype)[0], 1e-5)
        calls = 0

        def into(rows: torch.Tensor, out: torch.Tensor) -> None:
            nonlocal calls
            calls += 1
            time.sleep(late.choice((0, 0, 0.01)))
            tripled_into(rows, out)

        seeds = iter(range(99))
        for step in ((9, 7), (5,), (6, 9, 2, 8), (9,), (8, 5, 5, 9), (3, 12, 9)):
            collective.begin()
            for rows in step:
                *xs, stream = parts(next(seeds), size + 1, (rows, 48), dtype)
                x = xs[collective.rank]
                before = calls
                left = collective.add_product(stream.clone(), x, tripled, into)
                assert calls - before == (FEW < rows <= PULLED)
                assert isinstance(left, Unsummed)
                normed, finished = left.pending.add_norm(left.stream, norm)
                assert_equal(finished, stream + total_of([tripled(x) for x in xs]))
                assert collective._pulled_epochs.unique().tolist() == [calls]
            # what comes between two steps, of one sum at most, in every stage of a model
            whole = collective.add(stream.clone(), tripled(x))
            assert isinstance(whole, Unsummed)
            found = whole.pending.add_norm(whole.stream, norm)
            assert torch.equal(found[0], normed) and torch.equal(found[1], finished)
        collective.check()

    on_ranks(layout_for(size, dtype), work)


def test_what_was_sent_is_summed_once_and_next() -> None:
    collective = Host(layout_for(2, torch.float32)).collective(0, limit=10)
    x = torch.ones(PIECE * 2, 48)
    left = collective.add_product(torch.zeros_like(x), x, tripled)
    assert isinstance(left, Unsummed)
    with pytest.raises(RuntimeError, match="must be summed once, before any others"):
        collective.sum(x)
    with pytest.raises(RuntimeError, match="must be summed once, before any others"):
        collective.add_product(torch.zeros_like(x), x, tripled)
    left.pending.sum()
    with pytest.raises(RuntimeError, match="must be summed once, before any others"):
        left.pending.sum()


@pytest.mark.parametrize("vocab_size", [256, 250])
@pytest.mark.parametrize("size", [2, 3])
def test_columns_come_together_on_rank_0(size: int, vocab_size: int) -> None:

    def work(collective: PeerCollective) -> None:
        own = slice_of(vocab_size, collective.rank, size)
        for seed, rows in enumerate((1, 7, 40, 3)):
            logits = parts(seed, 1, (rows, vocab_size), torch.bfloat16)[0]
            found = collective.gather_columns(logits[:, own], vocab_size)
            assert torch.equal(found, logits[:, own] if collective.rank else logits)
            # between two gathers lies at least the sum of a layer
            collective.sum(torch.zeros(1, 48, dtype=torch.bfloat16))

    on_ranks(layout_for(size, torch.bfloat16, vocab_size=vocab_size), work)


def test_gathers_may_follow_each_other() -> None:
    """A prompt's log-probabilities: a rank that only sends runs ahead as far as there is room."""

    def work(collective: PeerCollective) -> None:
        own = slice_of(256, collective.rank, 2)
        for seed in range(6):
            logits = parts(seed, 1, (9, 256), torch.bfloat16)[0]
            found = collective.gather_columns(logits[:, own].contiguous(), 256)
            assert torch.equal(found, logits[:, own] if collective.rank else logits)

    on_ranks(layout_for(2, torch.bfloat16, vocab_size=256), work)


def test_tokens_come_from_rank_0() -> None:

    def work(collective: PeerCollective) -> None:
        for count in (1, 40, 17, 16):
            tokens = torch.arange(count, dtype=torch.int32) * 7 - 1
            given = tokens if collective.rank == 0 else torch.zeros_like(tokens)
            assert torch.equal(collective.broadcast(given), tokens)
            collective.sum(torch.zeros(1, 48))

    on_ranks(layout_for(3, torch.float32), work)


def summed(collective: PeerCollective, x: torch.Tensor) -> torch.Tensor:
    return collective.sum(tripled(x))


def read(collective: PeerCollective, x: torch.Tensor) -> torch.Tensor:
    return finished(collective.add_product(torch.zeros_like(x), x, tripled, tripled_into))


@pytest.mark.parametrize(
    ("total", "rows"),
    [(summed, 2), (summed, FEW + 3), (read, FEW + 3)],
    ids=["few", "many", "read"],
)
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_does_not_come_is_noticed_and_nobody_takes_nonsense(
    size: int, total: Callable[[PeerCollective, torch.Tensor], torch.Tensor], rows: int
) -> None:
    """The others answer once and are gone."""
    host = Host(layout_for(size, torch.float32))
    ones = torch.ones(rows, 48)
    children = []
    for rank in range(1, size):
        child = os.fork()
        if not child:
            os._exit(0 if torch.equal(total(host.collective(rank), ones), size * 3 * ones) else 1)
        children.append(child)
    collective = host.collective(0)
    try:
        assert torch.equal(total(collective, ones), size * 3 * ones)
        collective.check()
        collective.limit = 200
        total(collective, ones)
        with pytest.raises(RuntimeError, match="did not answer in time"):
            collective.check()
        before = [bytes(region) for region in host.regions[1:]]
        total(collective, ones)
        read(collective, torch.ones(PULLED, 48))
        finished(collective.add_product(torch.zeros(MOST, 48), torch.ones(MOST, 48), tripled))
        collective.broadcast(torch.ones(3, dtype=torch.int32))
        assert [bytes(region) for region in host.regions[1:]] == before, (
            "who has missed a rank sends no more"
        )
    finally:
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * (size - 1)


@pytest.mark.parametrize(
    ("rows", "into"),
    [(1, None), (FEW + 3, None), (MOST, None), (FEW + 3, tripled_into)],
    ids=["few", "many", "made in pieces", "read"],
)
def test_the_host_ends_a_wait(
    rows: int, into: Callable[[torch.Tensor, torch.Tensor], None] | None
) -> None:
    collective = Host(layout_for(2, torch.float32)).collective(0, limit=1 << 40, fault=1)
    x = torch.ones(rows, 48)
    finished(collective.add_product(torch.zeros_like(x), x, tripled, into))
    with pytest.raises(RuntimeError, match="did not answer"):
        collective.check()


def test_what_does_not_fit_the_inbox_is_refused() -> None:
    collective = Host(layout_for(2, torch.float32)).collective(0)
    with pytest.raises(ValueError, match="do not fit the inbox for 40 rows and 250 columns"):
        collective.gather_columns(torch.zeros(41, 125), 250)
    with pytest.raises(ValueError, match="numbers must be int32, at most 40"):
        collective.broadcast(torch.zeros(41, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"must be torch.float32 and 48 wide, not .* \(2, 47\)"):
        collective.sum(torch.zeros(2, 47))
