"""Answers of many choices, tokens or log-probabilities: made in slices, what choices share once,
sent in parts."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from router.harness import MODEL, Harness
from router.turns import Turns

from pdserve.background import pace
from pdserve.background.pace import Pacer
from pdserve.protocol.events import TokenLogprob
from pdserve.router.held_bytes import Held
from pdserve.router.http.answers import SEND_BYTES
from pdserve.router.http.body_parsing import parse
from pdserve.router.http.json_pieces import SHARED_BYTES, JsonPieces
from pdserve.router.http.openai.chat import ChatResponder
from pdserve.router.http.openai.completions import CompletionResponder
from pdserve.router.http.openai.requests import ChatRequest, CompletionRequest
from pdserve.router.request.generation import ChoiceResult, Generation
from pdserve.text.tokenizer import Tokenizer

Make = Callable[..., Harness]
PROMPT = list(range(10, 30))
LONG_PROMPT = [number % 300 + 3 for number in range(5000)]


def scored(token: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, 1, ((token, -0.5), (token + 1, -1.5)))


def results(num_choices: int, num_tokens: int) -> list[ChoiceResult]:
    tokens = [number % 300 + 3 for number in range(num_tokens)]
    return [
        ChoiceResult(index, "text", tokens, list(map(scored, tokens)), "length", None)
        for index in range(num_choices)
    ]


async def turns_during(work: Any) -> tuple[int, Any]:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    made = await work
    counting.cancel()
    return turns, made


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(("num_choices", "num_tokens"), [(500, 1), (2, 5000)])
async def test_a_whole_answer_is_made_in_slices(
    tokenizer: Tokenizer,
    chat: bool,
    num_choices: int,
    num_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "SLICE_S", 0.0)
    generation = Generation(
        "x", num_choices, [], [tuple(PROMPT)], Pacer(), Held(1 << 30, lambda count: None).account()
    )
    body: dict[str, Any] = {"model": MODEL, "n": num_choices}
    responder: ChatResponder | CompletionResponder
    if chat:
        body |= {
            "messages": [{"role": "user", "content": "x"}],
            "logprobs": True,
            "top_logprobs": 1,
        }
        responder = ChatResponder(
            parse(json.dumps(body).encode(), ChatRequest), generation, tokenizer
        )
    else:
        body |= {"prompt": PROMPT, "logprobs": 1}
        responder = CompletionResponder(
            parse(json.dumps(body).encode(), CompletionRequest), generation, tokenizer
        )
    turns, pieces = await turns_during(responder.whole(results(num_choices, num_tokens)))
    assert turns > 100
    choices = json.loads(b"".join(piece for piece, _ in pieces.take()))["choices"]
    assert [choice["index"] for choice in choices] == list(range(num_choices))
    for choice in choices:
        shown = choice["logprobs"]["content"] if chat else choice["logprobs"]["tokens"]
        assert len(shown) == num_tokens


async def test_what_choices_share_is_made_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = make(0, 1)
    harness.decodes[0].max_tokens = 10_000
    await harness.start()
    made = 0
    ranked = CompletionResponder._ranked

    def counting(self: CompletionResponder, position: TokenLogprob) -> Any:
        nonlocal made
        made += 1
        return ranked(self, position)

    monkeypatch.setattr(CompletionResponder, "_ranked", counting)
    body = {
        "model": MODEL,
        "prompt": LONG_PROMPT,
        "n": 8,
        "max_tokens": 1,
        "prompt_logprobs": 1,
        "seed": 1,
    }
    http = harness.http(timeout=120)
    answer = (await http.post("/v1/completions", json=body | {"return_token_ids": True})).json()
    assert made == len(LONG_PROMPT) - 1
    assert [choice["index"] for choice in answer["choices"]] == list(range(8))
    for choice in answer["choices"]:
        assert len(choice["prompt_logprobs"]) == len(LONG_PROMPT)
        assert choice["prompt_token_ids"] == LONG_PROMPT


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_echoes_of_long_prompts(make: Make, logprobs: int | None) -> None:
    harness = make(0, 1)
    harness.decodes[0].max_tokens = 10_000
    await harness.start()
    http = harness.http(timeout=120)
    text = harness.tokenizer.decode(LONG_PROMPT)
    body = {
        "model": MODEL,
        "prompt": [LONG_PROMPT, PROMPT],
        "n": 3,
        "max_tokens": 2,
        "echo": True,
        "seed": 1,
    }
    body |= {"logprobs": logprobs}
    whole = (await http.post("/v1/completions", json=body)).json()["choices"]
    streamed = (await http.post("/v1/completions", json=body | {"stream": True})).text
    texts = [""] * 6
    tokens = [0] * 6
    for line in streamed.split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += len(choice["logprobs"]["tokens"]) if logprobs else 0
    assert texts == [choice["text"] for choice in whole] and all(
        each.startswith(text) for each in texts[:3]
    )
    if logprobs:
        assert tokens == [len(choice["logprobs"]["tokens"]) for choice in whole] and min(
            tokens[:3]
        ) > len(LONG_PROMPT)


@pytest.mark.parametrize("stream", [False, True])
async def test_long_answers_are_sent_in_parts(make: Make, stream: bool) -> None:
    harness = make(0, 1)
    harness.decodes[0].max_tokens = 10_000
    await harness.start()
    sent: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def watching(message: Any) -> None:
            sent.append(len(message.get("body", b"")))
            await send(message)

        await original(scope, receive, watching)

    original = harness.app
    harness.app = app  # type: ignore[assignment]
    body = {
        "model": MODEL,
        "prompt": LONG_PROMPT,
        "n": 32,
        "max_tokens": 1,
        "return_token_ids": True,
        "stream": stream,
    }
    answer = await harness.http(timeout=120).post("/v1/completions", json=body)
    assert answer.status_code == 200 and len(answer.content) > 3 * SEND_BYTES
    assert max(sent) < 2 * SEND_BYTES + 100 and len(sent) > 4


async def test_too_many_log_probabilities_of_prompts_are_refused(make: Make) -> None:
    harness = make(0, 1)
    harness.decodes[0].max_tokens = 10_000
    await harness.start()
    for change in ({"prompt_logprobs": 20}, {"logprobs": 20, "echo": True}):
        body = {"model": MODEL, "prompt": LONG_PROMPT, "n": 8, "max_tokens": 1} | change
        error = (await harness.http().post("/v1/completions", json=body)).json()["error"]
        assert error["param"] == "prompt_logprobs" and "fewer" in error["message"]
    assert not harness.decodes[0].submits() and harness.service.admission.num_prompts == 0


async def test_echoes_of_many_prompts_are_made_in_slices(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of ids takes a millisecond or two to be made into text."""
    monkeypatch.setattr(pace, "SLICE_S", 0.0)
    harness = await make(0, 1).start()
    decode = harness.tokenizer.decode
    turns = Turns()

    def noting(ids: Any) -> str:
        turns.note()
        return decode(ids)

    monkeypatch.setattr(harness.tokenizer, "decode", noting)
    body = {"model": MODEL, "prompt": [PROMPT] * 200, "max_tokens": 1, "echo": True}
    answer = await harness.http(timeout=120).post("/v1/completions", json=body)
    turns.close()
    assert answer.status_code == 200 and sum(turns.counts) == 200 and max(turns.counts) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_timelines_of_many_prompts_are_shown(
    make: Make, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "SLICE_S", 0.0)
    harness = await make(0, 1).start()
    body = {"model": MODEL, "prompt": [PROMPT] * 50, "max_tokens": 1, "stream": stream}
    http = harness.http(timeout=60)
    asked = http.post("/v1/completions", json=body, headers={"x-pdserve-timeline": "1"})
    text = (await asyncio.wait_for(asked, 60)).text
    shown = text.split("\n\n")[-3].removeprefix("data: ") if stream else text
    assert [each["prompt"] for each in json.loads(shown)["timeline"]] == list(range(50))


def test_pieces_that_repeat_are_held_once() -> None:
    shared = b"s" * SHARED_BYTES
    other = b"s" * SHARED_BYTES
    short = b"x" * 10
    pieces = JsonPieces()
    added = [pieces.add([short, shared, short]), pieces.add([shared, other]), pieces.add([short])]
    assert added == [20 + SHARED_BYTES, SHARED_BYTES, 10]
    assert (pieces.num_held, pieces.num_bytes) == (30 + 2 * SHARED_BYTES, 30 + 3 * SHARED_BYTES)
    taken = list(pieces.take())
    assert b"".join(piece for piece, _ in taken) == short + shared + short + shared + other + short
    assert [num_bytes for _, num_bytes in taken] == [10, 0, 10, SHARED_BYTES, SHARED_BYTES, 10]


def test_short_pieces_are_joined() -> None:
    pieces = JsonPieces()
    for _ in range(10_000):
        pieces.add([b"0123456789" * 10])
    assert len(list(pieces.take())) < 10 and pieces.num_held == 1_000_000
