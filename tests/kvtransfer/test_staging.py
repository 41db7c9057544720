"""Pulls between KV caches of different block sizes, through the staging ring: over both transports
what arrives, in process what goes wrong. A ring here has eight runs of 64 tokens, a KV cache has
1,024.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from kvtransfer.kv_peers import (
    LAYOUT,
    Engine,
    LocalSource,
    ProcessSource,
    expire,
    key,
    pattern,
    pull_of,
    rows,
    until_posted,
)
from support.local_transfer import LocalTransferConfig, transfer_config
from support.waiting import stays, until

from pdserve.engine.memory.kv_cache import KVCache
from pdserve.kvtransfer.connector import PullDone, PullFailed, PullSettled
from pdserve.kvtransfer.p2p.link import peer_link
from pdserve.kvtransfer.p2p.staging import NUM_RUNS, Staging, StagingRing
from pdserve.kvtransfer.transport.agent import TransferError
from pdserve.kvtransfer.transport.local_agent import LocalAgent
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import Source, Ticket
from pdserve.protocol.request_key import RequestKey

RUN_TOKENS = 64
RING_BYTES = NUM_RUNS * RUN_TOKENS * LAYOUT.token_bytes
SIZES = [(16, 64), (64, 16), (16, 32), (32, 16)]
LOCAL = LocalTransferConfig(lease_s=600.0, staging_bytes=RING_BYTES)
_names = itertools.count()
_pull_ids = itertools.count(1)


def name() -> RequestKey:
    return key(f"request-{next(_names)}")


def pull(
    sink: Engine, ticket: Ticket, local: list[int], skip: int = 0, deadline_s: float = 300.0
) -> Any:
    sink.receiver.pull(pull_id := next(_pull_ids), ticket, local, skip, deadline_s)
    return sink.wait_for(PullDone, PullFailed, pull_id=pull_id)


def pull_that_expires(sink: Engine, ticket: Ticket, local: list[int]) -> Any:
    """Its deadline comes while it reads."""
    sink.receiver.pull(pull_id := next(_pull_ids), ticket, local, 0, 300.0)
    expire(sink.receiver, pull_id)
    return sink.wait_for(PullDone, PullFailed, pull_id=pull_id)


def ring_of(sink: Engine) -> StagingRing:
    return sink.receiver.local_ranks[0].own.ring


def num_free(sink: Engine) -> int:
    return len(ring_of(sink)._free)


def blocks_for(num_tokens: int, block_size: int, step: int = 1, first: int = 0) -> list[int]:
    """Blocks of a KV cache of 1,024 tokens, scattered by a step that is odd."""
    count = 1024 // block_size
    return [(first + step * index) % count for index in range(-(-num_tokens // block_size))]


def has_rows(sink: Engine, local: Sequence[int], wanted: torch.Tensor) -> bool:
    """Whether the rows in these blocks begin with the wanted ones."""
    return torch.equal(rows(sink.kv_cache[list(local)])[: len(wanted)], wanted)


# --- over both transports ---


@pytest.fixture(
    scope="module",
    params=[(kind, *sizes) for kind in ("local", "nixl") for sizes in SIZES[:2]],
    ids=str,
)
def joined(request: pytest.FixtureRequest) -> Iterator[tuple[LocalSource | ProcessSource, Engine]]:
    kind, theirs, ours = request.param
    config = transfer_config(kind, lease_s=600.0, staging_bytes=RING_BYTES)
    made = (LocalSource if kind == "local" else ProcessSource)(
        "joined", config, seed=5, block_size=theirs
    )
    engine = Engine(f"d{next(_names)}", config, block_size=ours)
    status = engine.connect(made.meta)
    assert status.connected, status
    yield made, engine
    engine.close()
    made.close()


@pytest.mark.parametrize(
    ("num_tokens", "skipped", "step"),
    [
        (64, 0, 1),
        (1, 0, 1),
        (100, 0, 5),
        (100, 64, 3),
        (333, 192, 1),
        (960, 0, 7),
        (640, 128, 3),
        (1000, 960, 1),
    ],
)
def test_rows_arrive(joined: tuple[Any, Engine], num_tokens: int, skipped: int, step: int) -> None:
    source, sink = joined
    sink.kv_cache.zero_()
    theirs = blocks_for(num_tokens, source.block_size, step, 3)
    size = sink.kv_cache.shape[4]
    local = blocks_for(num_tokens, size, step + 2, 1)
    skip = skipped // size
    request = name()
    done = pull(sink, source.publish(request, theirs, num_tokens), local[skip:], skip)
    assert isinstance(done, PullDone), done
    assert has_rows(
        sink, local[skip:], rows(pattern(5, source.block_size)[theirs])[skip * size : num_tokens]
    )
    others = [block for block in range(len(sink.kv_cache)) if block not in local[skip:]]
    assert not sink.kv_cache[others].any()
    assert (
        done.num_bytes
        == (len(theirs) - skipped // source.block_size) * source.block_size * LAYOUT.token_bytes
    )
    assert [(e.key, e.outcome) for e in source.unpinned()] == [(request, "done")]
    until(lambda: num_free(sink) == NUM_RUNS)


def test_parts_arrive_while_the_prompt_is_computed(joined: tuple[Any, Engine]) -> None:
    """Parts end inside the sink's blocks when these are larger, and so does the prompt."""
    source, sink = joined
    sink.kv_cache.zero_()
    size = sink.kv_cache.shape[4]
    request = name()
    theirs = blocks_for(300, source.block_size, 3)
    local = blocks_for(300, size, 5)
    wanted = rows(pattern(5, source.block_size)[theirs])
    peer = Source(source.meta.engine_id, source.meta.incarnation, request)
    sink.receiver.follow(pull_id := next(_pull_ids), peer, b"content", local, 0, 300.0)
    for num_tokens in (64, 112, 192, 272):
        source.publish_part(request, theirs[: num_tokens // source.block_size])
        whole = num_tokens // max(size, source.block_size) * max(size, source.block_size)
        until(partial(has_rows, sink, local, wanted[:whole]))
    assert not rows(sink.kv_cache[local])[272:].any(), "not published yet"
    ticket = source.publish(request, theirs, 300)
    until(lambda: has_rows(sink, local, wanted[:300]))  # the last part comes by itself too
    sink.receiver.complete(pull_id, ticket, 300.0)
    done = sink.wait_for(PullDone, PullFailed, pull_id=pull_id)
    assert isinstance(done, PullDone), done
    assert done.num_bytes == len(theirs) * source.block_size * LAYOUT.token_bytes
    assert done.num_early_bytes >= 256 * LAYOUT.token_bytes
    source.unpinned()


def test_a_prompt_that_is_cached_moves_nothing(joined: tuple[Any, Engine]) -> None:
    source, sink = joined
    sink.kv_cache.zero_()
    theirs = blocks_for(100, source.block_size)
    size = sink.kv_cache.shape[4]
    done = pull(sink, source.publish(name(), theirs, 100), [], -(-100 // size))
    assert isinstance(done, PullDone) and done.num_bytes == done.num_descriptors == 0
    assert not sink.kv_cache.any()
    source.unpinned()


def test_reused_blocks_are_stale(joined: tuple[Any, Engine]) -> None:
    """In the last of several pieces; what was verified before is told."""
    source, sink = joined
    theirs = blocks_for(640, source.block_size)
    size = sink.kv_cache.shape[4]
    ticket = source.publish(name(), theirs)
    source.bump(theirs[-1])
    failed = pull(sink, ticket, blocks_for(640, size))
    assert isinstance(failed, PullFailed) and failed.reason == "stale-generation" and failed.settled
    assert (
        failed.num_verified in range(0, 640 // size)
        and failed.num_verified * size % RUN_TOKENS == 0
    )
    assert source.unpinned()[0].outcome == "rejected"
    assert isinstance(pull(sink, source.publish(name(), theirs), blocks_for(640, size)), PullDone)
    source.unpinned()


# --- in process, with faults ---


@pytest.fixture(params=SIZES, ids=str)
def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.fixture
def source(sizes: tuple[int, int]) -> Iterator[LocalSource]:
    source = LocalSource("p", LOCAL, seed=5, block_size=sizes[0])
    yield source
    source.close()


@pytest.fixture
def sink(sizes: tuple[int, int], source: LocalSource) -> Iterator[Engine]:
    engine = Engine(f"d{next(_names)}", LOCAL, block_size=sizes[1])
    assert engine.connect(source.meta).connected
    yield engine
    engine.close()


class SlowRepack:
    """Repacks end when they are told to, and move their rows only then. running: that wait for
    it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.running: dict[int, tuple[Any, ...]] = {}
        self.is_held = True
        self._repack = Staging.repack
        patch.setattr(Staging, "repack", lambda *arguments: self._start(arguments))

    def _start(self, arguments: tuple[Any, ...]) -> Callable[[], bool]:
        number = next(_names)
        self.running[number] = arguments

        def has_ended() -> bool:
            if self.is_held:
                return False
            if number in self.running:
                self._repack(*self.running.pop(number))
            return True

        return has_ended


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowRepack:
    return SlowRepack(monkeypatch)


def test_generations_are_read_behind_the_read(
    sink: Engine, source: LocalSource, sizes: tuple[int, int]
) -> None:
    source.freeze()
    ticket = source.publish(name(), blocks_for(64, sizes[0]))
    sink.receiver.pull(pull_id := next(_pull_ids), ticket, blocks_for(64, sizes[1]), 0, 300.0)
    until_posted(sink, pull_id, 1)
    source.bump(ticket.block_ids[0])
    source.thaw()
    failed = sink.wait_for(PullDone, PullFailed, pull_id=pull_id)
    assert isinstance(failed, PullFailed) and failed.reason == "stale-generation" and failed.settled
    assert failed.num_verified == 0


def test_slots_are_not_read_into_while_rows_are_moved_from_them(
    sink: Engine, source: LocalSource, sizes: tuple[int, int], slow: SlowRepack
) -> None:
    """Half of the ring is this peer's; the rest of the prompt waits."""
    theirs = blocks_for(960, sizes[0])
    local = blocks_for(960, sizes[1])
    ticket = source.publish(name(), theirs)
    sink.receiver.pull(pull_id := next(_pull_ids), ticket, local, 0, 300.0)
    until(lambda: len(slow.running) == NUM_RUNS // 2)
    stays(lambda: len(slow.running) == num_free(sink) == NUM_RUNS // 2, 0.05)
    slow.is_held = False
    assert isinstance(sink.wait_for(PullDone, PullFailed, pull_id=pull_id), PullDone)
    assert has_rows(sink, local, rows(pattern(5, sizes[0])[theirs]))
    assert num_free(sink) == NUM_RUNS


def test_a_pull_is_not_settled_while_its_rows_are_moved(
    sink: Engine, source: LocalSource, sizes: tuple[int, int], slow: SlowRepack
) -> None:
    ticket = source.publish(name(), blocks_for(128, sizes[0]))
    sink.receiver.pull(pull_id := next(_pull_ids), ticket, blocks_for(128, sizes[1]), 0, 300.0)
    until(lambda: len(slow.running) == 2)
    sink.receiver.cancel(pull_id)
    failed = sink.wait_for(PullFailed, pull_id=pull_id)
    assert (failed.reason, failed.settled, failed.num_verified) == ("cancelled", False, 0)
    stays(lambda: not sink.receiver.poll() and num_free(sink) == NUM_RUNS - 2, 0.05)
    slow.is_held = False
    sink.wait_for(PullSettled, pull_id=pull_id)
    assert not slow.running and num_free(sink) == NUM_RUNS


def test_a_pull_is_settled_while_it_is_read_but_its_slots_stay_taken(
    sink: Engine, source: LocalSource, sizes: tuple[int, int]
) -> None:
    """Only the ring can be written, and what lands there goes no further."""
    source.freeze()
    ticket = source.publish(name(), blocks_for(960, sizes[0]))
    failed = pull_that_expires(sink, ticket, blocks_for(960, sizes[1]))
    assert (failed.reason, failed.settled, failed.num_verified) == ("deadline", True, 0)
    assert num_free(sink) == NUM_RUNS // 2
    source.thaw()
    until(lambda: num_free(sink) == NUM_RUNS)
    assert not sink.kv_cache.any()
    assert isinstance(
        pull(sink, source.publish(name(), [0]), blocks_for(sizes[0], sizes[1])), PullDone
    )


def test_frozen_peers_starve_nobody(
    sink: Engine, source: LocalSource, sizes: tuple[int, int]
) -> None:
    """Each holds half of what those before left."""
    others = [
        LocalSource(f"q{i}", LOCAL, seed=6 + i, block_size=size)
        for i, size in enumerate((sizes[0], 32, 64))
    ]
    try:
        for other in others:
            assert sink.connect(other.meta).connected
        for frozen in (source, others[0]):
            frozen.freeze()
            theirs = blocks_for(960, frozen.block_size)
            sink.receiver.pull(
                next(_pull_ids), frozen.publish(name(), theirs), blocks_for(960, sizes[1]), 0, 300.0
            )
        until(lambda: num_free(sink) == NUM_RUNS - NUM_RUNS // 2 - NUM_RUNS // 4)
        for living in others[1:]:
            theirs = blocks_for(960, living.block_size, 3)
            local = blocks_for(960, sizes[1])
            assert isinstance(pull(sink, living.publish(name(), theirs), local), PullDone)
            assert has_rows(sink, local, rows(living.engine.kv_cache[theirs]))
    finally:
        for each in (source, *others):
            each.thaw()
            each.close()


def test_many_pulls_from_two_peers_at_once(
    sink: Engine, source: LocalSource, sizes: tuple[int, int], slow: SlowRepack
) -> None:
    slow.is_held = False
    other = LocalSource("q", LOCAL, seed=8, block_size=64 if sizes[0] == 32 else 32)
    assert sink.connect(other.meta).connected
    for each in (source, other):
        each.faults.delay_s = 0.003
    pulls = {}
    for index in range(10):
        each = (source, other)[index % 2]
        theirs = blocks_for(64, each.block_size, 1, index)
        local = blocks_for(64, sizes[1], 1, index * 64 // sizes[1])
        pulls[next(_pull_ids)] = local, rows(each.engine.kv_cache[theirs])
        sink.receiver.pull(max(pulls), each.publish(name(), theirs), local, 0, 300.0)
    for _ in pulls:
        done = sink.wait_for(PullDone, PullFailed)
        assert isinstance(done, PullDone), done
    assert all(has_rows(sink, *wanted) for wanted in pulls.values())
    until(lambda: num_free(sink) == NUM_RUNS)
    other.close()


def test_a_dead_peer_gives_its_slots_back(
    sink: Engine, source: LocalSource, sizes: tuple[int, int]
) -> None:
    source.freeze()
    ticket = source.publish(name(), blocks_for(960, sizes[0]))
    sink.receiver.pull(pull_id := next(_pull_ids), ticket, blocks_for(960, sizes[1]), 0, 300.0)
    until(lambda: num_free(sink) == NUM_RUNS // 2)
    source.kill()
    failed = sink.wait_for(PullFailed, pull_id=pull_id)
    assert (failed.reason, failed.settled) == ("peer-lost", True)
    until(lambda: num_free(sink) == NUM_RUNS)
    successor = LocalSource("p", LOCAL, seed=9, incarnation=2, block_size=sizes[0])
    try:
        sink.receiver.connect(successor.meta)
        sink.wait(lambda e: isinstance(e, PeerStatus) and e.incarnation == 2 and e.connected)
        local = blocks_for(960, sizes[1])
        theirs = blocks_for(960, sizes[0], 3)
        assert isinstance(pull(sink, successor.publish(name(), theirs), local), PullDone)
        assert has_rows(sink, local, rows(successor.engine.kv_cache[theirs]))
    finally:
        successor.close()


def test_a_peer_that_dies_while_rows_are_moved(
    sink: Engine, source: LocalSource, sizes: tuple[int, int], slow: SlowRepack
) -> None:
    ticket = source.publish(name(), blocks_for(128, sizes[0]))
    sink.receiver.pull(pull_id := next(_pull_ids), ticket, blocks_for(128, sizes[1]), 0, 300.0)
    until(lambda: len(slow.running) == 2)
    sink.receiver.disconnect("p", 1)
    failed = sink.wait_for(PullFailed, pull_id=pull_id)
    assert (failed.reason, failed.settled) == ("peer-lost", False)
    settled: list[object] = []

    def untouched() -> bool:
        settled.extend(event for event in sink.receiver.poll() if isinstance(event, PullSettled))
        return num_free(sink) == NUM_RUNS - 2 and not settled

    stays(untouched, 0.1)
    slow.is_held = False
    sink.wait_for(PullSettled, pull_id=pull_id)
    assert not slow.running and num_free(sink) == NUM_RUNS


def test_a_peer_that_stays_frozen_is_cut_off(
    sink: Engine, source: LocalSource, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for its reads but those who want the slots."""
    source.freeze()
    ticket = source.publish(name(), blocks_for(64, sizes[0]))
    assert pull_that_expires(sink, ticket, blocks_for(64, sizes[1])).settled
    assert num_free(sink) == NUM_RUNS - 1
    monkeypatch.setattr(peer_link, "SEVER_AFTER_S", 0.2)
    until(lambda: num_free(sink) == NUM_RUNS)
    source.thaw()
    stays(lambda: not sink.kv_cache.any(), 0.05)


def test_a_stale_piece_is_read_again_behind_a_newer_part(
    sink: Engine, source: LocalSource, sizes: tuple[int, int], slow: SlowRepack
) -> None:
    """Not before the rows of the old one have been moved: they would come last."""
    request = name()
    local = blocks_for(128, sizes[1])
    old = blocks_for(128, sizes[0])
    new = blocks_for(128, sizes[0], 1, 512 // sizes[0])
    peer = Source("p", 1, request)
    sink.receiver.follow(pull_id := next(_pull_ids), peer, b"content", local, 0, 300.0)
    source.publish_part(request, old)
    until(lambda: len(slow.running) == 2)
    for block in old:
        source.bump(block)
    source.engine.kv_cache[old] = 9.0
    source.publish_part(request, new)
    stays(lambda: len(slow.running) == 2, 0.05)
    slow.is_held = False
    wanted = rows(pattern(5, sizes[0])[new])
    until(lambda: has_rows(sink, local, wanted))
    sink.receiver.complete(pull_id, source.publish(request, new), 300.0)
    assert isinstance(sink.wait_for(PullDone, PullFailed, pull_id=pull_id), PullDone)
    assert has_rows(sink, local, wanted)


@pytest.mark.parametrize("sizes", [(16, 64)], indirect=True)
def test_verified_blocks_are_counted_as_ours(sink: Engine, source: LocalSource) -> None:
    """Seven blocks of 16 fill one of 64; what the eighth would complete is not read before."""
    request = name()
    peer = Source("p", 1, request)
    sink.receiver.follow(pull_id := next(_pull_ids), peer, b"content", [3, 4, 5], 0, 300.0)
    source.publish_part(request, list(range(7)))
    wanted = rows(pattern(5, 16)[:7])
    until(lambda: has_rows(sink, [3], wanted[:64]))
    stays(lambda: not sink.kv_cache[4].any(), 0.05)
    sink.receiver.cancel(pull_id)
    failed = sink.wait_for(PullFailed, pull_id=pull_id)
    assert (failed.settled, failed.num_verified) == (True, 1)


@pytest.mark.parametrize("sizes", [(64, 16)], indirect=True)
def test_verified_blocks_behind_a_prefix_that_ends_in_a_block(
    sink: Engine, source: LocalSource
) -> None:
    request = name()
    peer = Source("p", 1, request)
    sink.receiver.follow(
        pull_id := next(_pull_ids), peer, b"content", [20, 21, 22, 23, 24, 25], 3, 300.0
    )
    source.publish_part(request, [7])
    wanted = rows(pattern(5, 64)[[7, 8]])[48:]
    until(lambda: has_rows(sink, [20], wanted[:16]))
    stays(lambda: not sink.kv_cache[21].any(), 0.05)
    source.publish_part(request, [7, 8])
    until(lambda: has_rows(sink, [20, 21, 22, 23, 24], wanted))
    until(lambda: pull_of(sink, pull_id).num_verified == 5)
    sink.receiver.cancel(pull_id)
    failed = sink.wait_for(PullFailed, pull_id=pull_id)
    assert (failed.settled, failed.num_verified) == (True, 5)


@pytest.mark.parametrize("sizes", [(16, 64)], indirect=True)
def test_a_read_that_cannot_be_made_takes_no_slots(
    sink: Engine, source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*arguments: object) -> None:
        raise TransferError("error", "no descriptors")

    with monkeypatch.context() as patch:
        patch.setattr(LocalAgent, "make_read", refuses)
        failed = pull(sink, source.publish(name(), [0, 1, 2, 3]), [0])
    assert (failed.reason, failed.settled) == ("error", True) and num_free(sink) == NUM_RUNS
    assert isinstance(pull(sink, source.publish(name(), [0, 1, 2, 3]), [0]), PullDone)


@pytest.mark.parametrize("sizes", [(16, 64)], indirect=True)
def test_a_ticket_in_blocks_of_another_size_than_the_pools_is_an_error(
    sink: Engine, source: LocalSource
) -> None:
    ticket = source.engine.sender.publish(name(), [0, 1, 2, 3], 64, b"content")
    wrong = Ticket(
        **{field: getattr(ticket, field) for field in ticket.__struct_fields__} | {"block_size": 17}
    )
    failed = pull(sink, wrong, [0])
    assert failed.reason == "error" and "17 tokens" in failed.detail


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_arrive_on_a_device(sizes: tuple[int, int]) -> None:
    """Both KV caches on one; repacks on streams of their own."""
    source = Engine(
        f"p{next(_names)}", LOCAL, kv_cache=pattern(5, sizes[0]).cuda(), block_size=sizes[0]
    )
    sink = Engine(
        f"d{next(_names)}",
        LOCAL,
        kv_cache=torch.zeros_like(pattern(5, sizes[1])).cuda(),
        block_size=sizes[1],
    )
    try:
        assert sink.connect(source.sender.meta()).connected
        for num_tokens in (1, 100, 960):
            theirs = blocks_for(num_tokens, sizes[0], 3, 5)
            local = blocks_for(num_tokens, sizes[1], 5, 2)
            ticket = source.sender.publish(name(), theirs, num_tokens, b"content")
            assert isinstance(pull(sink, ticket, local), PullDone)
            assert has_rows(sink, local, rows(source.kv_cache[theirs])[:num_tokens])
        assert num_free(sink) == NUM_RUNS
    finally:
        sink.close()
        source.close()


# --- the ring ---


@pytest.mark.parametrize("sizes", [(16, 16)], indirect=True)
def test_the_ring_is_taken_when_it_is_needed(source: LocalSource) -> None:
    sink = Engine(f"d{next(_names)}", LOCAL, block_size=source.block_size)
    try:
        assert sink.connect(source.meta).connected
        assert ring_of(sink)._memory is None
    finally:
        sink.close()


@pytest.mark.parametrize("sizes", [(16, 64)], indirect=True)
def test_a_ring_that_is_too_small_is_told(source: LocalSource) -> None:
    needed = NUM_RUNS * 64 * LAYOUT.token_bytes
    small = LOCAL.model_copy(update={"staging_bytes": needed - 1})
    sink = Engine(f"d{next(_names)}", small, block_size=64)
    same = LocalSource("same", LOCAL, block_size=64)
    try:
        status = sink.connect(source.meta)
        assert not status.connected and f"set it to at least {needed}" in status.detail, status
        assert sink.connect(same.meta).connected, "which needs none"
    finally:
        sink.close()
        same.close()


@pytest.mark.parametrize("sizes", [(16, 64)], indirect=True)
def test_a_ring_that_memory_lacks_for_is_told(source: LocalSource) -> None:
    sink = Engine(
        f"d{next(_names)}", LOCAL.model_copy(update={"staging_bytes": 1 << 50}), block_size=64
    )
    try:
        status = sink.connect(source.meta)
        assert (
            not status.connected
            and f"{1 << 50} bytes: there is not enough memory; lower" in status.detail
        )
    finally:
        sink.close()


@pytest.mark.parametrize("sizes", [(16, 64)], indirect=True)
def test_a_ring_that_cannot_be_registered_is_told(
    source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Engine(f"d{next(_names)}", LOCAL, block_size=64)

    def refuses(*arguments: object) -> None:
        raise TransferError("error", "no memory left")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(LocalAgent, "register", refuses)
            status = sink.connect(source.meta)
        assert (
            not status.connected
            and "no staging ring" in status.detail
            and "no memory left" in status.detail
        )
        assert sink.connect(source.meta).connected, "there is memory now"
        assert isinstance(pull(sink, source.publish(name(), [0, 1, 2, 3]), [0]), PullDone)
    finally:
        sink.close()


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0), (1, 1), (100, 64), (127, 64), (128, 128), (700, 640)]
)
def test_a_run_holds_whole_blocks_of_any_size(num_tokens: int, expected: int) -> None:
    ring = StagingRing(
        LocalAgent(f"ring-{next(_names)}"),
        KVCache(torch.empty(0), LAYOUT),
        NUM_RUNS * num_tokens * LAYOUT.token_bytes,
    )
    assert ring.run_tokens == expected
