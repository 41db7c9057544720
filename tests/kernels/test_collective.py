"""What ranks compute together in each other's memory: the kernels in Triton's interpreter, each
rank a process, over memory that they share."""

import ctypes
import mmap
import os
import traceback
from collections.abc import Callable

import pytest
import torch

from pdserve.kernels.collective import triton_ops
from pdserve.kernels.collective.ops import Unsummed, slice_of
from pdserve.kernels.collective.triton_ops import ROW_SLOTS, PeerCollective, RegionLayout
from pdserve.kernels.norm import reference as norms
from pdserve.kernels.norm.ops import Norm

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU: test_peers.py")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Work = Callable[[PeerCollective], None]


def on_ranks(layout: RegionLayout, work: Work, limit: int = 20_000) -> None:
    """Run it on every rank; AssertionError when one fails."""
    memory = [mmap.mmap(-1, layout.num_bytes) for _ in range(layout.size)]
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in memory]
    children: list[int] = []
    for rank in range(layout.size):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            collective = PeerCollective(
                layout, rank, torch.tensor(addresses), torch.zeros(1, dtype=torch.int32)
            )
            collective.limit = limit
            work(collective)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    assert statuses == [0] * layout.size


def layout_for(
    size: int, dtype: torch.dtype, width: int = 48, vocab_size: int = 250
) -> RegionLayout:
    return RegionLayout(size, width, dtype, max_rows=40, vocab_size=vocab_size)


def assert_equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """To the last bit, but that the interpreter cuts bfloat16 off where a GPU rounds."""
    if found.dtype == torch.bfloat16:
        torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-6, atol=2**-3)
    else:
        assert torch.equal(found, wanted)


def parts(seed: int, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """What each rank has; every rank can draw them all."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * 3).to(dtype) for _ in range(size)]


def total_of(partials: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(partials[0].shape)
    for partial in partials:
        total = total + partial.float()
    return total.to(partials[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_exact_whatever_comes_between(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of several sizes one after another, which use the same inboxes again and again."""
    monkeypatch.setattr(triton_ops, "FLAT_BLOCK", 64)
    monkeypatch.setattr(triton_ops, "FLAT_SLOTS", 4)

    def work(collective: PeerCollective) -> None:
        for seed, rows in enumerate((1, 40, 2, 2, 17)):
            partials = parts(seed, size, (rows, 48), dtype)
            total = collective.sum(partials[collective.rank])
            assert_equal(total, total_of(partials))
        collective.check()

    on_ranks(layout_for(size, dtype), work)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_is_added_and_normed_in_one(dtype: torch.dtype, plus_one: bool) -> None:
    def work(collective: PeerCollective) -> None:
        for seed, rows in enumerate((1, 5, ROW_SLOTS, 2)):
            first, second, stream = parts(seed, 3, (rows, 48), dtype)
            weight = parts(99, 1, (48,), dtype)[0]
            norm = Norm(weight, 1e-5, plus_one)
            partials = [first, second]
            want = stream + total_of(partials)
            left = collective.add(stream, partials[collective.rank])
            assert isinstance(left, Unsummed)
            normed, finished = collective.add_norm(left, norm)
            assert_equal(finished, want)
            tolerance = {torch.float32: 1e-6, torch.float16: 2e-2, torch.bfloat16: 0.1}[dtype]
            torch.testing.assert_close(
                normed.float(), norms.rms_norm(want, norm).float(), rtol=tolerance, atol=tolerance
            )
        many = parts(7, 3, (ROW_SLOTS + 1, 48), dtype)
        added = collective.add(many[2], many[collective.rank])
        assert isinstance(added, torch.Tensor)
        assert torch.equal(added, many[2])

    on_ranks(layout_for(2, dtype), work)


@pytest.mark.parametrize("vocab_size", [256, 250])
@pytest.mark.parametrize("size", [2, 3])
def test_columns_come_together_on_rank_0(
    size: int, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_ops, "CHUNK", 512)

    def work(collective: PeerCollective) -> None:
        own = slice_of(vocab_size, collective.rank, size)
        for seed, rows in enumerate((1, 7, 40, 3)):
            logits = parts(seed, 1, (rows, vocab_size), torch.bfloat16)[0]
            found = collective.gather_columns(logits[:, own], vocab_size)
            assert torch.equal(found, logits[:, own] if collective.rank else logits)
            # between two gathers lies at least the sum of a layer
            collective.sum(torch.zeros(1, 48, dtype=torch.bfloat16))

    on_ranks(layout_for(size, torch.bfloat16, vocab_size=vocab_size), work)


def test_gathers_may_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's log-probabilities: a rank that only sends runs ahead as far as there is room."""
    monkeypatch.setattr(triton_ops, "CHUNK", 512)

    def work(collective: PeerCollective) -> None:
        own = slice_of(256, collective.rank, 2)
        for seed in range(6):
            logits = parts(seed, 1, (9, 256), torch.bfloat16)[0]
            found = collective.gather_columns(logits[:, own].contiguous(), 256)
            assert torch.equal(found, logits[:, own] if collective.rank else logits)

    on_ranks(layout_for(2, torch.bfloat16, vocab_size=256), work)


def test_tokens_come_from_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "TOKEN_BLOCK", 16)

    def work(collective: PeerCollective) -> None:
        for count in (1, 40, 17, 16):
            tokens = torch.arange(count, dtype=torch.int32) * 7 - 1
            given = tokens if collective.rank == 0 else torch.zeros_like(tokens)
            assert torch.equal(collective.broadcast(given), tokens)
            collective.sum(torch.zeros(1, 48))

    on_ranks(layout_for(3, torch.float32), work)


def test_a_rank_that_does_not_come_is_noticed_and_nobody_takes_nonsense() -> None:
    """Rank 1 answers once and is gone."""
    layout = layout_for(2, torch.float32)
    memory = [mmap.mmap(-1, layout.num_bytes) for _ in range(2)]
    peer = memory[1]
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in memory]
    child = os.fork()
    faults = torch.zeros(1, dtype=torch.int32)
    collective = PeerCollective(layout, 0 if child else 1, torch.tensor(addresses), faults)
    collective.limit = 20_000
    ones = torch.ones(2, 48)
    if not child:
        os._exit(0 if torch.equal(collective.sum(ones), 2 * ones) else 1)
    try:
        assert torch.equal(collective.sum(ones), 2 * ones)
        collective.check()
        collective.limit = 200
        collective.sum(ones)
        with pytest.raises(RuntimeError, match="did not answer in time"):
            collective.check()
        before = bytes(peer)
        collective.sum(ones)
        collective.broadcast(torch.ones(3, dtype=torch.int32))
        assert bytes(peer) == before, "who has missed a rank sends no more"
    finally:
        assert os.waitpid(child, 0)[1] == 0


def test_the_host_ends_a_wait() -> None:
    layout = layout_for(2, torch.float32)
    memory = [mmap.mmap(-1, layout.num_bytes) for _ in range(2)]
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in memory]
    faults = torch.ones(1, dtype=torch.int32)
    collective = PeerCollective(layout, 0, torch.tensor(addresses), faults)
    collective.limit = 1 << 40
    collective.sum(torch.ones(1, 48))
    with pytest.raises(RuntimeError, match="did not answer"):
        collective.check()


def test_what_does_not_fit_the_inbox_is_refused() -> None:
    layout = layout_for(2, torch.float32)
    collective = PeerCollective(
        layout, 0, torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    )
    with pytest.raises(ValueError, match="do not fit the inbox for 40 rows and 250 columns"):
        collective.gather_columns(torch.zeros(41, 125), 250)
    with pytest.raises(ValueError, match="numbers must be int32, at most 40"):
        collective.broadcast(torch.zeros(41, dtype=torch.int32))
