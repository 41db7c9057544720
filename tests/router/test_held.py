"""Bytes held for clients who do not read have a limit over all of them; the client with the most is
cut off."""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from router.fake_worker import expected_tokens
from router.harness import MODEL, Harness, routed, settle, until
from router.test_app import Client
from router.turns import Turns

from pdserve.protocol.events import Delta, Handoff, LegTimes, PromptScored, TokenLogprob
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.errors import ApiError
from pdserve.router.fleet.inbox import JOINED_BYTES, UNJOINED, Inbox
from pdserve.router.fleet.worker_state import Leg
from pdserve.router.held_bytes import LET_GO_AT_ONCE, LOGPROB_BYTES, TOKEN_BYTES, Held, size_of
from pdserve.router.http.body_parsing import parse
from pdserve.router.http.openai.completions import SCORE_BYTES, CompletionResponder
from pdserve.router.http.openai.requests import CompletionRequest
from pdserve.text.choice import ChoiceText
from pdserve.text.tokenizer import Tokenizer

Make = Callable[..., Harness]
PROMPT = list(range(10, 30))
LONG = {"model": MODEL, "prompt": PROMPT, "seed": 1, "ignore_eos": True, "stream": True}


def leg(attempt: int, inbox: Inbox[Leg]) -> Leg:
    worker: Any = None
    return Leg(RequestKey("r", 1, "x", attempt), worker, inbox, 1, {0}, 0.0)


def delta(position: int, choice: int = 0, tokens: int = 1, **ends: Any) -> Delta:
    return Delta("x", 0, choice, position, tuple(range(position, position + tokens)), **ends)


def drained(inbox: Inbox[Leg]) -> list[Any]:
    items = []
    while inbox:
        items.append(inbox.pop()[1])
    inbox.done()
    return items


def test_the_one_that_holds_most_is_cut_off() -> None:
    cut: list[str] = []
    held = Held(1000, lambda count: cut.append("counted"))
    accounts = {name: held.account() for name in "abc"}
    for name, account in accounts.items():
        account.on_cut = lambda name=name: cut.append(name)  # type: ignore[misc]
    accounts["a"].add(300)
    accounts["b"].add(500)
    accounts["c"].add(200)
    assert not cut and held.num_bytes == 1000
    accounts["a"].add(1)
    assert cut == ["counted", "b"] and held.num_bytes == 501
    accounts["b"].add(400)
    assert held.num_bytes == 501, "what was cut off counts no more"
    accounts["c"].add(2000)
    assert cut[2:] == ["counted", "c"] and held.num_bytes == 301
    accounts["a"].close()
    accounts["a"].add(-5)
    assert held.num_bytes == 0


def test_who_reads_in_time_costs_nothing() -> None:
    held = Held(1, lambda count: pytest.fail("cut"))
    inbox: Inbox[Leg] = Inbox(held.account())
    one = leg(0, inbox)
    for position in range(1000):
        inbox.put(one, delta(position))
        assert drained(inbox) == [delta(position)] and held.num_bytes == 0


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_what_waits_is_joined_and_counted(with_logprobs: bool) -> None:
    def scores(position: int) -> tuple[TokenLogprob, ...] | None:
        return (TokenLogprob(position, -0.5, 1, ((1, 0.1), (2, 0.2))),) if with_logprobs else None

    held = Held(1 << 30, lambda count: pytest.fail("cut"))
    inbox: Inbox[Leg] = Inbox(held.account())
    one = leg(0, inbox)
    count = 3000
    for position in range(count):
        for choice in (0, 1):
            times = LegTimes(1, 2, 3, 4) if position == count - 1 else None
            reason: Any = "length" if times else None
            ends: dict[str, Any] = {
                "finish_reason": reason,
                "times": times,
                "logprobs": scores(position),
            }
            inbox.put(one, delta(position, choice, **ends))
    least = 2 * (count - UNJOINED) * (TOKEN_BYTES + (3 * LOGPROB_BYTES if with_logprobs else 0))
    assert least < held.num_bytes < 2 * least and len(inbox) < count / 8
    found = drained(inbox)
    assert held.num_bytes == 0
    for choice in (0, 1):
        own = [event for event in found if event.choice == choice]
        assert [token for event in own for token in event.token_ids] == list(range(count))
        position = 0
        for event in own:
            assert event.position == position
            position += len(event.token_ids)
            assert (
                (event.times is not None) == (event.finish_reason is not None) == (event is own[-1])
            )
            assert size_of(len(event.token_ids), event.logprobs) < JOINED_BYTES + 1000
        if with_logprobs:
            assert [each.token_id for event in own for each in event.logprobs] == list(range(count))


SCORES = tuple(
    TokenLogprob(5, -0.5, 1, tuple((token, -1.0) for token in range(20))) for _ in range(10)
)
SCORES_BYTES = 10 * 21 * LOGPROB_BYTES


def test_log_probabilities_count_from_the_first_event_until_their_reader_has_done() -> None:
    """Thousands of prompts may have a few events each, and each of these megabytes."""
    held = Held(1 << 30, lambda count: pytest.fail("cut"))
    inbox: Inbox[Leg] = Inbox(held.account())
    one = leg(0, inbox)
    inbox.put(one, delta(0, tokens=10, logprobs=SCORES))
    assert SCORES_BYTES < held.num_bytes < 1.2 * SCORES_BYTES
    before = held.num_bytes
    scored = routed(
        PromptScored(request_id="x", attempt=0, cached_tokens=0, logprobs=(None, *SCORES))
    )
    inbox.put(one, scored)
    assert 10 * 21 * 10 < scored.num_bytes < held.num_bytes - before < SCORES_BYTES / 5, (
        "packed, as it came"
    )
    inbox.pop()
    inbox.pop()
    assert held.num_bytes > before + scored.num_bytes, (
        "the reader has them now, and they are no less"
    )
    inbox.done()
    assert held.num_bytes == 0
    inbox.put(one, delta(10, tokens=10, logprobs=SCORES))
    inbox.pop()
    held_by_reader = inbox.pass_on()
    inbox.done()
    assert held_by_reader == held.num_bytes > SCORES_BYTES, "whoever has it takes it off"


def test_an_event_costs_the_same_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = 0

    def counting(*args: Any) -> int:
        nonlocal passed
        passed += 1
        return size_of(*args)

    monkeypatch.setattr("pdserve.router.fleet.inbox.size_of", counting)
    inbox: Inbox[Leg] = Inbox()
    count = 30_000
    one = leg(0, inbox)
    for position in range(count):
        inbox.put(one, delta(2 * position))  # none follows the one before
    assert len(inbox) == count and passed <= count


def test_only_what_follows_each_other_is_joined() -> None:
    inbox: Inbox[Leg] = Inbox()
    first = leg(0, inbox)
    second = leg(1, inbox)
    scored: Any = routed(PromptScored(request_id="x", attempt=0, cached_tokens=0))
    events: list[tuple[Leg, Any]] = [
        (first, delta(0)),
        (first, delta(1)),
        (second, delta(2)),
        (first, scored),
        (first, delta(2)),
        (first, delta(7)),
        (first, delta(8, finish_reason="stop")),
        (first, delta(9)),
    ]
    for number in range(UNJOINED):
        inbox.put(second, Handoff(request_id="x", attempt=1, ticket=number))  # type: ignore[arg-type]
    for item in events:
        inbox.put(*item)
    found = drained(inbox)[UNJOINED:]
    assert found == [
        delta(0, tokens=2),
        delta(2),
        scored,
        delta(2),
        Delta("x", 0, 0, 7, (7, 8), "stop"),
        delta(9),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_whenever_it_is_read_each_choice_has_its_events_in_order(seed: int) -> None:
    """And what is no token of a choice stays where it was among them."""
    chance = random.Random(seed)
    held = Held(1 << 30, lambda count: pytest.fail("cut"))
    inbox: Inbox[Leg] = Inbox(held.account())
    positions = [0, 0, 0]
    one = leg(0, inbox)
    found = list[Any]()
    expected: list[list[int]] = [[], [], []]
    for number in range(3000):
        choice = chance.randrange(3)
        size = chance.randint(1, 3)
        if chance.random() < 0.02:
            inbox.put(one, Handoff(request_id="x", attempt=0, ticket=number))  # type: ignore[arg-type]
            for each in expected:
                each.append(-number)
        else:
            inbox.put(one, delta(positions[choice], choice, size))
            expected[choice] += range(positions[choice], positions[choice] + size)
            positions[choice] += size
        for _ in range(
            chance.choice([0, 0, 0, 1, 200]) if chance.random() < 0.05 else chance.randint(0, 1)
        ):
            if inbox:
                found.append(inbox.pop()[1])
    found += drained(inbox)
    assert held.num_bytes == 0 and len(found) < 3000
    seen: list[list[int]] = [[], [], []]
    for event in found:
        for choice, tokens in enumerate(seen):
            if isinstance(event, Handoff):
                tokens.append(-event.ticket)  # type: ignore[operator]
            elif event.choice == choice:
                tokens += event.token_ids
    assert seen == expected


async def test_what_nobody_wants_is_freed_in_several_turns() -> None:
    inbox: Inbox[Leg] = Inbox()
    one = leg(0, inbox)
    for position in range(5 * LET_GO_AT_ONCE):
        inbox.put(one, delta(2 * position))
    items = inbox._items
    inbox.fail(ValueError("by test"))
    assert not inbox and len(items) == 4 * LET_GO_AT_ONCE
    await asyncio.sleep(0)
    assert len(items) == 3 * LET_GO_AT_ONCE
    await settle()
    assert not items


async def test_a_reader_who_comes_back_gets_a_little_in_each_turn(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 events in one turn were too many where each was made of hundreds."""
    harness = make(0, 1)
    harness.decodes[0].max_tokens = 20_000
    await harness.start()
    turns = Turns()
    push = ChoiceText.push

    def noting(text: ChoiceText, token_ids: Any, reason: Any) -> Any:
        for _ in token_ids:
            turns.note()
        return push(text, token_ids, reason)

    client = Client(harness, "/v1/completions", LONG | {"max_tokens": 10_000})
    await until(lambda: len(client.sent) > 3)
    client.taking.clear()
    await until(lambda: harness.world.held() == 0)
    monkeypatch.setattr(ChoiceText, "push", noting)
    client.taking.set()
    await asyncio.wait_for(client.call, 60)
    turns.close()
    assert (
        client.complete
        and sum(turns.counts) > 9000
        and max(turns.counts) <= 9 * JOINED_BYTES / TOKEN_BYTES
    )


async def test_slow_readers_get_the_same(make: Make) -> None:
    harness = make(1, 1)
    harness.prefills[0].max_tokens = harness.decodes[0].max_tokens = 5000
    await harness.start()
    client = Client(
        harness, "/v1/completions", LONG | {"max_tokens": 2000, "n": 2, "return_token_ids": True}
    )
    await until(lambda: len(client.sent) > 3)
    client.taking.clear()
    await until(lambda: harness.world.held() == 0)
    assert harness.service.held.num_bytes > 2 * 1000 * TOKEN_BYTES
    client.taking.set()
    await asyncio.wait_for(client.call, 60)
    assert client.complete and harness.service.held.num_bytes == 0
    events = [json_of(line) for line in b"".join(client.sent).split(b"\n\n")[:-2]]
    for index in (0, 1):
        sampling = SamplingParams(max_tokens=2000, seed=1, ignore_eos=True)
        tokens = [
            t
            for event in events
            for c in event["choices"]
            if c["index"] == index
            for t in c["token_ids"]
        ]
        assert tokens == expected_tokens(tuple(PROMPT), sampling, index)[0]


def json_of(line: bytes) -> Any:

    return json.loads(line.removeprefix(b"data: "))


def counted(harness: Harness) -> float | None:
    return harness.service.metrics.registry.get_sample_value("pdserve_router_cut_clients_total")


@pytest.mark.parametrize("prompts", [1, 3])
async def test_readers_who_hold_too_much_are_cut_off_and_others_are_not(
    make: Make, prompts: int
) -> None:
    harness = make(0, 1, max_held_bytes=1 << 18)
    harness.decodes[0].max_tokens = 500_000
    harness.decodes[0].step_s = 0.0002
    await harness.start()
    prompt: Any = PROMPT if prompts == 1 else [PROMPT] * prompts
    deaf = Client(
        harness, "/v1/completions", LONG | {"max_tokens": 400_000, "prompt": prompt, "n": 4}
    )
    slow = Client(harness, "/v1/completions", LONG | {"max_tokens": 400})
    await until(lambda: len(deaf.sent) > 2 and len(slow.sent) > 2)
    deaf.taking.clear()
    slow.taking.clear()
    await asyncio.wait_for(deaf.call, 60)
    assert counted(harness) == 1 and not deaf.complete and not slow.call.done()
    slow.taking.set()
    await asyncio.wait_for(slow.call, 60)
    assert slow.complete and await harness.world.settled() == 0
    assert harness.service.held.num_bytes == harness.service.admission.num_prompts == 0


@pytest.mark.parametrize("prompts", [1, 3])
async def test_whole_answers_count_too(make: Make, prompts: int) -> None:
    harness = make(0, 1, max_held_bytes=1 << 17)
    harness.decodes[0].max_tokens = 50_000
    await harness.start()
    prompt: Any = PROMPT if prompts == 1 else [PROMPT] * prompts
    body = LONG | {"stream": False, "logprobs": 5, "prompt": prompt}
    http = harness.http(timeout=120)
    assert (await http.post("/v1/completions", json=body | {"max_tokens": 20})).status_code == 200
    answer = await http.post("/v1/completions", json=body | {"max_tokens": 40_000})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (
        503,
        "too_much_held",
    ) and "router.max_held_bytes" in error["message"]
    assert counted(harness) == 1 and await harness.world.settled() == 0
    assert harness.service.held.num_bytes == harness.service.admission.num_prompts == 0
    with pytest.raises(ApiError, match="max_held_bytes"):
        await harness.service.collect(
            [PROMPT], SamplingParams(max_tokens=40_000, ignore_eos=True, logprobs=5)
        )


async def test_without_http_a_reader_is_told(make: Make) -> None:
    """The Python handle: nobody watches a connection, so the stream itself says it."""
    harness = make(0, 1, max_held_bytes=1 << 16)
    harness.decodes[0].max_tokens = 500_000
    await harness.start()
    generation = await harness.service.admit(
        [PROMPT], SamplingParams(max_tokens=400_000, ignore_eos=True, n=4)
    )
    batches = generation.stream()
    await anext(batches)
    await until(lambda: counted(harness) == 1)
    assert await harness.world.settled() == 0, "cancelled at its worker while nobody reads"
    with pytest.raises(ApiError, match="max_held_bytes"):
        async for _ in batches:
            pass
    assert harness.service.held.num_bytes == 0


@pytest.mark.parametrize("prompts", [1, 3])
async def test_all_that_a_stream_has_not_sent_counts(make: Make, prompts: int) -> None:
    """Events in an inbox count, events taken from it, batches of several prompts, and bytes on
    their way."""
    harness = make(0, 1)
    harness.decodes[0].max_tokens = 5000
    await harness.start()
    body = LONG | {"max_tokens": 300, "logprobs": 10, "prompt": [PROMPT] * prompts}
    client = Client(harness, "/v1/completions", body)
    client.taking.clear()
    held = harness.service.held
    num_tokens = 300 * prompts
    await until(lambda: held.num_bytes > (num_tokens - 5) * (TOKEN_BYTES + 11 * LOGPROB_BYTES), 5)
    client.taking.set()
    await asyncio.wait_for(client.call, 60)
    assert client.complete and held.num_bytes == 0


@pytest.mark.parametrize("echo", [False, True])
async def test_what_a_stream_repeats_counts(make: Make, echo: bool) -> None:
    harness = make(0, 1)
    harness.decodes[0].max_tokens = 10_000
    await harness.start()
    prompt: list[int] = [10, 11, 12, 13, 14] * 1000
    shown: dict[str, Any] = {"echo": True, "logprobs": 5} if echo else {"return_token_ids": True}
    client = Client(
        harness, "/v1/completions", LONG | {"max_tokens": 1, "prompt": prompt, "n": 4} | shown
    )
    client.taking.clear()
    least = len(prompt) * (SCORE_BYTES + 6 * 20) if echo else 4 * len("10,") * len(prompt)
    await until(lambda: harness.service.held.num_bytes > least, 5)
    client.taking.set()
    await asyncio.wait_for(client.call, 60)
    assert client.complete and harness.service.held.num_bytes == 0


@pytest.mark.parametrize("prompts", [1, 2])
async def test_a_prompts_scores_count_once_from_their_event_until_they_are_sent(
    make: Make, tokenizer: Tokenizer, prompts: int
) -> None:
    harness = await make(0, 1).start()
    held = harness.service.held
    body = {
        "model": MODEL,
        "prompt": [PROMPT * 10] * prompts,
        "max_tokens": 1,
        "prompt_logprobs": 20,
    }
    call = parse(json.dumps(body).encode(), CompletionRequest)
    generation = await harness.service.admit(call.prompts(), call.sampling({}))
    responder = CompletionResponder(call, generation, tokenizer)
    results = await generation.collect()
    packed = held.num_bytes
    assert 200 * 21 * 10 * prompts < packed < 200 * 21 * LOGPROB_BYTES / 5 * prompts, (
        "though all prompts have ended"
    )
    pieces = await responder.whole(results)
    assert pieces.num_held > 2 * packed
    assert pieces.num_held <= held.num_bytes < 1.05 * pieces.num_held, (
        "what is in the answer is there once"
    )
    generation.close()
    assert held.num_bytes == 0


async def test_a_stream_that_was_read_to_its_end_holds_nothing(make: Make) -> None:
    harness = await make(0, 1).start()
    sampling = SamplingParams(max_tokens=2, seed=1, prompt_logprobs=20)
    async for _ in harness.service.generate([PROMPT], sampling):
        assert harness.service.held.num_bytes > 0
    assert harness.service.held.num_bytes == 0


UNREAD = {
    "model": MODEL,
    "prompt": [PROMPT * 10] * 2,
    "max_tokens": 1,
    "n": 8,
    "prompt_logprobs": 20,
}


async def test_whole_answers_count_until_they_are_sent(make: Make) -> None:
    """Their requests have ended, and have no seats any more."""
    harness = await make(0, 1).start()
    one = Client(harness, "/v1/completions", UNREAD)
    await one.call
    length = sum(map(len, one.sent))
    held = harness.service.held
    assert one.complete and length > 1_000_000 and held.num_bytes == 0
    clients = [Client(harness, "/v1/completions", UNREAD) for _ in range(3)]
    for client in clients:
        client.taking.clear()
    admission = harness.service.admission
    await until(lambda: admission.num_prompts == 0 and all(client.begun for client in clients))
    await settle()
    assert 3 * length / 8 < held.num_bytes < 3 * length / 7, "what choices share is there once"
    for client in clients:
        client.taking.set()
    await asyncio.gather(*(client.call for client in clients))
    assert all(client.complete for client in clients) and held.num_bytes == 0


async def test_whole_answers_that_nobody_reads_are_cut_off(make: Make) -> None:
    harness = await make(0, 1, max_held_bytes=4 << 20).start()
    held = harness.service.held
    most = 0
    clients = []
    for _ in range(20):
        client = Client(harness, "/v1/completions", UNREAD)
        client.taking.clear()
        clients.append(client)
        await until(lambda client=client: client.begun, 10)  # type: ignore[misc]
        await settle()
        most = max(most, held.num_bytes)
    num_cut = int(counted(harness) or 0)
    assert 2 << 20 < most <= 4 << 20 and num_cut > 5
    num_ended = sum(client.call.done() for client in clients)
    held.max_bytes = held.num_bytes
    held.account().add(1)
    assert counted(harness) == num_cut + 1
    await until(lambda: sum(client.call.done() for client in clients) == num_ended + 1, 10)
    for client in clients:
        client.taking.set()
    await asyncio.gather(*(client.call for client in clients))
    assert sum(client.complete for client in clients) == 20 - num_cut - 1 and held.num_bytes == 1
