"""From whom a prompt's beginning is fetched, when that pays, and which links are opened for it."""

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from router.fake_worker import FakeWorker
from router.harness import Harness, until
from router.workers import join, made, send_prompt

from pdserve.protocol.block_digests import NOBODY, BlockHasher
from pdserve.protocol.commands import ConnectPeer, PrefixHint, Submit
from pdserve.protocol.events import CacheChange, PeerStatus
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.choosing.holders import FETCH_MS
from pdserve.router.choosing.predict import Predictor
from pdserve.router.fleet.prefix_index import PromptBlocks
from pdserve.router.fleet.worker_state import WorkerState

PROMPT = tuple(range(400))
NOW = time.monotonic()
TOKEN_BYTES = 64  # of the workers made here
SPEED = 10_000.0
Make = Callable[..., Harness]


@pytest.fixture(autouse=True)
def fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWorker, "fetches_prefixes", True)


def seen(*workers: WorkerState, prompt: tuple[int, ...] = PROMPT) -> Predictor:
    return Predictor(workers, PromptBlocks(prompt, NOBODY), len(prompt), NOW)


def test_what_another_worker_holds_is_fetched_when_that_is_faster() -> None:
    holder, other = made("holder", holds=PROMPT[:320]), made("other")
    join(holder, other)
    predictor = seen(holder, other)
    fetch = predictor.prefix_fetch(other)
    assert fetch is not None and fetch.holder.worker is holder
    assert (fetch.num_tokens, fetch.num_new) == (320, 320)
    assert fetch.hint == PrefixHint("engine-holder", 1, 320)
    ms = FETCH_MS + 1000 * 320 * TOKEN_BYTES / 1e9
    assert fetch.ms == pytest.approx(ms)
    assert predictor.compute_ms(other) == pytest.approx(ms + 1000 * 80 / SPEED)
    assert predictor.computed_tokens(other) == 80
    assert predictor.prefix_fetch(holder) is None and predictor.computed_tokens(holder) == 80


def test_what_computes_faster_is_not_fetched() -> None:
    holder, other = made("holder", holds=PROMPT[:320]), made("other")
    join(holder, other, bytes_per_s=320 * TOKEN_BYTES / 0.0291)
    assert seen(holder, other).prefix_fetch(other) is None  # 29.1 + 3 ms; computing takes 32
    join(holder, other, bytes_per_s=320 * TOKEN_BYTES / 0.0289)
    assert seen(holder, other).prefix_fetch(other) is not None


def test_a_holder_that_lends_already_is_slower() -> None:
    """Each of what a router has fetched there takes its share of the rate."""
    holder, other, second = (
        made("holder", holds=PROMPT[:320]),
        made("other"),
        made("second", holds=PROMPT[:320]),
    )
    rate = 320 * TOKEN_BYTES / 0.01
    join(holder, other, bytes_per_s=rate)
    join(second, other, bytes_per_s=0.8 * rate)
    taken = []
    for _ in range(4):
        fetch = seen(holder, second, other).prefix_fetch(other)
        if fetch is None:
            taken.append("none")
            continue
        taken.append(fetch.holder.worker.worker_id)
        fetch.note_sent(NOW)
    assert taken == ["holder", "second", "holder", "second"] or taken == [
        "holder",
        "second",
        "holder",
        "none",
    ]


def test_the_longest_prefix_and_whole_blocks_of_both_sizes() -> None:
    short, long, other = (
        made("short", holds=PROMPT[:160]),
        made("long", holds=PROMPT[:336]),
        made("other", holds=PROMPT[:64]),
    )
    join(short, other)
    join(long, other)
    fetch = seen(short, long, other).prefix_fetch(other)
    assert fetch is not None and (fetch.num_tokens, fetch.num_new) == (336, 272)
    other.hello = msgspec.structs.replace(other.hello, block_size=64)
    fetch = seen(short, long, other).prefix_fetch(other)
    assert fetch is not None and fetch.num_tokens == 320


def test_the_last_token_is_computed() -> None:
    holder, other = made("holder", holds=PROMPT), made("other")
    join(holder, other)
    fetch = seen(holder, other, prompt=PROMPT[:320]).prefix_fetch(other)
    assert fetch is not None and fetch.num_tokens == 304


@pytest.mark.parametrize(
    ("side", "change"),
    [
        ("holder", {"fetches_prefixes": False}),
        ("other", {"fetches_prefixes": False}),
        ("holder", {"model_fingerprint": "other"}),
        ("other", {"rows_digest": "other"}),
    ],
)
def test_workers_that_cannot(side: str, change: dict[str, Any]) -> None:
    holder, other = made("holder", holds=PROMPT[:320]), made("other")
    join(holder, other)
    worker = holder if side == "holder" else other
    worker.hello = msgspec.structs.replace(worker.hello, **change)
    predictor = seen(holder, other)
    assert predictor.prefix_fetch(other) is None and predictor.wished_holder(other) is None


def test_who_leaves_lends_nothing() -> None:
    holder, other = made("holder", holds=PROMPT[:320]), made("other")
    join(holder, other)
    holder.left_at = NOW
    assert seen(holder, other).prefix_fetch(other) is None


def test_what_a_worker_was_only_sent_is_not_there_yet() -> None:
    sent, other = made("sent"), made("other")
    join(sent, other)
    prompt = PromptBlocks(PROMPT, NOBODY)
    send_prompt([sent, other], sent, prompt, "full")
    predictor = seen(sent, other)
    assert predictor.cached_tokens(sent) and predictor.prefix_fetch(other) is None
    digests: list[bytes] = []
    BlockHasher("model", 16).extend(digests, PROMPT[:320], NOBODY)
    stored = b"".join(digest[:8] for digest in digests)
    sent.cached.changed(CacheChange(number=1, stored=stored, dropped=b""))
    assert seen(sent, other).prefix_fetch(other) is not None


def test_who_would_fetch_is_connected() -> None:
    holder, other = made("holder", holds=PROMPT[:320]), made("other")
    predictor = seen(holder, other)
    assert predictor.prefix_fetch(other) is None and predictor.wished_holder(other) is holder
    join(holder, other)
    predictor = seen(holder, other)
    assert predictor.prefix_fetch(other) is not None and predictor.wished_holder(other) is None
    longer = made("longer", holds=PROMPT[:384])
    assert seen(holder, longer, other).wished_holder(other) is longer


GPU_TOKENS_PER_S, GPU_TOKEN_BYTES = 45_000.0, 131_072  # an H200, and Llama-8B


def on_gpus(*workers: WorkerState) -> None:
    for worker in workers:
        meta = worker.kv_cache
        assert meta is not None and worker.snapshot is not None
        rank = msgspec.structs.replace(meta.ranks[0], block_bytes=16 * GPU_TOKEN_BYTES)
        meta = msgspec.structs.replace(meta, ranks=(rank,))
        assert meta.token_bytes == GPU_TOKEN_BYTES
        worker.hello = msgspec.structs.replace(worker.hello, kv_cache=meta)
        worker.snapshot = msgspec.structs.replace(
            worker.snapshot, prefill_tokens_per_s=GPU_TOKENS_PER_S
        )


def test_between_gpus_a_link_is_hoped_to_be_fast() -> None:
    """At the rate of a slow network, no link between them would ever be opened."""
    holder, other = made("holder", holds=PROMPT[:320]), made("other")
    on_gpus(holder, other)
    assert seen(holder, other).wished_holder(other) is holder
    join(holder, other, bytes_per_s=295e9)
    assert seen(holder, other).prefix_fetch(other) is not None


def test_a_link_that_was_slow_is_not_wished_for_again() -> None:
    holder, other = made("holder", holds=PROMPT[:320]), made("other")
    on_gpus(holder, other)
    join(holder, other, bytes_per_s=1e9)
    assert seen(holder, other).prefix_fetch(other) is None
    assert holder.kv_cache is not None
    closed = PeerStatus(engine_id=holder.kv_cache.engine_id, incarnation=1, connected=False)
    other.met(closed)
    assert seen(holder, other).wished_holder(other) is None
    other.peers.clear()
    assert seen(holder, other).wished_holder(other) is holder


# --- through a router ---


def keys_of(prompt: tuple[int, ...]) -> bytes:
    digests: list[bytes] = []
    BlockHasher("model", 16).extend(digests, prompt, NOBODY)
    return b"".join(digest[:8] for digest in digests)


def submits(worker: FakeWorker) -> list[Submit]:
    return [command for command in worker.commands if isinstance(command, Submit)]


def connects(worker: FakeWorker) -> list[ConnectPeer]:
    return [command for command in worker.commands if isinstance(command, ConnectPeer)]


async def test_the_first_wish_computes_and_connects_the_second_fetches(make: Make) -> None:
    """Two decode workers, one of which leaves its queue to grow: the other gets the requests."""
    harness: Harness = make(0, 2)
    holder, other = harness.decodes
    prompts = [(start, *range(200)) for start in range(3)]
    holder.cache_keys = b"".join(map(keys_of, prompts))
    holder.queue_tokens = 100_000
    await harness.start()
    params = SamplingParams(seed=7, max_tokens=3, ignore_eos=True)
    await harness.collect(prompts[0], params)
    [first] = submits(other)
    assert first.prefix is None
    await until(lambda: connects(other))
    assert holder.meta is not None
    [command] = connects(other)
    assert command.for_prefixes and command.meta.engine_id == holder.meta.engine_id
    await until(lambda: any(w.peers for w in harness.fleet.workers))
    await harness.collect((*prompts[1], 1, 2), params)
    assert submits(other)[1].prefix == PrefixHint(holder.meta.engine_id, 1, 192)
    scored = SamplingParams(seed=7, max_tokens=3, prompt_logprobs=0)
    await harness.collect((*prompts[2], 5, 6), scored)
    assert submits(other)[2].prefix is None and len(connects(other)) == 1


async def test_a_link_for_prefixes_becomes_one_for_hand_overs(make: Make) -> None:
    harness: Harness = make(0, 2)
    await harness.start()
    one, two = harness.fleet.workers
    first, second = harness.decodes
    introducer = harness.fleet.introducer
    introducer.wish(two, one)
    await until(lambda: two.peers)
    introducer.introduce(harness.fleet.workers)
    assert [command.for_prefixes for command in connects(second)] == [True]
    assert one.snapshot is not None
    one.snapshot = msgspec.structs.replace(one.snapshot, role="prefill")
    introducer.changed()  # as whoever hears of the role says
    introducer.introduce(harness.fleet.workers)
    await until(lambda: len(connects(second)) == 2)
    introducer.introduce(harness.fleet.workers)
    introducer.wish(two, one)
    assert [command.for_prefixes for command in connects(second)] == [True, False]
    assert not connects(first)


async def test_workers_of_whole_requests_fetch_and_hand_nothing_over(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeWorker, "hands_over", False)
    harness: Harness = make(0, 0)
    holder, other = harness.add("w0", "both"), harness.add("w1", "both")
    prompts = [(start, *range(200)) for start in range(2)]
    holder.cache_keys = b"".join(map(keys_of, prompts))
    holder.queue_tokens = 100_000
    await harness.start()
    await until(lambda: len(harness.fleet.workers) == 2)
    params = SamplingParams(seed=7, max_tokens=3, ignore_eos=True)
    harness.fleet.introducer.introduce(harness.fleet.workers)
    assert not connects(other) and not connects(holder)
    await harness.collect(prompts[0], params)
    await until(lambda: any(w.peers for w in harness.fleet.workers))
    assert [command.for_prefixes for command in connects(other)] == [True]
    assert holder.meta is not None
    await harness.collect((*prompts[1], 1, 2), params)
    assert [submit.phase for submit in submits(other)] == ["full", "full"]
    assert submits(other)[1].prefix == PrefixHint(holder.meta.engine_id, 1, 192)
    assert not any(worker.can_prefill for worker in harness.fleet.workers)


async def test_a_decode_worker_that_hands_nothing_over_is_not_paired(make: Make) -> None:
    """Such workers are beside others while a cluster changes its mode."""
    harness: Harness = make(1, 1)
    whole = harness.add("w0", "both")
    whole.hands_over = False
    await harness.start()
    await until(lambda: len(harness.fleet.workers) == 3)
    await until(lambda: harness.connected_pairs() == {("d0", "p0")})
    harness.fleet.introducer.changed()
    harness.fleet.introducer.introduce(harness.fleet.workers)
    assert not connects(whole) and harness.connected_pairs() == {("d0", "p0")}
