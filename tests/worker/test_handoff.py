"""The whole hand-off between two worker loops over the in-process connector, turn by turn."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.clock import Clock
from support.pair import (
    ROUTER,
    SESSION,
    Pair,
    cancel,
    deltas,
    expected,
    of,
    owned,
    prompt_of,
    submit,
    tokens_of,
)

from pdserve.engine.llm import LLM
from pdserve.protocol.commands import RouterLost, Start, Subscribe
from pdserve.protocol.events import Arrived, Failed, Handoff, Hello, PromptScored
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, seed=1)
SAMPLED = SamplingParams(
    temperature=1.0,
    max_tokens=20,
    seed=11,
    n=3,
    top_p=0.95,
    top_k=60,
    presence_penalty=0.3,
    repetition_penalty=1.1,
)


@pytest.fixture
def pair(tiny_llama: Path) -> Iterator[Pair]:
    pair = Pair(tiny_llama)
    yield pair
    pair.close()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 100, 203])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_split_equals_one_engine(
    pair: Pair, llm: LLM, length: int, sampling: SamplingParams
) -> None:
    prompt = prompt_of(length)
    assert pair.split(prompt, sampling) == expected(llm, prompt, sampling)
    pair.assert_empty()


@pytest.fixture
def unequal(tiny_llama: Path, llm: LLM, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """P and D of other block sizes; a ring with runs of 128 tokens."""
    p_size, d_size = request.param
    ring = 8 * 128 * llm.engine.layout.token_bytes
    pair = Pair(tiny_llama, p={"block_size": p_size}, d={"block_size": d_size}, staging_bytes=ring)
    yield pair
    pair.close()


SIZES = [
    (16, 64),
    (128, 32),
    *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ((64, 16), (32, 128))),
]


@pytest.mark.sampled(3)
@pytest.mark.lengthy
@pytest.mark.parametrize("unequal", SIZES, indirect=True, ids=str)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_split_over_other_block_sizes_equals_one_engine(
    unequal: Pair, llm: LLM, sampling: SamplingParams
) -> None:
    for length in (1, 16, 31, 64, 65, 100, 203, 400):
        prompt = prompt_of(length)
        assert unequal.split(prompt, sampling) == expected(llm, prompt, sampling)
    assert {e.source for e in unequal.d.events if isinstance(e, Arrived)} == {"p2p"}
    unequal.assert_empty()


@pytest.mark.lengthy
@pytest.mark.parametrize("unequal", SIZES, indirect=True, ids=str)
def test_a_cached_prefix_may_end_inside_a_block_of_p(unequal: Pair, llm: LLM) -> None:
    p_size, d_size = (worker.engine.config.block_size for worker in (unequal.p, unequal.d))
    token_bytes = unequal.d.engine.layout.token_bytes
    shared = prompt_of(170)
    for seed in (1, 2):
        prompt = shared + prompt_of(100, seed)
        assert unequal.split(prompt, GREEDY) == expected(llm, prompt, GREEDY)
    first, second = [e for e in unequal.d.events if isinstance(e, Arrived)]
    cached = 170 // d_size * d_size
    assert (first.source, second.source, second.cached_tokens) == ("p2p", "p2p", cached)
    assert first.num_bytes == -(-270 // p_size) * p_size * token_bytes
    assert second.num_bytes == (-(-270 // p_size) - cached // p_size) * p_size * token_bytes
    again = shared + prompt_of(100, 1)
    assert unequal.split(again, GREEDY) == expected(llm, again, GREEDY)
    unequal.assert_empty()


@pytest.mark.parametrize("unequal", SIZES[:2], indirect=True, ids=str)
def test_a_frozen_peer_of_another_block_size_costs_no_quarantine(unequal: Pair, llm: LLM) -> None:
    """Its bytes may land in the ring alone."""
    prompt = prompt_of(50)
    unequal.d.decode.deadline_s = 0.2
    handoff, first = unequal.prefill(prompt, GREEDY)
    unequal.p.faults.frozen = True
    key = unequal.decode(handoff, prompt, GREEDY, first)
    rest = unequal.finish(key)
    assert {0: first[0] + rest[0]} == expected(llm, prompt, GREEDY)
    assert unequal.d.engine.blocks.num_quarantined == 0
    unequal.p.faults.frozen = False
    unequal.assert_empty()


def test_kv_moved_and_is_reported(pair: Pair) -> None:
    prompt = prompt_of(100)
    began = time.time()
    handoff, first = pair.prefill(prompt, GREEDY)
    assert handoff is not None
    computed = time.time()
    assert began < handoff.ticket.written_at < computed
    time.sleep(0.05)
    pair.finish(pair.decode(handoff, prompt, GREEDY, first))
    taken = time.time() - handoff.ticket.written_at
    [arrived] = [e for e in pair.d.events if isinstance(e, Arrived)]
    assert arrived.source == "p2p"
    assert arrived.num_bytes == 7 * pair.d.engine.layout.block_bytes
    assert arrived.num_descriptors >= 1
    assert 0.05 < arrived.lag_s < taken, "from the write to the last byte, the pause included"
    assert 0 <= arrived.wait_s <= arrived.seconds < taken - 0.05
    assert 0 < arrived.read_s <= arrived.seconds - arrived.wait_s
    lag = next(
        f for f in pair.d.loop.snapshot().metrics if f.name == "pdserve_kv_transfer_lag_seconds"
    )
    totals = {sample.name: sample.value for sample in lag.samples if not sample.labels}
    assert totals == {f"{lag.name}_count": 1, f"{lag.name}_sum": pytest.approx(arrived.lag_s)}


def test_cached_blocks_are_not_moved(pair: Pair, llm: LLM) -> None:
    shared = prompt_of(64)
    pair.split(shared + prompt_of(20, 1), GREEDY)
    second = shared + prompt_of(20, 2)
    assert pair.split(second, GREEDY) == expected(llm, second, GREEDY)
    first_pull, second_pull = [e for e in pair.d.events if isinstance(e, Arrived)]
    block = pair.d.engine.layout.block_bytes
    assert (first_pull.num_bytes, second_pull.num_bytes) == (6 * block, 2 * block)
    assert second_pull.cached_tokens == 64


def test_fully_cached_prompt_moves_nothing(pair: Pair, llm: LLM) -> None:
    prompt = prompt_of(48)
    for _ in range(2):
        assert pair.split(prompt, GREEDY) == expected(llm, prompt, GREEDY)
    assert [e.source for e in pair.d.events if isinstance(e, Arrived)] == ["p2p", "cache"]
    pair.assert_empty()


def test_blocks_stay_pinned_until_d_is_done(pair: Pair) -> None:
    handoff, first = pair.prefill(prompt_of(40), GREEDY)
    pair.turn()
    assert owned(pair.p) == 3
    key = pair.decode(handoff, prompt_of(40), GREEDY, first)
    pair.finish(key)
    pair.assert_empty()


def test_choices_that_end_at_the_first_token_are_not_handed_over(pair: Pair) -> None:
    handoff, first = pair.prefill(
        prompt_of(20), SamplingParams(temperature=0, max_tokens=1, seed=0, n=2)
    )
    assert handoff is None and len(first) == 2
    pair.assert_empty()


def test_reused_blocks_are_noticed_and_recomputed(tiny_llama: Path, llm: LLM) -> None:
    pair = Pair(tiny_llama, p={"num_kv_blocks": 8})
    prompt = prompt_of(60)
    handoff, first = pair.prefill(prompt, GREEDY)
    assert handoff is not None
    cancel(pair.p, handoff.ticket.key)
    pair.prefill(prompt_of(100, 9), GREEDY)  # takes the freed blocks
    key = pair.decode(handoff, prompt, GREEDY, first)
    rest = pair.finish(key)
    assert {0: first[0] + rest[0]} == expected(llm, prompt, GREEDY)
    [arrived] = [e for e in of(pair.d, key) if isinstance(e, Arrived)]
    assert (arrived.source, arrived.reason) == ("recompute", "stale-generation")
    pair.close()


def test_ticket_for_another_prompt_is_refused(pair: Pair, llm: LLM) -> None:
    handoff, _ = pair.prefill(prompt_of(40, 1), GREEDY)
    other = prompt_of(40, 2)
    full = expected(llm, other, GREEDY)[0]
    key = pair.decode(handoff, other, GREEDY, {0: full[:1]})
    assert pair.finish(key)[0] == full[1:]
    [arrived] = [e for e in of(pair.d, key) if isinstance(e, Arrived)]
    assert arrived.reason == "ticket-for-other-content"
    pair.assert_empty()


def test_dead_peer_means_recompute(pair: Pair, llm: LLM) -> None:
    prompt = prompt_of(50)
    handoff, first = pair.prefill(prompt, GREEDY)
    pair.p.faults.dead = True
    key = pair.decode(handoff, prompt, GREEDY, first)
    rest = pair.finish(key)
    assert {0: first[0] + rest[0]} == expected(llm, prompt, GREEDY)
    arrived = next(e for e in of(pair.d, key) if isinstance(e, Arrived))
    assert (arrived.reason, arrived.lag_s, arrived.num_bytes) == (
        "peer-lost",
        0,
        0,
    ) and arrived.detail


def test_frozen_peer_means_recompute_on_other_blocks_and_quarantine(
    tiny_llama: Path, llm: LLM
) -> None:
    pair = Pair(tiny_llama, pull_deadline_s=0.2)
    prompt = prompt_of(50)
    handoff, first = pair.prefill(prompt, GREEDY)
    pair.p.faults.frozen = True
    key = pair.decode(handoff, prompt, GREEDY, first)
    rest = pair.finish(key)
    assert {0: first[0] + rest[0]} == expected(llm, prompt, GREEDY)
    [arrived] = [e for e in of(pair.d, key) if isinstance(e, Arrived)]
    assert arrived.reason == "deadline" and "no end after" in arrived.detail
    assert arrived.seconds - arrived.wait_s >= 0.2, "what the failed pull cost is told"
    assert pair.d.engine.blocks.num_quarantined == 4
    pair.d.loop.check_integrity()
    pair.p.faults.frozen = False
    pair.assert_empty()
    assert pair.d.engine.blocks.num_quarantined == 0
    pair.close()


def test_lease_ends_without_d(tiny_llama: Path) -> None:
    pair = Pair(tiny_llama, lease_s=0.2)
    pair.prefill(prompt_of(50), GREEDY)
    assert owned(pair.p) == 4
    pair.assert_empty()
    pair.close()


def test_pin_budget_revokes_the_oldest_ticket(tiny_llama: Path, llm: LLM) -> None:
    pair = Pair(tiny_llama, p={"num_kv_blocks": 21}, max_pinned_fraction=0.5)
    prompts = [prompt_of(64, seed) for seed in range(4)]
    handed = [pair.prefill(prompt, GREEDY) for prompt in prompts]
    assert pair.p.prefill.num_revoked == 2
    kept = {handoff.ticket.key for handoff, _ in handed[2:] if handoff}
    assert pair.p.prefill.keys() == kept
    for prompt, (handoff, first) in zip(prompts, handed, strict=True):
        rest = pair.finish(pair.decode(handoff, prompt, GREEDY, first))
        assert {0: first[0] + rest[0]} == expected(llm, prompt, GREEDY)
    pair.assert_empty()
    pair.close()


def test_leases_of_imports_that_wait_are_renewed_three_times_a_lease(
    clock: Clock, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    phase = pair.d.decode
    renewed = list[float]()
    handoff, _ = pair.prefill(prompt_of(40), GREEDY)
    assert handoff is not None
    item: Any = SimpleNamespace(ticket=handoff.ticket)
    monkeypatch.setattr(phase, "_imports", {handoff.ticket.key: item})
    monkeypatch.setattr(phase._receiver, "renew", lambda tickets: renewed.append(clock()))
    phase._renewed = began = clock()
    lease_s = handoff.ticket.lease_s
    while clock() < began + lease_s:
        clock.seconds += lease_s / 100
        phase._renew_leases()
    assert [round((at - began) / lease_s, 2) for at in renewed] == [0.34, 0.68]


def test_an_import_leaves_running_sequences_a_block_each_to_grow_into(pair: Pair) -> None:
    phase = pair.d.decode
    engine = pair.d.engine
    key = RequestKey(ROUTER, SESSION, "runs")
    sampling = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    pair.d.command(submit(key, "full", prompt_of(20), sampling))
    pair.until(lambda: deltas(pair.d, key))
    taken = engine.blocks.allocate(engine.blocks.num_free - 4)
    prompt = prompt_of(4 * engine.config.block_size, 1)
    asked = submit(RequestKey(ROUTER, SESSION, "asks"), "full", prompt, sampling)
    item: Any = SimpleNamespace(request=engine.make_request(asked), starts=())
    assert phase.pulls.reserve(item) is None
    engine.blocks.release(taken[:1])
    pair.until(lambda: engine.blocks.num_free >= 5)
    reservation = phase.pulls.reserve(item)
    assert reservation is not None and len(reservation.destination) == 4
    engine.cancel_reservation(reservation, settled=True)
    engine.blocks.release(taken[1:])


def test_tiny_decode_pool_makes_progress(tiny_llama: Path, llm: LLM) -> None:
    """More imports than blocks: reservations wait, running sequences preempt, all finish, right."""
    pair = Pair(tiny_llama, d={"num_kv_blocks": 14})
    sampling = SamplingParams(temperature=0, max_tokens=40, seed=1)
    prompts = [prompt_of(50 + 9 * i, i) for i in range(6)]
    handed = [pair.prefill(prompt, sampling) for prompt in prompts]
    keys = [pair.decode(h, p, sampling, f) for (h, f), p in zip(handed, prompts, strict=True)]
    for prompt, (_, first), key in zip(prompts, handed, keys, strict=True):
        rest = pair.finish(key)
        assert {0: first[0] + rest[0]} == expected(llm, prompt, sampling)
    arrivals = [e for e in pair.d.events if isinstance(e, Arrived)]
    assert all(e.wait_s <= e.seconds for e in arrivals)
    assert any(e.wait_s > 0.5 * e.seconds > 0 for e in arrivals[-3:]), (
        "they waited for blocks, not for bytes"
    )
    pair.assert_empty()
    pair.close()


def test_waiting_imports_get_blocks_by_priority(tiny_llama: Path) -> None:
    """The KV cache holds one prompt and what it generates; the urgent one is submitted last."""
    pair = Pair(tiny_llama, d={"num_kv_blocks": 9})
    params = SamplingParams(temperature=0, max_tokens=8, seed=1, ignore_eos=True)
    commands = []
    for seed, priority in enumerate((0, 0, -1)):
        prompt = prompt_of(100, seed)
        handoff, forced = pair.prefill(prompt, params)
        assert handoff is not None
        key = RequestKey(ROUTER, SESSION, handoff.request_id, 2)
        starts = (Start(0, tuple(forced[0])),)
        more = {"ticket": handoff.ticket, "starts": starts, "priority": priority}
        commands.append(submit(key, "decode", prompt, params, **more))
    for command in commands:
        pair.d.command(command)
    for command in commands:
        pair.finish(command.key)
    order = [event.request_id for event in pair.d.events if isinstance(event, Arrived)]
    assert order == [commands[number].key.request_id for number in (2, 0, 1)]
    pair.assert_empty()
    pair.close()


def test_imports_behind_a_more_urgent_one_are_given_up_in_time_too(
    clock: Clock, tiny_llama: Path
) -> None:
    """The KV cache is full; the urgent one is new, the other has waited for longer than a pull may
    take."""
    pair = Pair(tiny_llama, d={"num_kv_blocks": 9}, pull_deadline_s=10.0)
    params = SamplingParams(temperature=0, max_tokens=20, seed=1, ignore_eos=True)
    held = pair.d.engine.blocks.allocate(8)
    keys = []

    def arrivals() -> list[Arrived]:
        return [event for event in pair.d.events if isinstance(event, Arrived)]

    for seed, priority in enumerate((5, 0)):
        prompt = prompt_of(100, seed)
        handoff, forced = pair.prefill(prompt, params)
        assert handoff is not None
        keys.append(RequestKey(ROUTER, SESSION, handoff.request_id, 2))
        more = {
            "ticket": handoff.ticket,
            "starts": (Start(0, tuple(forced[0])),),
            "priority": priority,
        }
        pair.d.command(submit(keys[-1], "decode", prompt, params, **more))
        clock.seconds += 6
        pair.turn()
        assert bool(arrivals()) == bool(seed)
    assert [(e.request_id, e.source) for e in arrivals()] == [(keys[0].request_id, "recompute")]
    pair.d.engine.blocks.release(held)
    for key in keys:
        pair.finish(key)
    pair.assert_empty()
    pair.close()


def test_cancel_at_every_turn_leaves_nothing(tiny_llama: Path) -> None:
    pair = Pair(tiny_llama)
    prompt = prompt_of(60)
    for turns in range(12):
        p_key = RequestKey(ROUTER, SESSION, f"c{turns}", 1)
        pair.p.command(submit(p_key, "prefill", prompt_of(60, turns), SAMPLED))
        for _ in range(turns):
            pair.turn()
        cancel(pair.p, p_key)
        handoff, first = pair.prefill(prompt, GREEDY)
        assert handoff is not None
        d_key = pair.decode(handoff, prompt, GREEDY, first)
        for _ in range(turns):
            pair.turn()
        cancel(pair.d, d_key)
        cancel(pair.p, handoff.ticket.key)
        pair.assert_empty()
    pair.close()


def test_cancel_before_submit_is_a_tombstone(pair: Pair) -> None:
    key = RequestKey(ROUTER, SESSION, "early", 1)
    cancel(pair.p, key)
    pair.p.command(submit(key, "prefill", prompt_of(20), GREEDY))
    for _ in range(20):
        pair.turn()
    assert of(pair.p, key) == [] and owned(pair.p) == 0


def test_cancel_of_some_choices(pair: Pair, llm: LLM) -> None:
    prompt = prompt_of(30)
    key = RequestKey(ROUTER, SESSION, "some", 1)
    cancel(pair.d, key, (1,))  # one before the Submit, one while it runs
    pair.d.command(submit(key, "full", prompt, SAMPLED))
    pair.until(lambda: any(d.choice == 2 for d in deltas(pair.d, key)))
    cancel(pair.d, key, (2,))
    tokens = pair.finish(key)
    full = expected(llm, prompt, SAMPLED)
    assert tokens[0] == full[0] and 1 not in tokens
    assert len(tokens[2]) < len(full[2])
    pair.assert_empty()


def test_lost_router_frees_everything(pair: Pair) -> None:
    handoff, first = pair.prefill(prompt_of(60), GREEDY)
    pair.prefill(prompt_of(70), GREEDY)
    pair.decode(handoff, prompt_of(60), GREEDY, first)
    pair.d.command(submit(RequestKey(ROUTER, SESSION, "x", 1), "full", prompt_of(9), SAMPLED))
    pair.turn()
    pair.lose_router()
    pair.assert_empty()
    late = RequestKey(ROUTER, SESSION, "late", 1)
    pair.d.command(submit(late, "full", prompt_of(9), GREEDY))
    pair.turn()
    assert of(pair.d, late) == [] and owned(pair.d) == 0


def test_another_router_is_not_disturbed(pair: Pair, llm: LLM) -> None:
    pair.d.command(Subscribe(router_id="other", session=1))
    key = RequestKey("other", 1, "mine", 1)
    prompt = prompt_of(33)
    pair.d.command(submit(key, "full", prompt, GREEDY))
    pair.turn()
    pair.d.command(RouterLost(router_id=ROUTER, session=SESSION))
    assert pair.finish(key) == expected(llm, prompt, GREEDY)
    mine = pair.d.by_session["other/1"]
    assert isinstance(mine[0], Hello) and pair.d.by_session[f"{ROUTER}/{SESSION}"]
    assert not any(getattr(e, "request_id", "mine") != "mine" for e in mine)


@pytest.mark.parametrize(
    ("prompt", "sampling", "starts", "named"),
    [
        ([], GREEDY, (Start(0),), "prompt"),
        ([256], GREEDY, (Start(0),), "prompt"),
        ([1] * 600, GREEDY, (Start(0),), "prompt"),
        ([1], GREEDY, (), "starts"),
        ([1], GREEDY, (Start(0), Start(0)), "starts"),
        ([1], SamplingParams(stop_token_ids=[999], seed=0), (Start(0),), "stop_token_ids"),
        ([1], SamplingParams(max_tokens=1, seed=0), (Start(0, (5,)),), "forced"),
    ],
)
def test_what_can_never_run_is_refused_by_name(
    pair: Pair, prompt: list[int], sampling: SamplingParams, starts: tuple[Start, ...], named: str
) -> None:
    key = RequestKey(ROUTER, SESSION, "bad", 1)
    pair.d.command(submit(key, "full", prompt, sampling, starts=starts))
    pair.turn()
    [failed] = of(pair.d, key)
    assert isinstance(failed, Failed) and failed.kind == "invalid" and named in failed.message
    assert owned(pair.d) == 0


def test_resume_with_forced_tokens_gives_the_same_tokens(pair: Pair, llm: LLM) -> None:
    """A failover needs this: after any number of accepted tokens per choice, the rest is
    identical."""
    prompt = prompt_of(37)
    full = expected(llm, prompt, SAMPLED)
    forced = {0: full[0][:7], 1: full[1][:1], 2: full[2][:15]}
    key = pair.decode(None, prompt, SAMPLED, forced)
    rest = pair.finish(key, 3)
    assert {c: forced[c] + rest[c] for c in forced} == full
    assert {d.choice: d.position for d in reversed(deltas(pair.d, key))} == {0: 7, 1: 1, 2: 15}


def test_prompt_logprobs_come_from_p(pair: Pair, llm: LLM) -> None:
    prompt = prompt_of(45)
    sampling = SamplingParams(temperature=0, max_tokens=4, seed=0, prompt_logprobs=2)
    handoff, _ = pair.prefill(prompt, sampling)
    [scored] = [e for e in pair.p.events if isinstance(e, PromptScored)]
    [output] = llm.generate([prompt], sampling, use_tqdm=False)
    assert scored.logprobs is not None and list(scored.logprobs) == output.prompt_logprobs
    events = [type(e) for e in pair.p.events]
    assert events.index(PromptScored) < events.index(Handoff)
    assert handoff is not None
    assert tokens_of(pair.p, handoff.ticket.key)[0] == output.outputs[0].token_ids[:1]


@pytest.mark.parametrize("max_tokens", [None, 9])
def test_p_without_room_for_a_second_token_ends_nothing(
    tiny_llama: Path, llm: LLM, max_tokens: int | None
) -> None:
    """How long an answer may be is for D to say."""
    prompt = prompt_of(40)
    pair = Pair(tiny_llama, p={"max_model_len": 41}, d={"max_model_len": 60})
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=1)
    alone = SamplingParams(temperature=0, max_tokens=max_tokens or 20, ignore_eos=True, seed=1)
    assert pair.split(prompt, sampling) == expected(llm, prompt, alone)
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, seed=1)
    assert pair.prefill(prompt, one)[0] is None, "what was asked for still ends at P"
    pair.assert_empty()
    pair.close()
