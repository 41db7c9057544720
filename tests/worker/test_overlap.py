"""Prepared imports between two worker loops: rows move while P computes, and a hint that fails
costs nothing."""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.local_transfer import LocalTransferConfig
from support.pair import (
    ROUTER,
    SESSION,
    Pair,
    Worker,
    cancel,
    deltas,
    expected,
    of,
    owned,
    prompt_of,
    submit,
)
from support.waiting import until

from pdserve.engine.llm import LLM
from pdserve.engine.scheduling.step_plan import StepPlan
from pdserve.kvtransfer.p2p.letters import Follow, Notice, Part, Party
from pdserve.protocol.commands import ConnectPeer, Prepare, RouterLost, Start
from pdserve.protocol.events import Arrived, Delta, Handoff, PeerStatus
from pdserve.protocol.handoff import Source
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, seed=1)
SAMPLED = SamplingParams(
    temperature=1.0, max_tokens=10, seed=11, n=3, top_p=0.95, presence_penalty=0.3
)
CHUNK = 48  # tokens a step: prompts of more come in parts
_names = itertools.count()


@pytest.fixture
def pair(tiny_llama: Path) -> Iterator[Pair]:
    pair = Pair(tiny_llama, p={"max_num_batched_tokens": CHUNK})
    yield pair
    pair.close()


class Overlapped:
    """One request whose two legs are begun together, and driven turn by turn."""

    def __init__(
        self, pair: Pair, prompt: list[int], sampling: SamplingParams, prepare: bool = True
    ) -> None:
        self.pair = pair
        self.prompt = prompt
        self.sampling = sampling
        name = f"overlapped-{next(_names)}"
        self.p_key, self.d_key = (RequestKey(ROUTER, SESSION, name, attempt) for attempt in (1, 2))
        pair.p.command(submit(self.p_key, "prefill", prompt, sampling, overlap=True))
        if prepare:
            self.prepare()

    def prepare(self) -> None:
        meta = self.pair.p.sender.meta()
        source = Source(meta.engine_id, meta.incarnation, self.p_key)
        wanted = submit(self.d_key, "decode", self.prompt, self.sampling)
        self.pair.d.command(Prepare(submit=wanted, source=source))

    def until_a_part_arrives(self) -> None:
        """P stands still behind its first part: it still has work when D has read that."""
        self.pair.until(lambda: self.pair.p.sender.newest.get(self.p_key) is not None)
        self.pair.d.until(lambda: max_verified(self.pair) > 2)

    @property
    def num_published(self) -> int:
        """Blocks of the newest part."""
        ticket = self.pair.p.sender.newest[self.p_key]
        return 0 if ticket is None else len(ticket.block_ids)

    @property
    def handoff(self) -> Handoff | None:
        return next((e for e in of(self.pair.p, self.p_key) if isinstance(e, Handoff)), None)

    def hand_over(self) -> None:
        self.pair.until(lambda: self.handoff is not None)
        first = self.first()
        starts = tuple(Start(choice, tuple(tokens)) for choice, tokens in first.items())
        assert self.handoff is not None
        ticket = self.handoff.ticket
        self.pair.d.command(
            submit(self.d_key, "decode", self.prompt, self.sampling, starts=starts, ticket=ticket)
        )

    def first(self) -> dict[int, list[int]]:
        return {
            e.choice: list(e.token_ids) for e in of(self.pair.p, self.p_key) if isinstance(e, Delta)
        }

    def finish(self) -> dict[int, list[int]]:
        """Returns all tokens by choice, once they have come."""
        first = self.first()
        rest = self.pair.finish(self.d_key, len(first))
        return {choice: first[choice] + rest[choice] for choice in first}

    def run(self) -> dict[int, list[int]]:
        self.hand_over()
        return self.finish()

    @property
    def arrived(self) -> Arrived:
        [arrived] = [e for e in of(self.pair.d, self.d_key) if isinstance(e, Arrived)]
        return arrived


def reserved_blocks(pair: Pair) -> int:
    """Number of blocks that D's pulls are to fill."""
    pulls = pair.d.decode.pulls.under_way.values()
    return sum(len(pull.reservation.destination) for pull in pulls)


def announce(pair: Pair, name: str, prompt: list[int], worker: Worker | None = None) -> RequestKey:
    """A Prepare alone, of a prompt that P may never get; the key of its Submit."""
    meta = (worker or pair.p).sender.meta()
    p_key, d_key = (RequestKey(ROUTER, SESSION, name, attempt) for attempt in (1, 2))
    source = Source(meta.engine_id, meta.incarnation, p_key)
    pair.d.command(Prepare(submit=submit(d_key, "decode", prompt, GREEDY), source=source))
    return d_key


@pytest.mark.parametrize("length", [1, 16, 47, 48, 49, 96, 97, 160, 203])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_overlapped_equals_one_engine(
    pair: Pair, llm: LLM, length: int, sampling: SamplingParams
) -> None:
    request = Overlapped(pair, prompt_of(length), sampling)
    assert request.run() == expected(llm, request.prompt, sampling)
    assert request.arrived.source == "p2p"
    pair.assert_empty()


@pytest.mark.lengthy
@pytest.mark.parametrize("sizes", [(16, 64), (64, 16), (32, 16)], ids=str)
def test_overlapped_over_other_block_sizes_equals_one_engine(
    tiny_llama: Path, llm: LLM, sizes: tuple[int, int]
) -> None:
    """Parts end inside D's blocks, and D's cached prefixes inside P's."""
    ring = 8 * 64 * llm.engine.layout.token_bytes
    p = {"max_num_batched_tokens": CHUNK, "block_size": sizes[0]}
    pair = Pair(tiny_llama, p=p, d={"block_size": sizes[1]}, staging_bytes=ring)
    shared = prompt_of(120)
    for length, sampling in itertools.product((1, 49, 160, 203), (GREEDY, SAMPLED)):
        request = Overlapped(
            pair, shared[:length] + prompt_of(max(length - 120, 0), length), sampling
        )
        assert request.run() == expected(llm, request.prompt, sampling)
        assert request.arrived.source in ("p2p", "cache")
    early = [e.num_early_bytes for e in pair.d.events if isinstance(e, Arrived)]
    assert max(early) >= 64 * pair.d.engine.layout.token_bytes
    pair.assert_empty()
    pair.close()


def test_all_but_the_last_chunk_has_moved_when_the_prompt_is_computed(pair: Pair, llm: LLM) -> None:
    request = Overlapped(pair, prompt_of(200), GREEDY)
    request.until_a_part_arrives()
    while request.num_published < (200 - CHUNK) // 16:
        pair.p.loop.turn()
        pair.d.until(lambda: max_verified(pair) >= request.num_published)
    assert request.handoff is None, "P has not computed its last chunk"
    assert request.run() == expected(llm, request.prompt, GREEDY)
    block_bytes = pair.d.engine.layout.block_bytes
    assert request.arrived.num_early_bytes >= (200 - CHUNK) // 16 * block_bytes
    assert request.arrived.num_bytes == 13 * block_bytes


def test_rows_that_were_early_are_not_late_because_the_submit_is(pair: Pair) -> None:
    """The lag ends when the last byte was verified; its Submit waits for nothing."""
    began = time.monotonic()
    request = Overlapped(pair, prompt_of(100), GREEDY)
    pair.until(lambda: request.handoff is not None and max_verified(pair) == 7)
    early_s = time.monotonic() - began
    pair.turn_for(max(0.3, 2 * early_s))
    submitted = time.monotonic()
    request.run()
    arrived = request.arrived
    assert arrived.num_early_bytes == arrived.num_bytes == 7 * pair.d.engine.layout.block_bytes
    assert 0 < arrived.lag_s < early_s and arrived.wait_s == 0
    assert 0 < arrived.read_s < early_s, "reads, not the time between them"
    assert arrived.seconds < time.monotonic() - submitted


def test_the_last_chunk_is_the_short_one(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen by the parts: 200 tokens in steps of 48 would end with 8; the last is to be what is
    allowed."""
    scheduler = pair.p.engine.scheduler
    monkeypatch.setattr(scheduler, "last_chunk_tokens", 32)
    counts: list[int] = []
    schedule = scheduler.schedule

    def counting(may_preempt: bool = True) -> StepPlan:
        plan = schedule(may_preempt)
        counts.extend(chunk.num_rows for _, chunk in plan)
        return plan

    monkeypatch.setattr(scheduler, "schedule", counting)
    request = Overlapped(pair, prompt_of(203), GREEDY)
    request.hand_over()
    assert counts == [48, 48, 48, 32, 27]
    request.finish()
    pair.assert_empty()


def lose(pair: Pair, monkeypatch: pytest.MonkeyPatch, kinds: tuple[type, ...]) -> None:
    """Letters of these kinds never arrive."""
    for worker in (pair.p, pair.d):
        mailbox = worker.sender.mailbox
        send = mailbox.send

        def lossy(to: object, notice: Notice, send: Callable = send) -> None:
            if not isinstance(notice, kinds):
                send(to, notice)

        monkeypatch.setattr(mailbox, "send", lossy)


@pytest.mark.parametrize("kinds", [(Follow,), (Part,)])
def test_lost_letters_cost_only_the_overlap(
    pair: Pair, llm: LLM, kinds: tuple[type, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    lose(pair, monkeypatch, kinds)
    request = Overlapped(pair, prompt_of(150), GREEDY)
    assert request.run() == expected(llm, request.prompt, GREEDY)
    assert (request.arrived.source, request.arrived.num_early_bytes) == ("p2p", 0)
    pair.assert_empty()


def test_letters_twice_and_in_any_order(
    pair: Pair, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(3)
    kept: list[tuple[Party, Notice]] = []
    mailbox = pair.p.sender.mailbox
    send = mailbox.send

    def shuffled(to: Party, notice: Notice) -> None:
        kept.append((to, notice))
        for _ in range(rng.randrange(3)):
            send(*rng.choice(kept))

    monkeypatch.setattr(mailbox, "send", shuffled)
    for seed in range(6):
        request = Overlapped(pair, prompt_of(190, seed), GREEDY)
        assert request.run() == expected(llm, request.prompt, GREEDY)
    pair.assert_empty()


def test_a_prepare_that_comes_late_or_never(pair: Pair, llm: LLM) -> None:
    for turns in (None, 1, 3):
        request = Overlapped(pair, prompt_of(150, turns or 0), GREEDY, prepare=False)
        if turns is not None:
            for _ in range(turns):
                pair.turn()
            request.prepare()
        assert request.run() == expected(llm, request.prompt, GREEDY)
    pair.assert_empty()


def test_a_prepare_behind_its_submit_is_ignored(pair: Pair, llm: LLM) -> None:
    request = Overlapped(pair, prompt_of(100), GREEDY, prepare=False)
    request.hand_over()
    request.prepare()
    tokens = request.finish()
    assert tokens == expected(llm, request.prompt, GREEDY)
    request.prepare()  # and one of a request that is over: ended by the router's cancel
    pair.turn()
    cancel(pair.d, request.d_key)
    pair.assert_empty()


@pytest.mark.parametrize("turns", range(9))
def test_cancel_at_any_turn_leaves_nothing(pair: Pair, turns: int) -> None:
    request = Overlapped(pair, prompt_of(180), SAMPLED)
    for _ in range(turns):
        pair.turn()
    cancel(pair.d, request.d_key)
    cancel(pair.p, request.p_key)
    pair.assert_empty()
    assert not pair.d.decode.imports and not pair.p.sender.newest


@pytest.mark.parametrize("turns", [1, 3, 6])
def test_a_lost_router_leaves_nothing(pair: Pair, turns: int) -> None:
    Overlapped(pair, prompt_of(180), GREEDY)
    for _ in range(turns):
        pair.turn()
    for worker in (pair.p, pair.d):
        worker.command(RouterLost(router_id=ROUTER, session=SESSION))
    pair.assert_empty()
    assert not pair.d.decode.imports and not pair.p.sender.newest


def test_a_prompt_that_ends_at_p_is_forgotten_there(pair: Pair) -> None:
    request = Overlapped(pair, prompt_of(150), SamplingParams(temperature=0, max_tokens=1, seed=1))
    pair.until(lambda: bool(request.first()))
    assert request.handoff is None
    pair.until(lambda: not pair.p.sender.newest)
    cancel(pair.d, request.d_key)  # the router's, which has all tokens
    pair.assert_empty()


def test_p_dies_behind_the_first_part(pair: Pair, llm: LLM) -> None:
    """Everything that had come is kept: D computes only the rest, when the router sends it the
    whole request."""
    request = Overlapped(pair, prompt_of(180), GREEDY)
    decode = pair.d.decode
    engine = pair.d.engine
    request.until_a_part_arrives()
    pair.d.until(lambda: all(pull.pieces == type(pull.pieces)() for pull in links(pair)))
    pair.p.faults.dead = True
    pair.p.sender.publish_part(
        request.p_key,
        list(range(1, 9)),
        decode.imports[request.d_key].request.content_digest(engine.hasher),
    )
    pair.until(lambda: not decode.pulls.under_way)
    cancel(pair.d, request.d_key)
    key = RequestKey(ROUTER, SESSION, request.d_key.request_id, 3)
    pair.d.command(submit(key, "full", request.prompt, GREEDY))
    tokens = pair.finish(key)
    assert tokens == expected(llm, request.prompt, GREEDY)
    scored = next(e for e in of(pair.d, key) if hasattr(e, "cached_tokens"))
    assert scored.cached_tokens >= CHUNK


def all_links(pair: Pair) -> list:
    return pair.d.receiver.local_ranks[0].links


def links(pair: Pair) -> list:
    [link] = all_links(pair)
    return link.pulls.under_way


def max_verified(pair: Pair) -> int:
    """Blocks that have arrived, of the pull that has most."""
    return max(
        (pull.verified for link in all_links(pair) for pull in link.pulls.under_way), default=0
    )


def test_p_dies_between_ticket_and_last_part(pair: Pair, llm: LLM) -> None:
    request = Overlapped(pair, prompt_of(180), GREEDY)
    request.until_a_part_arrives()
    pair.p.faults.frozen = True
    pair.until(lambda: request.handoff is not None)
    pair.p.faults.dead = True
    assert request.run() == expected(llm, request.prompt, GREEDY)
    assert request.arrived.source == "recompute"


def test_p_is_preempted_behind_its_first_parts(tiny_llama: Path, llm: LLM) -> None:
    """Its blocks are reused by the one that pushed it out, and it computes everything again."""
    pair = Pair(
        tiny_llama,
        p={"max_num_batched_tokens": CHUNK, "num_kv_blocks": 16, "enable_prefix_caching": False},
    )
    request = Overlapped(pair, prompt_of(180), GREEDY)
    request.until_a_part_arrives()
    engine = pair.p.engine
    engine.scheduler.preempt(engine.scheduler.running[0], StepPlan())
    other = RequestKey(ROUTER, SESSION, "first-in-line", 1)
    pair.p.command(submit(other, "prefill", prompt_of(100, 1), GREEDY, priority=-1))
    pair.until(lambda: any(isinstance(e, Handoff) for e in of(pair.p, other)))
    assert request.handoff is None
    cancel(pair.p, other)
    assert request.run() == expected(llm, request.prompt, GREEDY)
    assert request.arrived.source == "p2p"
    pair.assert_empty()
    pair.close()


def test_prepared_blocks_go_to_running_sequences_first(tiny_llama: Path, llm: LLM) -> None:
    pair = Pair(
        tiny_llama,
        p={"max_num_batched_tokens": CHUNK},
        d={"num_kv_blocks": 28},
        max_reserved_fraction=1.0,
    )
    long = SamplingParams(temperature=0, max_tokens=210, seed=1)
    running = RequestKey(ROUTER, SESSION, "running", 1)
    pair.d.command(submit(running, "full", prompt_of(40, 5), long))
    pair.until(lambda: pair.d.engine.scheduler.running != [])
    request = Overlapped(pair, prompt_of(180), GREEDY)
    pair.until(lambda: bool(pair.d.decode.pulls.under_way))
    preemptions = pair.d.engine.scheduler.num_preemptions
    assert pair.finish(running) == expected(llm, prompt_of(40, 5), long)
    assert pair.d.engine.scheduler.num_preemptions == preemptions, "the hint gave way"
    assert request.run() == expected(llm, request.prompt, GREEDY)
    pair.assert_empty()
    pair.close()


def test_prepared_blocks_go_to_submitted_imports_first(tiny_llama: Path, llm: LLM) -> None:
    pair = Pair(
        tiny_llama,
        p={"max_num_batched_tokens": CHUNK},
        d={"num_kv_blocks": 28},
        max_reserved_fraction=1.0,
    )
    for index in range(3):
        announce(pair, f"never-{index}", prompt_of(70, 50 + index))
    pair.turn()
    assert reserved_blocks(pair) == 10, "hints have half of the budget"
    for seed in range(3):
        request = Overlapped(pair, prompt_of(200, seed), GREEDY, prepare=False)
        announce(pair, f"never-again-{seed}", prompt_of(70, 60 + seed))
        assert request.run() == expected(llm, request.prompt, GREEDY)
        assert request.arrived.source == "p2p"
    pair.lose_router()
    pair.assert_empty()
    pair.close()


def test_a_peer_whose_reads_do_not_end_is_left_alone(tiny_llama: Path, llm: LLM) -> None:
    pair = Pair(
        tiny_llama,
        p={"max_num_batched_tokens": CHUNK},
        pull_deadline_s=0.1,
        max_quarantined_fraction=0.05,
    )
    pair.p.faults.frozen = True
    reasons = []
    for seed in range(3):
        request = Overlapped(pair, prompt_of(120, seed), GREEDY, prepare=False)
        assert request.run() == expected(llm, request.prompt, GREEDY)
        reasons.append(request.arrived.reason)
    assert reasons == ["deadline", "quarantine-full", "quarantine-full"]
    assert 0 < pair.d.engine.blocks.num_quarantined <= 8
    pair.p.faults.frozen = False
    pair.until(lambda: pair.d.engine.blocks.num_quarantined == 0)
    pair.d.decode.deadline_s = 300.0
    request = Overlapped(pair, prompt_of(120, 9), GREEDY)
    assert request.run() == expected(llm, request.prompt, GREEDY)
    assert request.arrived.source == "p2p"
    pair.assert_empty()
    pair.close()


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("lengths", [(160, 160), (200, 150), (150, 200)])
def test_a_submit_of_another_prompt_than_was_prepared(
    tiny_llama: Path, llm: LLM, lengths: tuple[int, int], cached: bool
) -> None:
    """No row of one becomes the other's, neither joined nor cached."""
    pair = Pair(tiny_llama, p={"max_num_batched_tokens": CHUNK}, pull_deadline_s=0.5)
    prepared = prompt_of(lengths[0], 1)
    other = prompt_of(lengths[1], 2)
    warm = RequestKey(ROUTER, SESSION, "warm", 1)
    if cached:
        pair.d.command(submit(warm, "full", prepared[:100], GREEDY))
        pair.finish(warm)
    for drop in (False, True):
        request = Overlapped(pair, other, GREEDY, prepare=False)
        announce(pair, request.d_key.request_id, prepared)
        pair.turn()
        request.hand_over()
        if drop:
            cancel(pair.d, request.d_key)
            cancel(pair.p, request.p_key)
        else:
            assert request.finish() == expected(llm, other, GREEDY)
        pair.assert_empty()
    again = RequestKey(ROUTER, SESSION, "again", 1)
    pair.d.command(submit(again, "full", prepared, GREEDY))
    assert pair.finish(again) == expected(llm, prepared, GREEDY)
    pair.close()


@pytest.mark.parametrize("runs", [False, True])
def test_a_stream_of_hints_keeps_nobody_out(tiny_llama: Path, llm: LLM, runs: bool) -> None:
    pair = Pair(
        tiny_llama,
        p={"max_num_batched_tokens": CHUNK},
        d={"num_kv_blocks": 28},
        max_reserved_fraction=1.0,
    )
    names = itertools.count()
    running, whole = (RequestKey(ROUTER, SESSION, name, 1) for name in ("running", "whole"))
    if runs:
        pair.d.command(
            submit(
                running,
                "full",
                prompt_of(10),
                SamplingParams(temperature=0, max_tokens=200, seed=1),
            )
        )
        pair.until(lambda: bool(deltas(pair.d, running)))

    def turn() -> bool:
        while len(pair.d.decode._waiting) < 3:
            announce(pair, f"hint-{(name := next(names))}", prompt_of(100, name))
        return bool(deltas(pair.d, whole))

    pair.until(lambda: turn() or reserved_blocks(pair) > 0)
    pair.d.command(submit(whole, "full", prompt_of(350, 5), GREEDY))
    pair.until(turn)
    assert len(deltas(pair.d, running)) < 60
    assert len(pair.d.decode.imports) >= 3, "hints that wait go on waiting"
    pair.lose_router()
    pair.assert_empty()
    pair.close()


def test_the_hint_of_a_frozen_peer_holds_up_no_other(tiny_llama: Path) -> None:
    pair = Pair(
        tiny_llama,
        p={"max_num_batched_tokens": CHUNK},
        max_quarantined_fraction=0.02,
        pull_deadline_s=3.0,
    )
    second = Worker(
        tiny_llama, "second", "prefill", LocalTransferConfig(), device="cpu", num_kv_blocks=64
    )
    pair.d.command(ConnectPeer(meta=second.sender.meta()))
    pair.until(lambda: sum(isinstance(e, PeerStatus) and e.connected for e in pair.d.events) == 2)
    decode = pair.d.decode
    frozen = Overlapped(pair, prompt_of(180), GREEDY)
    frozen.until_a_part_arrives()
    pair.p.faults.frozen = True
    pair.until(lambda: frozen.handoff is not None)
    # a read that does not end ends the hint
    pair.until(lambda: pair.d.engine.blocks.num_quarantined > 0)
    assert pair.d.engine.blocks.num_quarantined > 2
    bad = announce(pair, "bad", prompt_of(100, 3))
    good = announce(pair, "good", prompt_of(100, 4), second)
    for _ in range(5):
        pair.turn()
    assert decode.imports[good].pull_id is not None and decode.imports[bad].pull_id is None
    pair.p.faults.frozen = False
    pair.lose_router()
    pair.assert_empty()
    pair.close()
    second.close()


def test_a_prepared_prompt_that_is_cached_needs_no_peer(pair: Pair, llm: LLM) -> None:
    prompt = prompt_of(160)
    warm = RequestKey(ROUTER, SESSION, "warm", 1)
    pair.d.command(submit(warm, "full", prompt, GREEDY))
    pair.finish(warm)
    request = Overlapped(pair, prompt, GREEDY)
    pair.until(lambda: request.handoff is not None)
    pair.p.faults.dead = True
    assert request.run() == expected(llm, prompt, GREEDY)
    assert request.arrived.source == "cache"


def test_a_hint_that_failed_unseen_costs_no_recompute(pair: Pair, llm: LLM) -> None:
    """The link has given it up, the loop has not heard of it yet, and the Submit comes."""
    request = Overlapped(pair, prompt_of(150), GREEDY)
    pair.until(lambda: request.handoff is not None)
    [pull_id] = pair.d.decode.pulls.under_way
    pair.d.receiver.cancel(pull_id)
    until(lambda: not links(pair))
    assert request.run() == expected(llm, request.prompt, GREEDY)
    assert request.arrived.source == "p2p"
    pair.assert_empty()


def test_parts_of_what_was_aborted_are_forgotten_without_a_step(pair: Pair) -> None:
    request = Overlapped(pair, prompt_of(180), GREEDY)
    pair.turn()
    assert pair.p.sender.newest
    cancel(pair.p, request.p_key, (0,))
    cancel(pair.d, request.d_key)
    pair.until(lambda: not pair.p.sender.newest)
    pair.assert_empty()


def test_many_at_once_over_small_pools(tiny_llama: Path, llm: LLM) -> None:
    """Some prepared, some cancelled half-way, all in one another's way: the others are right,
    nothing is left."""
    pair = Pair(
        tiny_llama,
        p={"max_num_batched_tokens": CHUNK, "num_kv_blocks": 40},
        d={"num_kv_blocks": 30},
    )
    rng = random.Random(7)
    for round_ in range(4):
        requests = [
            Overlapped(
                pair,
                prompt_of(rng.randrange(20, 200), 100 * round_ + i),
                GREEDY,
                prepare=rng.random() < 0.8,
            )
            for i in range(6)
        ]
        dropped = rng.choice(requests)
        for _ in range(rng.randrange(6)):
            pair.turn()
        cancel(pair.d, dropped.d_key)
        cancel(pair.p, dropped.p_key)
        for request in requests:
            if request is not dropped:
                request.hand_over()
        for request in requests:
            if request is not dropped:
                assert request.finish() == expected(llm, request.prompt, GREEDY)
        pair.assert_empty()
    assert owned(pair.p) == owned(pair.d) == 0
    pair.close()
