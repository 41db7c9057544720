"""Prompts made into ids: one check of length, before anything is tokenised, and few characters at a
time."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from router.harness import MODEL, Harness, until

from pdserve.background.pace import Pacer
from pdserve.router.errors import ApiError
from pdserve.router.http.body_parsing import parse_long
from pdserve.router.http.openai.requests import CompletionRequest
from pdserve.router.request import prompts
from pdserve.router.request.prompts import FEW_IDS, Lengths, Limits, Prompts, SharedIds
from pdserve.text.tokenizer import Tokenizer
from pdserve.turns.model_turns import ModelTurns
from pdserve.turns.turn import Turn

Make = Callable[..., Harness]
LONG_TEXT = "x" * 5000
LIMITS = Limits(max_tokens=50_000, vocab_size=403)
MEGABYTE = "fox " * 250_000


class Watched(Tokenizer):
    """Counts what is tokenised: in all, and at once. gate: of the threads that tokenise."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.__dict__.update(tokenizer.__dict__)
        self.num_chars = self.at_once = self.most_at_once = self.num_batches = 0
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()

    def _encodings(self, texts: Sequence[str], add_special_tokens: bool) -> Any:
        size = sum(map(len, texts))
        with self._lock:
            self.num_batches += 1
            self.num_chars += size
            self.at_once += size
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            assert self.gate.wait(60)
            return super()._encodings(texts, add_special_tokens)
        finally:
            with self._lock:
                self.at_once -= size


@pytest.fixture
def watched(tokenizer: Tokenizer) -> Watched:
    return Watched(tokenizer)


def made(tokenizer: Tokenizer, most: int | None = None) -> Prompts:
    return Prompts(tokenizer, most, Pacer())


@pytest.mark.parametrize("limit", [{}, {"max_prompt_tokens": 100}])
async def test_no_prompt_that_cannot_fit_is_tokenised(
    make: Make, watched: Watched, limit: dict[str, int]
) -> None:
    harness = await make(0, 1, **limit).start()
    harness.service.prompts._tokenizer = watched
    message = {"role": "user", "content": MEGABYTE}
    parts = {"role": "user", "content": [{"type": "text", "text": "fox " * 5000}] * 50}
    bodies: list[tuple[str, Any, str]] = [
        ("/v1/completions", {"prompt": MEGABYTE}, "prompt"),
        ("/v1/completions", {"prompt": ["fox", MEGABYTE]}, "prompt"),
        ("/v1/completions", {"prompt": [[5], [5] * 300]}, "prompt"),
        ("/v1/chat/completions", {"messages": [message]}, "messages"),
        ("/v1/chat/completions", {"messages": [parts]}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "fox"}] * 4097},
            "messages",
        ),
    ]
    for path, body, named in bodies:
        answer = await harness.http().post(path, json={"model": MODEL, **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, named), error
        assert error["code"] in ("context_length_exceeded", "too_many_messages")
    assert watched.num_batches == 0


async def test_what_the_template_adds_counts(make: Make) -> None:
    harness = await make(0, 1, max_prompt_tokens=20).start()
    for size, status in ((1, 200), (9, 400)):
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "fox " * size}],
            "max_tokens": 1,
        }
        assert (await harness.http().post("/v1/chat/completions", json=body)).status_code == status


async def test_of_a_text_that_is_too_long_little_is_tokenised(watched: Watched) -> None:
    limits = Limits(max_tokens=3000, vocab_size=403)
    text = "fox " * 9500  # not too long by its characters alone
    whole = watched.encode(text)
    assert len(text) < made(watched).lengths(limits).max_chars and len(whole) > 3000
    for texts in ([text * 1], [text, text]):
        watched.num_chars = 0
        with pytest.raises(ApiError, match="at least 5") as caught:
            await made(watched).token_ids(texts, True, limits, "prompt")
        assert caught.value.code == "context_length_exceeded"
        assert watched.num_chars < len(text)


@pytest.mark.parametrize("word", ["fox ", " ", "é", "ab"])
@pytest.mark.parametrize("most", [None, 40_000])
async def test_a_long_text_that_fits_is_whole(
    watched: Watched, word: str, most: int | None
) -> None:
    text = word * (60_000 // len(word))
    whole = watched.encode(text)
    limits = Limits(max_tokens=len(whole) + 1, vocab_size=403)
    expected = len(whole) if most is None else min(len(whole), most)
    service = made(watched, most)
    if expected < len(whole):
        with pytest.raises(ApiError, match="is 40000 tokens in prompt"):
            await service.token_ids([text], True, limits, "prompt")
    else:
        assert await service.token_ids([text], True, limits, "prompt") == [tuple(whole)]


async def test_few_characters_are_tokenised_at_once(watched: Watched) -> None:
    service = made(watched)
    text = "fox " * 12_000
    short = "fox " * 2000
    alone = [tuple(watched.encode(short)), tuple(watched.encode(text))]
    watched.most_at_once = 0
    watched.gate.clear()
    asked = [
        asyncio.create_task(service.token_ids([short, text], True, LIMITS, "prompt"))
        for _ in range(12)
    ]
    await until(lambda: watched.num_batches >= 6)
    watched.gate.set()
    assert await asyncio.gather(*asked) == [alone] * 12
    bound = len(text) + prompts.SHORT_THREADS * prompts.BATCH_CHARS
    assert len(text) <= watched.most_at_once <= bound


async def test_who_leaves_the_queue_is_not_tokenised(watched: Watched) -> None:
    service = made(watched)
    text = "fox " * 12_000
    watched.gate.clear()
    asked = [
        asyncio.create_task(service.token_ids([text], True, LIMITS, "prompt")) for _ in range(9)
    ]
    await until(lambda: watched.num_batches == 1)
    for task in asked[:8]:
        task.cancel()
    await asyncio.wait(asked[:8])
    assert watched.at_once == len(text), "what has begun still counts"
    watched.gate.set()
    assert len(await asked[8]) == 1 and watched.num_batches == 2


async def test_many_short_texts_do_not_hold_the_loop(watched: Watched) -> None:
    texts = [f"The fox number {number} jumps" for number in range(3000)]
    expected = [tuple(watched.encode(text)) for text in texts]
    watched.num_batches = 0
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    assert await made(watched).token_ids(texts, True, LIMITS, "prompt") == expected
    ticking.cancel()
    assert 5 < watched.num_batches < 60 and turns >= watched.num_batches


async def test_a_lone_surrogate_is_named(tokenizer: Tokenizer) -> None:
    for text in ("\ud800", "fox " * 3000 + "\udfff"):
        with pytest.raises(ApiError, match="lone surrogate"):
            await made(tokenizer).token_ids(["fox", text], True, LIMITS, "prompt")


async def test_long_conversations_are_rendered_beside_the_loop(make: Make) -> None:
    """The template runs in a thread, where the loop goes on."""
    harness = await make(0, 1).start()
    harness.decodes[0].max_tokens = 200_000
    seen: list[bool] = []
    render = harness.tokenizer.render_chat

    def watching(*args: Any, **kwargs: Any) -> str:
        seen.append(threading.current_thread() is threading.main_thread())
        return render(*args, **kwargs)

    watched = Watched(harness.tokenizer)
    watched.render_chat = watching  # type: ignore[method-assign]
    service = made(watched)
    small = [{"role": "user", "content": "hi"}]
    for messages, tools, variables in (
        (small, None, {"not_thinking": True}),
        (small * 1000, None, {}),
        ([{"role": "user", "content": "fox " * 10_000}], None, {}),
        (small, [{"type": "function"}], {}),
        (small, None, {"x": ["y"]}),
        (small * 20, None, {}),
        (
            [
                {
                    "role": "user",
                    "content": None,
                    "tool_calls": [{"function": {"arguments": LONG_TEXT}}],
                }
            ],
            None,
            {},
        ),
        ([{"role": "user", "content": "hi", "name": LONG_TEXT}], None, {}),
        ([{"role": "user", "content": "hi", LONG_TEXT: 1}], None, {}),
        ([{"role": "user", "content": "hi", "tool_calls": [{}] * 5000}], None, {}),
        ([{"role": LONG_TEXT, "content": "hi"}], None, {}),
    ):
        with contextlib.suppress(ApiError):  # of a template that knows other roles only
            turn = Turn(messages=messages, tools=tools or [], template_kwargs=variables)
            await service.render(turn, ModelTurns(watched), LIMITS)
    assert seen == [True, False, False, False, False, True, False, False, False, False, False]


async def test_slices_of_long_work_take_turns() -> None:
    pacer = Pacer()
    order = []

    async def work(name: str) -> None:
        with pacer.pace() as pace:
            for _ in range(4):
                order.append(name)
                while not pace.is_due:
                    pass
                await pace.rest()

    others = 0

    async def other() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    asking = asyncio.create_task(other())
    await asyncio.gather(work("a"), work("b"), work("c"))
    asking.cancel()
    assert sorted(order[:3]) == sorted(order[3:6]) == ["a", "b", "c"] and others >= 9

    cancelled = asyncio.create_task(work("d"))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    await asyncio.wait_for(work("e"), 60)


async def test_a_task_has_one_pace() -> None:
    """A second one would wait for the turn that the first one has, and everybody behind it, for
    ever."""
    pacer = Pacer()
    with pacer.pace() as first:
        await first.rest()
        with pytest.raises(AssertionError, match="its caller's Pace"), pacer.pace() as second:
            await second.rest()
        await asyncio.wait_for(asyncio.create_task(pacer.turn()), 60)
        await first.rest()
    await pacer.turn()
    with pytest.raises(ZeroDivisionError), pacer.pace():
        1 / 0  # noqa: B018
    await pacer.turn()


@pytest.mark.parametrize("prompt", ["The quick fox " * 2000, "[300, 400, 70]", f"{[300] * 2000}"])
async def test_prompts_share_their_integers(tokenizer: Tokenizer, prompt: str) -> None:
    """An integer of its own is 32 bytes a token, four times the rest: only few may have theirs."""
    ids = []
    for _ in range(2):
        sent = json.loads(prompt) if prompt.startswith("[") else prompt
        ids += await made(tokenizer).token_ids([sent], True, LIMITS, "prompt")
    first, second = ids
    assert first == second
    assert len(first) <= FEW_IDS or all(a is b for a, b in zip(first, second, strict=True))


async def test_many_prompts_share_their_integers_though_each_is_short(tokenizer: Tokenizer) -> None:
    sent = [json.loads("[300, 301]") for _ in range(FEW_IDS)]
    ids = await made(tokenizer).token_ids(sent, True, LIMITS, "prompt")
    assert len({id(token) for prompt in ids for token in prompt}) == 2


async def test_ids_of_long_bodies_share_their_integers() -> None:
    for prompt in ([300] * 18_000, [[300, 301]] * 9000):
        body = bytearray(json.dumps({"model": "m", "prompt": prompt}).encode())
        with Pacer().pace() as pace:
            call = await parse_long(
                body, CompletionRequest, Lengths(Limits(100_000, 403), None, 9), pace
            )
        ids = [
            token
            for shared in call.prompts()
            if isinstance(shared, SharedIds)
            for token in shared.ids
        ]
        assert len(ids) == 18_000 and len(set(map(id, ids))) == len(set(ids))
