"""The pool's contract, over the in-process twin and a real LMCache server; then what only one of
them can show."""

import math
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from kvtransfer.kv_peers import LAYOUT
from kvtransfer.pool_peers import (
    CHUNK,
    CONFIG,
    EMPTY,
    IMPATIENT_MS,
    SIZE,
    Engine,
    keep_in_another_process,
    left_behind,
    prompt,
)
from support.local_pool_backend import LocalBlockCopier, LocalPoolServer, PoolFaults
from support.processes import freeze
from support.waiting import stays, until

from pdserve.background import tasks
from pdserve.configs.kv_layout import KVLayout, LayerGroup
from pdserve.configs.transfer import PoolConfig
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.kvtransfer.connector import (
    KVCacheMemory,
    PoolDone,
    PoolEvent,
    PoolFailed,
    PoolSettled,
    PoolStored,
    unchanged,
)
from pdserve.kvtransfer.pool.breaker import Breaker
from pdserve.kvtransfer.pool.chunks import SEAL_BYTES, Chunks, Shard, runs
from pdserve.kvtransfer.pool.lmcache_connection import ServerConnection
from pdserve.kvtransfer.pool.lmcache_server import PoolServer

pytestmark = pytest.mark.processes

Server = LocalPoolServer | PoolServer


@pytest.fixture(scope="module")
def real_server() -> Iterator[PoolServer]:
    server = PoolServer(CONFIG.model_copy(update={"mode": "start"}))
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module", params=["local", "lmcache"])
def server(request: pytest.FixtureRequest) -> Server:
    return LocalPoolServer() if request.param == "local" else request.getfixturevalue("real_server")


@pytest.fixture
def engines(server: Server) -> Iterator[tuple[Engine, Engine]]:
    """Two engines of one model; afterwards the server must hold nothing for them."""
    writer = Engine(server)
    reader = Engine(server)
    yield writer, reader
    tidy = dict.fromkeys(left_behind(server), 0)
    until(lambda: left_behind(server) == tidy)
    writer.close()
    reader.close()


@pytest.fixture
def real(real_server: PoolServer) -> Iterator[Engine]:
    engine = Engine(real_server)
    yield engine
    engine.close()


def test_rows_come_back_bit_equal_in_other_blocks(engines: tuple[Engine, Engine]) -> None:
    writer, reader = engines
    tokens = prompt(3 * CHUNK)
    writer.keep(tokens, [40, 3, 2, 1, 17, 18, 19, 20, 60, 59, 5, 6])
    assert reader.find(tokens) == 3 * CHUNK
    into = [7, 8, 9, 30, 29, 28, 63, 0, 11, 50, 51, 52]
    event = reader.retrieve(tokens, into)
    assert isinstance(event, PoolDone)
    assert (event.num_tokens, event.num_bytes) == (3 * CHUNK, 12 * reader.blocks[0].nbytes)
    assert event.seconds > 0
    assert reader.holds(tokens, into)
    assert reader.untouched(set(range(64)) - set(into))


def test_only_whole_chunks_are_stored(engines: tuple[Engine, Engine]) -> None:
    writer, reader = engines
    tokens = prompt(2 * CHUNK + SIZE + 3)
    writer.compute(tokens, range(9))
    event = writer.store(tokens, range(9))
    assert event == PoolStored(event.op_id, 2 * CHUNK, 8 * writer.blocks[0].nbytes)
    assert reader.find(tokens) == 2 * CHUNK
    assert reader.find(tokens[: 2 * CHUNK - 1]) == CHUNK
    assert reader.find(tokens[: CHUNK - 1]) == 0
    assert writer.begin_store(tokens[: CHUNK - 1], range(4)) is None
    assert writer.begin_store(tokens, range(3)) is None, "three blocks are no chunk"


def test_a_hit_may_be_shorter_than_asked(engines: tuple[Engine, Engine]) -> None:
    writer, reader = engines
    stored = prompt(2 * CHUNK)
    writer.keep(stored, range(8))
    longer = prompt(4 * CHUNK, like=stored)
    assert reader.find(longer) == 2 * CHUNK
    event = reader.retrieve(longer, range(20, 36))
    assert isinstance(event, PoolDone) and event.num_tokens == 2 * CHUNK
    assert reader.holds(longer, range(20, 28))
    assert reader.untouched(range(28, 36))
    forked = prompt(2 * CHUNK, like=stored[: CHUNK + 1])
    assert reader.find(forked) == CHUNK


@pytest.mark.parametrize("skip_blocks", [1, 4, 6, 8, 11])
def test_skipped_rows_are_not_touched(engines: tuple[Engine, Engine], skip_blocks: int) -> None:
    writer, reader = engines
    tokens = prompt(3 * CHUNK)
    writer.keep(tokens, range(12))
    into = list(range(50, 62 - skip_blocks))
    event = reader.retrieve(tokens, into, skip=skip_blocks * SIZE)
    assert isinstance(event, PoolDone)
    assert (event.num_tokens, event.num_bytes) == (3 * CHUNK, len(into) * reader.blocks[0].nbytes)
    assert reader.holds(tokens, into, first=skip_blocks)
    assert reader.untouched(set(range(64)) - set(into))


def test_blocks_may_end_inside_a_chunk(engines: tuple[Engine, Engine]) -> None:
    writer, reader = engines
    tokens = prompt(3 * CHUNK)
    writer.keep(tokens, range(12))
    event = reader.retrieve(tokens, [30, 31, 32], skip=2 * SIZE)
    assert isinstance(event, PoolDone) and event.num_tokens == 5 * SIZE
    assert reader.holds(tokens, [30, 31, 32], first=2)
    assert reader.untouched(range(33, 64))


def test_a_hit_that_ends_before_the_skipped_rows_is_a_miss(engines: tuple[Engine, Engine]) -> None:
    writer, reader = engines
    tokens = prompt(3 * CHUNK)
    writer.keep(tokens[:CHUNK], range(4))
    for skip in (CHUNK, 2 * CHUNK):
        event = reader.retrieve(tokens, [30, 31], skip=skip)
        assert event == PoolFailed(event.op_id, "miss", "", settled=True)
    assert reader.untouched(range(64))


def test_salt_and_model_keep_apart(engines: tuple[Engine, Engine], server: Server) -> None:
    writer, reader = engines
    tokens = prompt(2 * CHUNK)
    writer.keep(tokens, range(8), salt="tenant/a@1")
    assert reader.find(tokens, salt="tenant/a@1") == 2 * CHUNK
    assert reader.find(tokens, salt="tenant/a@2") == 0
    assert reader.find(tokens) == 0
    event = reader.retrieve(tokens, range(8), salt="tenant/b")
    assert isinstance(event, PoolFailed) and (event.reason, event.settled) == ("miss", True)
    other = Engine(server, fingerprint="another model")
    assert other.find(tokens, salt="tenant/a@1") == 0
    other.close()
    assert reader.untouched(range(64))


def test_shards_of_a_tensor_parallel_group_keep_apart(server: Server) -> None:
    ranks = [Engine(server, shard=Shard(2, rank)) for rank in range(2)]
    tokens = prompt(2 * CHUNK)
    for engine, rows in zip(ranks, (tokens, prompt(2 * CHUNK)), strict=True):
        assert engine.find(tokens) == 0
        engine.compute(rows, range(8))
        assert isinstance(engine.store(tokens, range(8)), PoolStored)
        done = engine.retrieve(tokens, range(20, 28))
        assert isinstance(done, PoolDone) and done.num_tokens == 2 * CHUNK
        assert engine.holds(rows, range(20, 28))
    whole = Engine(server)
    assert whole.find(tokens) == 0
    for engine in (*ranks, whole):
        engine.close()


def test_what_the_pool_has_is_not_copied_again(engines: tuple[Engine, Engine]) -> None:
    writer, reader = engines
    tokens = prompt(2 * CHUNK)
    writer.keep(tokens[:CHUNK], range(4))
    reader.compute(tokens, range(8))
    assert reader.store(tokens, range(8)) == PoolStored(1, 2 * CHUNK, 4 * writer.blocks[0].nbytes)
    assert reader.store(tokens, range(8)) == PoolStored(2, 2 * CHUNK, 0)
    assert reader.counted("bytes_total", operation="store") == 4 * writer.blocks[0].nbytes


def test_a_block_reused_during_a_store_is_not_found(engines: tuple[Engine, Engine]) -> None:
    writer, reader = engines
    tokens = prompt(2 * CHUNK)
    writer.compute(tokens, range(8))
    gate = writer.gated_copies()
    gate.copies_frozen = True
    op_id = writer.begin_store(tokens, range(8))
    writer.until_copying(op_id)
    writer.generations[6] += 1
    writer.blocks[6] = 0.5
    gate.copies_frozen = False
    event = writer.next_event(op_id)
    assert isinstance(event, PoolFailed) and (event.reason, event.settled) == ("reused", True)
    assert reader.find(tokens) == 0
    event = reader.retrieve(tokens, range(8))
    assert isinstance(event, PoolFailed) and event.reason == "miss"
    assert reader.untouched(range(64))
    assert writer.counted("requests_total", operation="store", outcome="reused") == 1


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that leaves a reservation: LMCache gives it back after its time, not at once."""


def test_stores_hold_no_more_blocks_than_their_cap(engines: tuple[Engine, Engine]) -> None:
    writer, _ = engines
    gate = writer.gated_copies()
    gate.copies_frozen = True
    big = prompt(7 * CHUNK)
    small = prompt(CHUNK)
    first = writer.begin_store(big, range(28))
    assert writer.begin_store(prompt(2 * CHUNK), range(28, 36)) is None, (
        "28 + 8 of 64 blocks is over a half"
    )
    second = writer.begin_store(small, range(28, 32))
    gate.copies_frozen = False
    assert {type(writer.next_event(op)) for op in (first, second)} == {PoolStored}
    assert isinstance(writer.store(prompt(8 * CHUNK), range(32)), PoolStored)
    assert writer.counted("requests_total", operation="store", outcome="over-cap") == 1


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
def test_blocks_settle_when_the_copy_ends(engines: tuple[Engine, Engine], how: str) -> None:
    writer, reader = engines
    tokens = prompt(2 * CHUNK)
    writer.keep(tokens, range(8))
    gate = reader.gated_copies()
    gate.copies_frozen = True
    op_id = reader.begin_retrieve(tokens, range(8))
    reader.until_copying(op_id)
    if how == "cancelled":
        reader.pool.cancel(op_id)
    else:
        reader.expire(op_id)
    assert reader.next_event(op_id) == PoolFailed(op_id, how, "", settled=False)
    stays(lambda: reader.pool.poll() == [], 0.05)  # not settled while the copy runs
    gate.copies_frozen = False
    assert reader.next_event(op_id) == PoolSettled(op_id)
    reader.blocks[4:8] = EMPTY
    stays(lambda: reader.untouched(range(4, 8)), 0.05)  # nothing is copied after the settling
    assert reader.counted("unsettled_total") == 1
    assert reader.pool.poll() == []


def test_a_store_that_is_cancelled_settles_too(engines: tuple[Engine, Engine]) -> None:
    writer, _ = engines
    gate = writer.gated_copies()
    gate.copies_frozen = True
    op_id = writer.begin_store(prompt(8 * CHUNK), range(32))
    assert op_id is not None
    writer.until_copying(op_id)
    writer.pool.cancel(op_id)
    assert writer.next_event(op_id) == PoolFailed(op_id, "cancelled", "", settled=False)
    assert writer.begin_store(prompt(CHUNK), range(4)) is None, (
        "the sources still count for the cap"
    )
    gate.copies_frozen = False
    assert writer.next_event(op_id) == PoolSettled(op_id)
    assert isinstance(writer.store(prompt(8 * CHUNK), range(32)), PoolStored)


def test_cancelled_while_it_waits_settles_at_once(engines: tuple[Engine, Engine]) -> None:
    writer, reader = engines
    tokens = prompt(CHUNK)
    writer.keep(tokens, range(4))
    gate = reader.gated_copies()
    gate.copies_frozen = True
    first = reader.begin_retrieve(tokens, range(4))
    reader.until_copying(first)
    second = reader.begin_retrieve(tokens, range(8, 12))
    reader.pool.cancel(second)
    assert reader.next_event(second) == PoolFailed(second, "cancelled", "", settled=True)
    gate.copies_frozen = False
    assert isinstance(reader.next_event(first), PoolDone)
    reader.pool.cancel(first)
    assert reader.find(tokens) == CHUNK
    assert reader.untouched(range(8, 12))


def test_bad_arguments_are_refused_by_name(engines: tuple[Engine, Engine]) -> None:
    _, reader = engines
    tokens = prompt(CHUNK)
    for skip, blocks, said in [
        (3, [1], "skip_tokens must be whole blocks of 16"),
        (0, [], "local_blocks"),
        (0, range(5), "local_blocks"),
        (0, [64], r"\[0, 64\)"),
    ]:
        with pytest.raises(ValueError, match=said):
            reader.begin_retrieve(tokens, blocks, skip=skip)
    with pytest.raises(ValueError, match=r"\[0, 64\)"):
        reader.begin_store(tokens, [0, 1, 2, -1])
    with pytest.raises(ValueError, match="set it to 16"):
        Engine(LocalPoolServer(), config=PoolConfig(chunk_tokens=24), connect=False)


def test_everything_is_counted(engines: tuple[Engine, Engine]) -> None:
    writer, reader = engines
    tokens = prompt(CHUNK)
    writer.keep(tokens, range(4))
    reader.retrieve(tokens, range(4))
    reader.retrieve(prompt(CHUNK), range(4))
    for outcome in ("done", "miss"):
        assert reader.counted("requests_total", operation="retrieve", outcome=outcome) == 1
    assert writer.counted("requests_total", operation="store", outcome="done") == 1
    assert reader.counted("bytes_total", operation="retrieve") == 4 * reader.blocks[0].nbytes
    assert reader.counted("seconds_count", operation="retrieve") == 2
    assert reader.counted("breaker_open") == 0


def test_close_ends_everything(server: Server) -> None:
    before = threading.active_count()
    engine = Engine(server)
    tokens = prompt(CHUNK)
    engine.keep(tokens, range(4))
    engine.close()
    engine.close()
    assert not engine.pool.available
    assert engine.begin_store(tokens, range(4)) is None
    op_id = engine.begin_retrieve(tokens, range(4))
    assert engine.pool.poll() == [PoolFailed(op_id, "closed", "", settled=True)]
    until(lambda: len(threading.enumerate()) <= before)


# -- faults of the in-process twin


@pytest.fixture
def twin() -> Iterator[tuple[LocalPoolServer, Engine]]:
    server = LocalPoolServer()
    engine = Engine(server)
    yield server, engine
    server.faults.frozen = server.faults.copies_frozen = False
    engine.close()


def open_breaker(engine: Engine, tokens: list[int]) -> None:
    """Three errors in a row from a server that does not answer an impatient engine; each settles at
    once."""
    for _ in range(3):
        event = engine.retrieve(tokens, range(40, 44))
        assert isinstance(event, PoolFailed) and (event.reason, event.settled) == ("timeout", True)
    until(lambda: not engine.pool.available)


def stays_closed_to_all(engine: Engine) -> None:
    """The probe of a server that does not answer fails as well."""
    stays(lambda: not engine.pool.available, CONFIG.breaker_s + IMPATIENT_MS / 1000 + 0.2)


def test_the_breaker_opens_probes_and_closes(twin: tuple[LocalPoolServer, Engine]) -> None:
    server, engine = twin
    tokens = prompt(CHUNK)
    engine.keep(tokens, range(4))
    server.faults.frozen = True
    with engine.impatient():
        open_breaker(engine, tokens)
        assert engine.counted("breaker_open") == 1
        event = engine.retrieve(tokens, range(4))
        assert isinstance(event, PoolFailed) and (event.reason, event.settled) == (
            "breaker-open",
            True,
        )
        assert (
            engine.counted("requests_total", operation="retrieve", outcome="breaker-open") == 1
        ), "nobody was asked"
        assert engine.begin_store(tokens, range(4)) is None
        stays_closed_to_all(engine)
    server.faults.frozen = False
    engine.wait_available()
    assert engine.counted("breaker_open") == 0
    assert engine.find(tokens) == CHUNK


def test_an_answer_in_between_keeps_the_breaker_closed(
    twin: tuple[LocalPoolServer, Engine],
) -> None:
    server, engine = twin
    tokens = prompt(CHUNK)
    engine.keep(tokens, range(4))
    for _ in range(2):
        server.faults.frozen = True
        with engine.impatient():
            for _ in range(2):
                assert engine.find(tokens) == 0
        server.faults.frozen = False
        until(lambda: engine.find(tokens) == CHUNK)
    assert engine.pool.available


def test_wrong_rows_are_taken_for_missing(twin: tuple[LocalPoolServer, Engine]) -> None:
    server, engine = twin
    tokens = prompt(CHUNK)
    engine.keep(tokens, range(4))
    server.faults.wrong = True
    for _ in range(5):
        event = engine.retrieve(tokens, range(10, 14))
        assert isinstance(event, PoolFailed) and (event.reason, event.settled) == ("miss", True)
    assert engine.untouched(range(10, 14))
    assert engine.counted("requests_total", operation="retrieve", outcome="wrong-content") == 5
    assert engine.pool.available, "one bad chunk must not close the pool to all"
    server.faults.wrong = False
    assert isinstance(engine.retrieve(tokens, range(10, 14)), PoolDone)


def test_a_slot_that_changes_under_the_copy_is_noticed(
    twin: tuple[LocalPoolServer, Engine],
) -> None:
    server, engine = twin
    tokens = prompt(CHUNK)
    engine.keep(tokens, range(4))
    gate = engine.gated_copies()
    real = engine.pool.copier._copy

    def copy_and_overwrite(*args: object, **kwargs: object) -> None:
        real(*args, **kwargs)
        next(iter(server.chunks.values())).zero_()

    engine.pool.copier._copy = copy_and_overwrite
    event = engine.retrieve(tokens, range(10, 14))
    assert isinstance(event, PoolFailed) and event.reason == "miss"
    assert not gate.copies_frozen


def test_a_slow_and_a_dead_server(twin: tuple[LocalPoolServer, Engine]) -> None:
    server, engine = twin
    tokens = prompt(CHUNK)
    server.faults.delay_s = 0.1
    engine.keep(tokens, range(4))
    assert engine.find(tokens) == CHUNK
    server.faults.frozen = True
    op_id = engine.begin_retrieve(tokens, range(4))
    server.die()
    event = engine.next_event(op_id)
    assert isinstance(event, PoolFailed) and (event.reason, event.settled) == (
        "not-connected",
        True,
    )
    assert not engine.pool.available
    server.faults.dead = server.faults.frozen = False
    assert engine.find(tokens) == 0


def test_an_error_of_our_own_is_a_miss(twin: tuple[LocalPoolServer, Engine]) -> None:
    server, engine = twin
    tokens = prompt(CHUNK)
    engine.keep(tokens, range(4))
    # too short, with its seal
    server.chunks = {seal: slot[-100:] for seal, slot in server.chunks.items()}
    event = engine.retrieve(tokens, range(4))
    assert isinstance(event, PoolFailed) and (event.reason, event.settled) == ("error", True)
    assert isinstance(engine.store(prompt(CHUNK), range(4)), PoolStored), "the lanes live on"


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_operations_and_faults(seed: int) -> None:
    """Every operation has one result and, if that was unsettled, one PoolSettled. Rows that arrive
    are bit-equal. Nothing is copied after an operation has settled. Blocks whose rows changed
    during a store are never served."""
    dice = random.Random(seed)
    config = CONFIG.model_copy(update={"request_deadline_ms": 30, "breaker_s": 0.05})
    server = LocalPoolServer()
    engine = Engine(server, config=config)
    engine.pool.copier = LocalBlockCopier(engine.memory, server.faults)
    prompts = [prompt(n * CHUNK) for n in (1, 2, 3)]
    prompts.append(prompt(4 * CHUNK, like=prompts[1]))
    free = [[*range(i, i + 4)] for i in range(0, 64, 4)]
    holding = {}
    results: dict[int, list] = {}

    def begin() -> None:
        tokens = dice.choice(prompts)
        kind = dice.choice(["retrieve", "store"])
        want = len(tokens) // CHUNK
        if len(free) >= want:
            blocks = [block for _ in range(want) for block in free.pop(dice.randrange(len(free)))]
            if kind == "retrieve":
                engine.blocks[blocks] = EMPTY
                op_id: int | None = engine.begin_retrieve(
                    tokens, blocks, deadline_s=dice.choice([0.02, 1.0])
                )
            else:
                engine.compute(tokens, blocks)
                op_id = engine.begin_store(tokens, blocks)
                if op_id is not None and dice.random() < 0.2:  # wrongly reused while it is stored
                    engine.generations[blocks] += 1
                    engine.blocks[blocks] = 0.5
            if op_id is None:
                give_back(blocks)
            else:
                results[op_id] = []
                holding[op_id] = (tokens, blocks)

    def give_back(blocks: list[int]) -> None:
        """The blocks are ours again; whoever still copied into them would be seen."""
        engine.blocks[blocks] = EMPTY
        free.extend(blocks[i : i + 4] for i in range(0, len(blocks), 4))

    def take(event: PoolEvent) -> None:
        results[event.op_id].append(event)
        tokens, blocks = holding.get(event.op_id, ([], []))
        if isinstance(event, PoolDone):
            assert engine.holds(tokens[: event.num_tokens], blocks[: event.num_tokens // SIZE])
        if not (isinstance(event, PoolFailed) and not event.settled) and event.op_id in holding:
            give_back(holding.pop(event.op_id)[1])

    def poll() -> bool:
        for event in engine.pool.poll():
            take(event)
        return True

    for _ in range(400):
        for free_blocks in free:
            assert engine.untouched(free_blocks)
        dice.choice(
            [
                begin,
                begin,
                lambda: engine.pool.cancel(dice.choice([*results, 0])),
                lambda: time.sleep(0.003),
            ]
        )()
        if dice.random() < 0.1:
            setattr(
                server.faults,
                dice.choice(["frozen", "dead", "wrong", "copies_frozen"]),
                dice.random() < 0.5,
            )
        poll()
    server.faults.__dict__.update(vars(PoolFaults()))
    until(lambda: poll() and all(results.values()) and not holding)
    poll()
    for events in results.values():
        unsettled = isinstance(events[0], PoolFailed) and not events[0].settled
        assert [type(e) for e in events[1:]] == [PoolSettled] * unsettled, events
    assert engine.pool.operations.num_stored_blocks == 0 and not engine.pool.operations.unsettled
    engine.close()


# -- a real LMCache server


def test_two_processes_share_chunks(real: Engine, real_server: PoolServer) -> None:
    tokens = prompt(2 * CHUNK)
    spawn = multiprocessing.get_context("spawn")
    args = (real_server.address, tokens, [9, 8, 7, 6, 5, 4, 3, 2])
    child = spawn.Process(target=keep_in_another_process, args=args)
    child.start()
    child.join(300.0)
    assert child.exitcode == 0
    assert isinstance(real.retrieve(tokens, range(20, 28)), PoolDone)
    assert real.holds(tokens, range(20, 28))


def test_a_frozen_server_costs_the_deadline_and_holds_no_block(
    real: Engine, real_server: PoolServer
) -> None:
    tokens = prompt(2 * CHUNK)
    unstored = prompt(CHUNK)
    real.keep(tokens, range(8))
    freeze(real_server.process.pid)
    try:
        with real.impatient():
            open_breaker(real, tokens)
            stays_closed_to_all(real)
    finally:
        os.kill(real_server.process.pid, signal.SIGCONT)
    real.wait_available()
    until(lambda: real.find(tokens) == 2 * CHUNK)
    assert real.untouched(range(40, 44)), "late answers copy nothing"
    assert isinstance(real.retrieve(tokens, range(20, 28)), PoolDone)
    assert real.holds(tokens, range(20, 28))
    assert isinstance(real.store(unstored, range(4)), PoolStored)
    tidy = dict.fromkeys(left_behind(real_server), 0)
    until(lambda: left_behind(real_server) == tidy)


def test_a_server_frozen_during_the_copies(real: Engine, real_server: PoolServer) -> None:
    """Its memory stays mapped: rows that were found are still read; what was copied out cannot be
    committed."""
    tokens = prompt(2 * CHUNK)
    other = prompt(CHUNK)
    real.keep(tokens, range(8))
    gate = real.gated_copies()
    gate.copies_frozen = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(real.pool._backend, "_patience_s", IMPATIENT_MS / 1000)  # of commits
        reads = real.begin_retrieve(tokens, range(20, 28))
        stores = real.begin_store(other, range(4))
        real.until_copying(reads, stores)
    freeze(real_server.process.pid)
    try:
        gate.copies_frozen = False
        assert isinstance(real.next_event(reads), PoolDone)
        assert real.holds(tokens, range(20, 28))
        event = real.next_event(stores)
        assert isinstance(event, PoolFailed) and (event.reason, event.settled) == ("timeout", True)
    finally:
        os.kill(real_server.process.pid, signal.SIGCONT)
    tidy = dict.fromkeys(left_behind(real_server), 0)
    until(lambda: left_behind(real_server) == tidy)


def test_a_chunk_without_its_seal_is_not_read(real: Engine) -> None:
    """LMCache commits chunks by itself when an instance with open reservations goes."""
    tokens = prompt(2 * CHUNK)
    real.keep(tokens[:CHUNK], range(4))
    prefix = real.pool._chunks.prefix(tokens, "")
    with real.pool._backend.writing(prefix, 0, 2, time.monotonic() + 60.0) as writing:
        assert list(writing.buffers) == [1]
        writing.commit()
    with real.pool._backend.reading(prefix, 0, time.monotonic() + 60.0) as buffers:
        assert len(buffers) == 2, "the server believes it"
    event = real.retrieve(tokens, range(20, 28))
    assert isinstance(event, PoolDone) and event.num_tokens == CHUNK
    assert real.untouched(range(24, 28))


def test_an_uncommitted_reservation_is_not_committed_by_our_leaving(
    real_server: PoolServer,
) -> None:
    tokens = prompt(CHUNK)
    leaver = Engine(real_server)
    stayer = Engine(real_server)
    leaver.compute(tokens, range(4))
    assert leaver.pool.store(1, tokens, "", range(4), lambda: False)
    assert isinstance(leaver.next_event(1), PoolFailed)
    leaver.close()
    assert stayer.find(tokens) == 0
    stayer.close()


def test_a_server_that_does_not_fit_is_named(
    real_server: PoolServer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(
        real_server, config=CONFIG.model_copy(update={"chunk_tokens": 2 * CHUNK}), connect=False
    )
    until(lambda: "pool.chunk_tokens" in caplog.text)
    assert f"has chunks of {CHUNK} tokens, pool.chunk_tokens is {2 * CHUNK}" in caplog.text
    assert engine.find(prompt(2 * CHUNK)) == 0
    assert not engine.pool.available
    engine.close()


def test_no_server_is_a_miss_at_once() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        engine = Engine(f"127.0.0.1:{closed.getsockname()[1]}", connect=False)
        assert engine.find(prompt(CHUNK)) == 0
        assert (
            engine.counted("requests_total", operation="retrieve", outcome="not-connected") == 1
        ), "nobody waited"
        assert engine.begin_store(prompt(CHUNK), range(4)) is None
        engine.close()


def test_a_killed_server_and_its_successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed during a retrieve and a store; another one starts at its place and finds the chunks on
    disk."""
    config = CONFIG.model_copy(update={"mode": "start", "disk_folder": str(tmp_path / "tier")})
    servers = [PoolServer(config)]
    try:
        servers[0].wait_ready()
        engine = Engine(servers[0])
        tokens = prompt(2 * CHUNK)
        other = prompt(CHUNK)
        engine.keep(tokens, range(8))
        until(lambda: len(list((tmp_path / "tier").rglob("*.data"))) >= 2)
        gate = engine.gated_copies()
        gate.copies_frozen = True
        reads = engine.begin_retrieve(tokens, range(20, 28))
        stores = engine.begin_store(other, range(4))
        assert reads is not None and stores is not None
        engine.until_copying(reads, stores)
        servers[0].process.kill()
        until(lambda: not engine.pool.available)
        gate.copies_frozen = False
        ends = {event.op_id: event for event in drain(engine, 2)}
        assert isinstance(ends[reads], PoolDone) and engine.holds(tokens, range(20, 28))
        assert ends[stores] == PoolFailed(
            stores, "not-connected", "the pool server is gone", settled=True
        )
        assert engine.find(tokens) == 0, "well before the deadline"
        servers[0].close()
        servers.append(PoolServer(config.model_copy(update={"address": servers[0].address})))
        servers[1].wait_ready()
        engine.wait_available()
        monkeypatch.setattr("pdserve.kvtransfer.pool.lmcache_talk.PREFETCH_MARGIN", 0.0)
        engine.find(tokens)  # gives up while the server loads, unless that took no time
        monkeypatch.undo()
        until(lambda: engine.find(tokens) == 2 * CHUNK)
        assert engine.find(other) == 0, "what was never committed"
        engine.blocks.fill_(EMPTY)
        assert isinstance(engine.retrieve(tokens, range(40, 48)), PoolDone)
        assert engine.holds(tokens, range(40, 48))
        tidy = dict.fromkeys(left_behind(servers[1]), 0)
        until(lambda: left_behind(servers[1]) == tidy)
        engine.close()
    finally:
        for server in servers:
            server.close()
    assert not any(psutil.pid_exists(server.process.pid) for server in servers)


def drain(engine: Engine, count: int, timeout_s: float = 60.0) -> list[PoolEvent]:
    events: list[PoolEvent] = []

    def enough() -> bool:
        events.extend(engine.pool.poll())
        return len(events) >= count

    until(enough, timeout_s)
    return events


def test_late_answers_go_on_being_paid_after_one_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that watches the connection survives an error, and knows what it knew."""
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)
    engine = Engine(LocalPoolServer())
    chunks = Chunks(engine.memory, 4, Shard())
    link = ServerConnection("127.0.0.1:1", chunks, torch.device("cpu"))
    paid = threading.Event()
    asked: list[str] = []

    class Debt:
        def __init__(self, name: str) -> None:
            self.name = name

        def pay(self, until: float = 0.0) -> bool:
            if threading.current_thread() is not link._thread:
                return False
            asked.append(self.name)
            if self.name == "broken":
                raise KeyError("by test")
            if len(asked) > 2:
                paid.set()
            return paid.is_set()

    for name in ("broken", "late"):
        debt: Any = Debt(name)
        link.owe(debt)
    assert paid.wait(5.0)
    link.close()
    engine.close()
    assert asked.count("broken") == 1 and asked[-1] == "late" and not link._thread.is_alive()


# -- the server process


def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(
        ValueError, match=r"pool\.l1_gib is 1e\+06, but /dev/shm has .* GiB free: lower it"
    ):
        PoolServer(PoolConfig(mode="start", l1_gib=1e6))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=r"cannot be served here .* or another address"):
            PoolServer(PoolConfig(mode="start", address=address, l1_gib=0.1))
    server = PoolServer(PoolConfig(mode="start", l1_gib=0.1, start_deadline_s=0.2))
    with pytest.raises(
        RuntimeError, match=r"was not ready after 0\.2 s; raise pool\.start_deadline_s"
    ):
        server.wait_ready()
    assert not server.alive
    server = PoolServer(PoolConfig(mode="start", l1_gib=0.1))
    server.process.kill()
    with pytest.raises(RuntimeError, match="ended with -9"):
        server.wait_ready()


def test_a_server_ends_with_its_parent() -> None:
    code = (
        "from pdserve.configs.transfer import PoolConfig\n"
        "from pdserve.kvtransfer.pool.lmcache_server import PoolServer\n"
        "s = PoolServer(PoolConfig(mode='start', l1_gib=0.1, start_deadline_s=300)); "
        "s.wait_ready()\n"
        "print(s.process.pid, s._memory, flush=True)\n"
        "import time; time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, memory = parent.stdout.readline().split()
    assert Path(memory).exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not psutil.pid_exists(int(pid)))
    assert not Path(memory).exists(), "its shared memory stays"


# -- small parts


def test_breaker_states() -> None:
    breaker = Breaker(5.0)
    assert [breaker.failed(0.0), breaker.failed(0.0)] == [False, False]
    breaker.succeeded()
    assert [breaker.failed(1.0), breaker.failed(1.0), breaker.failed(1.0)] == [False, False, True]
    assert (breaker.is_open, breaker.probe_at) == (True, 6.0)
    breaker.succeeded()
    assert breaker.is_open, "an answer to an older request is no probe"
    breaker.begin_probe()
    breaker.probed(False, 7.0)
    assert (breaker.is_open, breaker.probe_at) == (True, 12.0)
    breaker.probed(True, 12.0)
    assert not breaker.is_open
    assert [breaker.failed(13.0), breaker.failed(13.0)] == [False, False]


def test_seals_depend_on_everything() -> None:
    engine = Engine(LocalPoolServer())
    memory = engine.memory
    tokens = prompt(3 * CHUNK)

    def seals(chunks: Chunks, ids: list[int] = tokens, salt: str = "a") -> tuple[bytes, ...]:
        return chunks.prefix(ids, salt).seals

    plain = Chunks(memory, 4, Shard())
    assert seals(plain) == seals(Chunks(memory, 4, Shard()))
    assert len(set(seals(plain))) == 3
    changed = [*tokens[: 2 * CHUNK], tokens[2 * CHUNK] + 1, *tokens[2 * CHUNK + 1 :]]
    assert seals(plain, changed)[:2] == seals(plain)[:2]
    others = [
        seals(plain, changed)[2],
        seals(plain, salt="b")[2],
        seals(Chunks(memory, 4, Shard(2, 0)))[2],
        seals(Chunks(memory, 4, Shard(2, 1)))[2],
        seals(Chunks(memory, 12, Shard()))[0],
    ]
    assert len({seals(plain)[2], *others}) == 6
    assert plain.model_name != Chunks(memory, 2, Shard()).model_name
    engine.close()


def test_stages_do_not_take_each_others_chunks() -> None:
    """Those of one size and number, of engines whose layers are parted otherwise."""
    names = set()
    for layers, heads in (((0, 1), (0, 1)), ((2, 3), (0, 1)), ((0, 1, 2, 3), (0,))):
        layout = KVLayout(
            groups=(LayerGroup(layers=layers, heads=heads, row_width=8),), block_size=16
        )
        kv_cache = KVCache(torch.zeros(2, layout.block_bytes, dtype=torch.uint8), layout)
        memory = KVCacheMemory(kv_cache, None, "model", "rows")
        chunks = Chunks(memory, 2, Shard(2, 0))
        assert chunks.num_bytes == 2 * 16 * 256 + SEAL_BYTES
        names.add(chunks.model_name)
    assert len(names) == 3


def test_runs_of_neighbours() -> None:
    assert list(runs([5, 6, 7, 2, 1, 0, 9])) == [(5, 3), (2, 1), (1, 1), (0, 1), (9, 1)]
    assert list(runs([])) == []


def test_generations_are_compared_with_those_of_then() -> None:
    generations = torch.arange(10).numpy()
    still = unchanged(generations, [2, 3])
    generations[4] += 1
    assert still()
    generations[3] += 1
    assert not still()


SERVER_THAT_MAKES_ITS_MEMORY_LATE = """
import os, signal, sys, time
from pathlib import Path
ended = []
signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
print("starts", flush=True)
while not ended:
    time.sleep(0.01)
Path(os.environ["MEMORY"]).touch()
time.sleep(0.5)
"""


@pytest.mark.processes
def test_a_server_whose_parent_dies_leaves_no_memory_that_it_makes_afterwards(
    tmp_path: Path,
) -> None:
    package = tmp_path / "lmcache" / "cli"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "main.py").write_text(SERVER_THAT_MAKES_ITS_MEMORY_LATE)
    memory = tmp_path / "memory"
    memory.touch()
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    with subprocess.Popen(
        [sys.executable, "-m", "pdserve.kvtransfer.pool.lmcache_server", str(memory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": paths, "MEMORY": str(memory)},
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"starts\n" and memory.exists()
        process.stdin.close()
        assert process.wait(10) == 0
    assert not memory.exists()


def tells(server: PoolServer) -> bool:
    try:
        server.evicted_chunks()
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_a_full_server_says_how_many_chunks_it_has_evicted() -> None:
    server = PoolServer(CONFIG.model_copy(update={"mode": "start", "l1_gib": 0.002}))
    try:
        server.wait_ready()
        until(lambda: tells(server))  # its pages come after the port of the engines
        assert server.evicted_chunks() == 0
        engine = Engine(server)
        first = prompt(CHUNK)
        engine.keep(first, range(4))
        num_chunks = math.ceil(0.002 * 2**30 / (4 * LAYOUT.block_bytes)) + 8
        for _ in range(num_chunks):
            engine.keep(prompt(CHUNK), range(4))
        until(lambda: server.evicted_chunks() > 0)
        assert server.evicted_chunks() < num_chunks
        assert engine.find(first) == 0, "the oldest goes first"
        engine.close()
    finally:
        server.close()
    with pytest.raises(OSError, match="refused"):
        server.evicted_chunks()
