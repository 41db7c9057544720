"""A worker reports chunks of its KV pool that it stored, read and missed, and a router looks
prompts up.
"""

from pathlib import Path

import pytest
from support.local_pool_backend import LocalPoolServer
from support.pair import ROUTER, SESSION, Pair, Worker, prompt_of
from worker.test_pool_phase import CHUNK, POOL, whole

from pdserve.protocol.block_digests import Tenant
from pdserve.protocol.commands import Subscribe
from pdserve.protocol.events import Hello, PoolChange
from pdserve.router.fleet.prefix_index import PooledChunks, PromptBlocks
from pdserve.worker import pool_report
from pdserve.worker.pool_report import PoolReport


def told(worker: Worker, target: str | None = None) -> PooledChunks:
    """Returns what a router on this stream (None: on all) has heard of the pool."""
    pooled = PooledChunks()
    for event in worker.events if target is None else worker.by_session[target]:
        if isinstance(event, PoolChange):
            pooled.changed(event)
    return pooled


def found(pooled: PooledChunks, worker: Worker, tokens: list[int], salt: str = "") -> int:
    hello = next(event for event in worker.events if isinstance(event, Hello))
    assert hello.kv_pool and hello.pool_chunk == CHUNK
    prompt = PromptBlocks(tokens, Tenant(salt))
    return prompt.num_pooled_tokens(pooled, hello.rows_digest, hello.block_size, hello.pool_chunk)


def test_what_was_stored_is_told_and_to_new_routers_too(tiny_llama: Path) -> None:
    server = LocalPoolServer()
    pair = Pair(tiny_llama, shared=server, pool=POOL)
    prompt = prompt_of(3 * CHUNK + 5)
    whole(pair, prompt, cache_salt="tenant")
    pair.until(lambda: found(told(pair.d), pair.d, prompt, "tenant") == 3 * CHUNK)
    assert found(told(pair.d), pair.d, prompt) == 0, "another tenant's"
    assert found(told(pair.d), pair.d, prompt[: 2 * CHUNK], "tenant") == CHUNK, (
        "the last token is always computed"
    )
    assert found(told(pair.d), pair.d, [9, *prompt], "tenant") == 0
    pair.d.command(Subscribe(router_id=ROUTER, session=SESSION + 1))
    pair.turn()
    assert found(told(pair.d, f"{ROUTER}/{SESSION + 1}"), pair.d, prompt, "tenant") == 3 * CHUNK
    pair.close()


def test_what_was_read_and_what_was_gone(tiny_llama: Path) -> None:
    """A worker that has stored nothing itself tells what it found, and from where on it found
    nothing."""
    server = LocalPoolServer()
    first = Pair(tiny_llama, shared=server, pool=POOL)
    prompt = prompt_of(3 * CHUNK + 5)
    whole(first, prompt)
    first.until(lambda: found(told(first.d), first.d, prompt) == 3 * CHUNK)
    second = Pair(tiny_llama, shared=server, pool=POOL)
    longer = prompt[: 2 * CHUNK] + prompt_of(2 * CHUNK, seed=5)
    whole(second, longer)
    second.until(lambda: found(told(second.d), second.d, [*longer, 0]) == 4 * CHUNK)  # stored
    assert found(told(second.d), second.d, prompt) == 2 * CHUNK
    server.chunks.clear()
    stores_nothing = POOL.model_copy(update={"max_store_fraction": 1e-6})
    third = Pair(tiny_llama, shared=server, pool=stores_nothing)
    whole(third, prompt)
    heard = told(first.d)

    def hear() -> bool:
        for event in third.d.events:
            if isinstance(event, PoolChange) and event.missed:
                heard.changed(event)
                return True
        return False

    third.until(hear)
    assert found(heard, first.d, prompt) == 0
    for pair in (first, second, third):
        pair.close()


def test_the_last_word_counts_and_the_list_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    report = PoolReport()
    names = [bytes([i]) * 16 for i in range(5)]
    assert report.changes() is None
    report.found(names[:2])
    report.missed(names[1:2])
    assert report.changes() == PoolChange(found=names[0][:8], missed=names[1][:8])
    assert report.changes() is None and report.everything().found == names[0][:8]
    report.found(names[:1])
    assert report.changes() is None, "nothing new"
    monkeypatch.setattr(pool_report, "MAX_KNOWN", 2)
    report.found(names[2:])
    assert report.everything().found == names[3][:8] + names[4][:8]
