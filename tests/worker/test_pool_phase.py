"""Workers over one KV pool: prefixes computed anywhere are found anywhere; a pool that misbehaves
costs a miss."""

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.local_pool_backend import LocalPoolServer
from support.pair import (
    ROUTER,
    SESSION,
    Pair,
    Worker,
    cancel,
    expected,
    of,
    owned,
    prompt_of,
    submit,
)
from support.pool_operations import copying, expire
from support.quantised import write_kv_scales

from pdserve.configs.transfer import PoolConfig
from pdserve.engine.llm import LLM
from pdserve.protocol.commands import RouterLost
from pdserve.protocol.events import Arrived, PromptScored
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=20, seed=1, ignore_eos=True)
CHUNK = 32
POOL = PoolConfig(
    mode="connect", address="127.0.0.1:1", chunk_tokens=CHUNK, request_deadline_ms=60_000
)
IMPATIENT = POOL.model_copy(update={"request_deadline_ms": 100, "breaker_s": 0.3})
_names = itertools.count()


@pytest.fixture
def server() -> LocalPoolServer:
    return LocalPoolServer()


@pytest.fixture
def pairs(
    tiny_llama: Path, server: LocalPoolServer, request: pytest.FixtureRequest
) -> Iterator[list[Pair]]:
    """Two pairs of P and D, each engine with blocks of its own. Parametrised by the pool as the
    second one knows it."""
    made = [
        Pair(tiny_llama, shared=server, pool=pool)
        for pool in (POOL, getattr(request, "param", POOL))
    ]
    yield made
    server.faults.copies_frozen = server.faults.frozen = False
    for pair in made:
        pair.close()
    assert server.in_use == 0


def computed(worker: Worker) -> int:
    return worker.engine.stats.prompt_tokens


def stored(server: LocalPoolServer, pair: Pair, count: int) -> None:
    pair.until(lambda: len(server.chunks) >= count)
    pair.assert_empty()


def whole(
    pair: Pair, prompt: list[int], worker: Worker | None = None, **more: object
) -> RequestKey:
    key = RequestKey(ROUTER, SESSION, f"whole{next(_names)}", 1)
    (worker or pair.d).command(submit(key, "full", prompt, GREEDY, **more))
    return key


def test_turns_of_a_chat_on_other_engines(
    pairs: list[Pair], server: LocalPoolServer, llm: LLM
) -> None:
    """Each turn is the whole chat so far; P finds all of it but the new question, the answer that D
    wrote included."""
    chat = prompt_of(70)
    known = 0
    for turn in range(4):
        pair = pairs[turn % 2]
        before = computed(pair.p)
        answer = pair.split(chat, GREEDY)
        assert answer == expected(llm, chat, GREEDY)
        full_chunks = (len(chat) + len(answer[0]) - 1) // CHUNK
        stored(server, pair, full_chunks)
        if turn:
            assert computed(pair.p) - before <= len(chat) - known, (
                "only what no chunk held was computed"
            )
            assert any(isinstance(e, Arrived) and e.source == "pool" for e in pair.p.events)
        known = full_chunks * CHUNK
        chat = chat + answer[0] + prompt_of(25, turn)


def test_rows_in_fp8(tiny_llama: Path, server: LocalPoolServer, tmp_path: Path) -> None:
    """They are found by engines with rows of the same kind and scales, and by no others."""
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "scaled"))
    write_kv_scales(folder)
    fp8: dict[str, Any] = {"kv_cache_dtype": "fp8"}
    prompt = prompt_of(100)
    llm = LLM(str(folder), tokenizer=False, device="cpu", num_kv_blocks=64, **fp8)
    want = expected(llm, prompt, GREEDY)
    found = []
    plain: dict[str, Any] = {}
    engines = ((folder, fp8, 3), (folder, fp8, 3), (tiny_llama, fp8, 6), (folder, plain, 9))
    for model, engine, num_chunks in engines:
        pair = Pair(model, p=engine, d=engine, shared=server, pool=POOL)
        try:
            key = whole(pair, prompt)
            answer = pair.finish(key)
            [scored] = [e for e in of(pair.d, key) if isinstance(e, PromptScored)]
            found.append((scored.cached_tokens, answer == want))
            stored(server, pair, num_chunks)
        finally:
            pair.close()
    assert found[:2] == [(0, True), (96, True)]
    assert [cached for cached, _ in found[2:]] == [0, 0]


def test_cached_tokens_count_what_came_from_the_pool(
    pairs: list[Pair], server: LocalPoolServer, llm: LLM
) -> None:
    prompt = prompt_of(100)
    first, second = pairs
    first.finish(whole(first, prompt))
    stored(server, first, 3)
    key = whole(second, prompt)
    assert second.finish(key) == expected(llm, prompt, GREEDY)
    [scored] = [e for e in of(second.d, key) if isinstance(e, PromptScored)]
    assert scored.cached_tokens == 96
    [arrived] = [e for e in of(second.d, key) if isinstance(e, Arrived)]
    assert (arrived.source, arrived.cached_tokens) == ("pool", 96)
    assert arrived.num_bytes == 6 * second.d.engine.layout.block_bytes


def test_the_engine_own_cache_comes_first(pairs: list[Pair], server: LocalPoolServer) -> None:
    prompt = prompt_of(100)
    pair = pairs[0]
    pair.finish(whole(pair, prompt))
    stored(server, pair, 3)
    key = whole(pair, prompt + prompt_of(3, 1))
    pair.finish(key)
    assert not [e for e in of(pair.d, key) if isinstance(e, Arrived)], (
        "less than a chunk is missing: nobody asks"
    )


def test_an_engine_finds_again_what_it_had_to_evict(
    tiny_llama: Path, server: LocalPoolServer, llm: LLM
) -> None:
    pool = POOL.model_copy(update={"max_store_fraction": 1.0})
    pair = Pair(tiny_llama, shared=server, pool=pool, d={"num_kv_blocks": 12})
    prompts = [prompt_of(100, seed) for seed in range(3)]
    for _ in range(2):
        for prompt in prompts:
            key = whole(pair, prompt)
            assert pair.finish(key) == expected(llm, prompt, GREEDY)
            pair.assert_empty()
    assert len([e for e in pair.d.events if isinstance(e, Arrived) and e.source == "pool"]) == 3
    pair.close()


def test_when_p_is_gone_the_pool_has_its_rows(
    pairs: list[Pair], server: LocalPoolServer, llm: LLM
) -> None:
    """The rows come by p2p first, then from the pool, then by recompute."""
    pair = pairs[0]
    prompt = prompt_of(150)
    handoff, first = pair.prefill(prompt, GREEDY)
    pair.until(lambda: len(server.chunks) == 4)
    pair.p.faults.dead = True
    before = computed(pair.d)
    key = pair.decode(handoff, prompt, GREEDY, first)
    rest = pair.finish(key)
    assert {0: first[0] + rest[0]} == expected(llm, prompt, GREEDY)
    assert [(e.source, e.reason) for e in of(pair.d, key) if isinstance(e, Arrived)] == [
        ("recompute", "peer-lost"),
        ("pool", ""),
    ]
    assert computed(pair.d) - before == 150 - 128


def test_another_tenant_finds_nothing(pairs: list[Pair], server: LocalPoolServer) -> None:
    first, second = pairs
    prompt = prompt_of(100)
    first.finish(whole(first, prompt, cache_salt="a"))
    stored(server, first, 3)
    keys = [whole(second, prompt, cache_salt=salt) for salt in ("b", "", "a")]
    found = []
    for key in keys:
        second.finish(key)
        found.append(bool([e for e in of(second.d, key) if isinstance(e, Arrived)]))
    assert found == [False, False, True]


@pytest.mark.lengthy
@pytest.mark.parametrize("pairs", [IMPATIENT], indirect=True, ids=["impatient"])
@pytest.mark.parametrize("fault", ["dead", "frozen", "wrong", "slow"])
def test_a_pool_that_misbehaves_costs_a_miss(
    pairs: list[Pair], server: LocalPoolServer, llm: LLM, fault: str
) -> None:
    first, second = pairs
    prompt = prompt_of(100)
    first.finish(whole(first, prompt))
    stored(server, first, 3)
    if fault == "slow":
        server.faults.delay_s = 300.0
    else:
        setattr(server.faults, fault, True)
    for seed in range(5):
        asked = prompt if seed == 0 else prompt_of(100, 10 + seed)
        assert second.finish(whole(second, asked)) == expected(llm, asked, GREEDY)
    second.assert_empty()
    assert not any(isinstance(e, Arrived) and e.source == "pool" for e in second.d.events)
    server.faults.dead = server.faults.frozen = server.faults.wrong = False
    server.faults.delay_s = 0.0
    third = prompt_of(100, 99)
    first.until(
        lambda: all(pair.d.pool is not None and pair.d.pool.available for pair in (first, second))
    )
    assert first.finish(whole(first, third)) == expected(llm, third, GREEDY)
    first.assert_empty()


def test_blocks_wait_for_a_copy_that_does_not_end(
    pairs: list[Pair], server: LocalPoolServer, llm: LLM
) -> None:
    first, second = pairs
    prompt = prompt_of(100)
    first.finish(whole(first, prompt))
    stored(server, first, 3)
    server.faults.copies_frozen = True
    key = whole(second, prompt)
    pool = second.d.pool
    assert pool is not None
    second.until(lambda: copying(pool))
    told = second.d.loop.snapshot()
    assert told.num_waiting == 1 and told.queue_tokens == 4, "96 tokens may come from the pool"
    assert second.d.loop.pool is not None
    assert second.d.loop.pool.queued_work(0.01) == pytest.approx(4 + 0.01 * 4 * 98)
    expire(pool)
    assert second.finish(key, 1) == expected(llm, prompt, GREEDY), "computed on other blocks"
    assert second.d.engine.blocks.num_quarantined == 6
    second.d.loop.check_integrity()
    server.faults.copies_frozen = False
    second.assert_empty()


@pytest.mark.parametrize("turns", range(5))
def test_cancel_at_any_turn_leaves_nothing(
    pairs: list[Pair], server: LocalPoolServer, turns: int
) -> None:
    first, second = pairs
    prompt = prompt_of(100)
    first.finish(whole(first, prompt))
    stored(server, first, 3)
    server.faults.delay_s = 0.01
    keys = [whole(second, prompt), whole(second, prompt_of(90, 1))]
    for _ in range(turns):
        second.turn()
    cancel(second.d, keys[0])
    second.d.command(RouterLost(router_id=ROUTER, session=SESSION))
    second.assert_empty()
    phase = second.d.loop.pool
    assert phase is not None and not phase._retrievals and owned(second.d) == 0


def test_a_pool_that_is_full_of_other_things_is_no_burden(
    tiny_llama: Path, server: LocalPoolServer, llm: LLM
) -> None:
    """Stores may hold a share of the blocks only, and a tiny engine goes on beside them."""
    pool = IMPATIENT.model_copy(update={"max_store_fraction": 0.3})
    pair = Pair(tiny_llama, shared=server, pool=pool, d={"num_kv_blocks": 16})
    server.faults.frozen = True
    for seed in range(6):
        prompt = prompt_of(130, seed)
        assert pair.finish(whole(pair, prompt)) == expected(llm, prompt, GREEDY)
    server.faults.frozen = False
    pair.assert_empty()
    pair.close()
