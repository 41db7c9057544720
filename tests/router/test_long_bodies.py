"""Long bodies: read within a budget, cut and decoded piece by piece, refused before anything is
made of too much."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest
from router.harness import MODEL, Harness, settle, until
from starlette.requests import Request

from pdserve.background.pace import Pacer
from pdserve.router.errors import ApiError
from pdserve.router.http import body_parsing, calls, json_outline
from pdserve.router.http.bodies import Bodies
from pdserve.router.http.body_parsing import LONG_BODY, parse, parse_long
from pdserve.router.http.calls import ALONE_BYTES, LONG_AT_ONCE
from pdserve.router.http.json_outline import outline
from pdserve.router.http.openai.requests import ChatRequest, CompletionRequest
from pdserve.router.request.prompts import Lengths, Limits, SharedIds
from pdserve.router.request.service import Service

Make = Callable[..., Harness]
WIDE = Lengths(Limits(1 << 24, 1 << 20), None, 13)
NARROW = Lengths(Limits(256, 403), None, 13)
MEGABYTE = 1 << 20


async def long(body: bytes, kind: Any, lengths: Lengths = WIDE) -> Any:
    with Pacer().pace() as pace:
        return plain(await parse_long(bytearray(body), kind, lengths, pace))


def plain(call: Any) -> Any:
    """With a list of prompts where there is any, and their ids as tuples."""
    if isinstance(call, CompletionRequest) and call.prompt:
        call.prompt = [
            prompt if isinstance(prompt, str) else ids_of(prompt) for prompt in call.prompts()
        ]
    return call


def ids_of(prompt: Sequence[int] | SharedIds) -> tuple[int, ...]:
    return prompt.ids if isinstance(prompt, SharedIds) else tuple(prompt)


def completion(prompt: str, rest: str = "") -> bytes:
    return ('{ "model" : "m", "max_tokens":3 ,"prompt":' + prompt + rest + "} ").encode(
        "utf-8", "surrogatepass"
    )


PROMPTS = [
    '"a text with \\"quotes\\", \\\\ [brackets], {braces} and \\u00e9\\ud83d\\ude42\\n 🙂é"',
    '""',
    '["one", "two, [three]", "\\\\", "", "fi\\"ve"]',
    "[ 1,2 ,3,\n4 , 50000 ]",
    "[[1,2,3] , [4],[5,6]\t,[70000]]",
    "[]",
    "[ ]",
    "[7]",
]


@pytest.fixture(params=[None, 3, 8, 31])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and pieces of a few bytes, so that every place of a text is some window's end."""
    if request.param is not None:
        monkeypatch.setattr(json_outline, "WINDOW", request.param)
        monkeypatch.setattr(json_outline, "PIECE_BYTES", request.param)
        monkeypatch.setattr(json_outline, "LEAVES_BYTES", 2 * request.param)
        monkeypatch.setattr(body_parsing, "LONG_ITEM", request.param)


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_piece_by_piece_gives_the_same_as_at_once(prompt: str) -> None:
    body = completion(
        prompt, ',"stop":["x","]"],"logit_bias":{"3":1.5},"stream":null,"user":"u","n":2.0'
    )
    assert await long(body, CompletionRequest) == await at_once(body)


@pytest.mark.usefixtures("window")
async def test_conversations_and_empty_objects_too() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a \\ b"}]},
        {"role": "x", "content": "é]}"},
    ]
    body = json.dumps(
        {"model": "m", "messages": messages, "tools": [{"a": {}}], "tool_choice": "none"}
    ).encode()
    assert await long(body, ChatRequest) == parse(bytearray(body), ChatRequest)
    for empty in (b"{}", b" { } "):
        with pytest.raises(ApiError, match="required field `model`"):
            await long(empty, ChatRequest)


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize(
    "prompt",
    [
        *(
            '"a',
            '"a\\"',
            '"a\\',
            "[1,2",
            "[1,2,]",
            "[1,,2]",
            "[,1]",
            '["a",]',
            '["a""b"]',
            '["a",,"b"]',
            '["a";"b"]',
        ),
        *(
            "[[1][2]]",
            "[[1],]",
            "[[1}]",
            "[1}",
            "}",
            "]",
            "",
            "tru",
            "1 2",
            '"a" "b"',
            "[1 2]",
            '["\\x"]',
            "[01]",
        ),
    ],
)
async def test_what_is_no_json_is_refused_as_such(prompt: str) -> None:
    for body in (completion(prompt), completion(prompt)[:-3]):
        for decode in (long(body, CompletionRequest), at_once(body)):
            with pytest.raises(ApiError) as caught:
                await decode
            assert caught.value.status == 400


async def at_once(body: bytes) -> Any:
    return plain(parse(bytearray(body), CompletionRequest))


@pytest.mark.parametrize("seed", range(40))
async def test_mutilated_bodies_give_no_other_answer(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies that a decoder takes at once, and only these, are taken piece by piece, with the same
    outcome."""
    chance = random.Random(seed)
    monkeypatch.setattr(json_outline, "WINDOW", chance.randint(2, 40))
    monkeypatch.setattr(json_outline, "PIECE_BYTES", chance.randint(1, 40))
    monkeypatch.setattr(json_outline, "LEAVES_BYTES", chance.randint(1, 80))
    monkeypatch.setattr(body_parsing, "LONG_ITEM", chance.randint(1, 40))
    for _ in range(60):
        body = bytearray(completion(chance.choice(PROMPTS), ',"stop":["x","]"],"user":{"a":[1]}'))
        for _ in range(chance.choice([0, 1, 1, 2])):
            at = chance.randrange(len(body))
            body[at : at + chance.randint(0, 2)] = bytes([chance.choice(b'"\\[]{},:1 a\xff')])
        expected = await outcome(at_once(bytes(body)))
        found = await outcome(long(bytes(body), CompletionRequest))
        assert found == expected, bytes(body)


@pytest.mark.parametrize("more", [0, 1])
async def test_so_many_fields_and_no_more(more: int) -> None:
    body = b",".join(b'"%x":1' % number for number in range(json_outline.MAX_MEMBERS + more))
    with Pacer().pace() as pace:
        assert await outcome(outline(bytearray(b"{%b}" % body), pace)) == (400 if more else ANY)


async def outcome(decode: Awaitable[Any]) -> Any:
    try:
        return await decode
    except ApiError as error:
        return error.status


def hostile() -> Iterator[tuple[str, bytes, type, str]]:
    """Name, body, endpoint's type, and the error's code."""
    head = b'{"model":"demo",'
    size = 2 * MEGABYTE
    yield (
        "a text",
        head + b'"prompt":"' + b"word " * (size // 5) + b'"}',
        CompletionRequest,
        "context_length_exceeded",
    )
    yield (
        "escapes",
        head + b'"prompt":"' + b"\\u0041" * (size // 6) + b'"}',
        CompletionRequest,
        "context_length_exceeded",
    )
    yield (
        "ids",
        head + b'"prompt":[' + b"1," * (size // 2) + b"1]}",
        CompletionRequest,
        "context_length_exceeded",
    )
    yield (
        "an item",
        head + b'"prompt":[[1],[' + b"1," * (size // 2) + b"1]]}",
        CompletionRequest,
        "context_length_exceeded",
    )
    yield (
        "a long item",
        head + b'"prompt":["a","' + b"word " * (size // 5) + b'"]}',
        CompletionRequest,
        "context_length_exceeded",
    )
    yield (
        "lists",
        head + b'"prompt":[' + b"[]," * (size // 3) + b"[]]}",
        CompletionRequest,
        "too_many_values",
    )
    yield (
        "prompts",
        head + b'"prompt":[' + b"[1]," * 20_000 + b"[1]]}",
        CompletionRequest,
        "too_many_prompts",
    )
    yield (
        "ignored",
        head + b'"prompt":"x","metadata":[' + b"{}," * (size // 3) + b"{}]}",
        CompletionRequest,
        "too_many_values",
    )
    yield (
        "a user",
        head + b'"prompt":"x","user":"' + b"u" * size + b'"}',
        CompletionRequest,
        "too_long",
    )
    yield (
        "a key",
        head + b'"prompt":"x","' + b"u" * size + b'":1}',
        CompletionRequest,
        "unsupported_parameter",
    )
    keys = b",".join(b'"%x":1' % number for number in range(100_000))
    yield "keys", head + keys + b"}", CompletionRequest, "too_many_fields"
    yield (
        "one key",
        head + b'"n":1,' * 100_000 + b'"prompt":"x"}',
        CompletionRequest,
        "too_many_fields",
    )
    yield (
        "depth",
        head + b'"metadata":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        CompletionRequest,
        "invalid_json",
    )
    message = b'{"role":"user","content":"a"},'
    yield (
        "messages",
        head + b'"messages":[' + message * 40_000 + b"{}]}",
        ChatRequest,
        "too_many_values",
    )
    yield (
        "a chat",
        head + b'"messages":[{"role":"user","content":"' + b"word " * (size // 5) + b'"}]}',
        ChatRequest,
        "context_length_exceeded",
    )


async def test_a_conversation_has_a_bound_of_values_beside_its_length() -> None:
    body = b'{"model":"demo","messages":[{"role":"user","x":[' + b"1," * 200_000 + b"1]}]}"
    with pytest.raises(ApiError, match="more than 131072 values"):
        await long(body, ChatRequest)


@pytest.mark.parametrize(
    "text", ["word", "é", "🙂", "\\n", "\\u0041", "\\ud83d\\ude42", "\\\\u", '\\"']
)
@pytest.mark.parametrize("window", [7, 1 << 17])
async def test_a_text_has_no_fewer_characters_than_is_said(
    text: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_outline, "WINDOW", window)
    body = bytearray(b'"' + text.encode() * 1000 + b'"')
    with Pacer().pace() as pace:
        least = await json_outline.least_chars(body, json_outline.Member(0, len(body)), pace)
    assert least <= len(json.loads(body)) + 2
    assert window < 100 or len(json.loads(body)) <= 4 * least + 100 or text == "\\\\u"


@pytest.mark.parametrize(
    ("name", "body", "kind", "code"), hostile(), ids=[case[0] for case in hostile()]
)
async def test_too_much_is_refused_before_it_is_made(
    name: str, body: bytes, kind: type, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    decode = msgspec.json.decode

    def counting(data: Any, **options: Any) -> Any:
        decoded.append(len(data))
        return decode(data, **options)

    monkeypatch.setattr(msgspec.json, "decode", counting)
    with pytest.raises(ApiError) as caught:
        await long(body, kind, NARROW)
    assert (caught.value.status, caught.value.code) == (400, code) and len(
        caught.value.message
    ) < 3000
    assert len(body) > LONG_BODY and max(decoded) < 100_000


@pytest.mark.parametrize("prompt", ["[%s]", "[[%s]]", "[[5], [%s] ,[6]]"])
async def test_long_lists_of_ids_are_decoded_in_pieces(
    prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = list[int]()
    shared = list[int]()
    decode = msgspec.json.decode
    shared_ids = Lengths.shared_ids

    def decoding(data: bytearray, **options: Any) -> Any:
        decoded.append(len(data))
        return decode(data, **options)

    def sharing(lengths: Lengths, ids: Any, named: str) -> tuple[int, ...]:
        shared.append(len(ids))
        return shared_ids(lengths, ids, named)

    monkeypatch.setattr(msgspec.json, "decode", decoding)
    monkeypatch.setattr(Lengths, "shared_ids", sharing)
    ids = [300 + number % 700 for number in range(125_000)]
    call = await long(completion(prompt % ",".join(map(str, ids))), CompletionRequest)
    assert tuple(ids) in call.prompt
    assert max(decoded) <= 2 * json_outline.PIECE_BYTES and max(shared) <= json_outline.PIECE_BYTES


async def test_ids_are_mapped_once_and_held_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 million ids are 64 MB, each time that they are made anew."""
    harness = await make(0, 1).start()
    num_mapped = 0
    shared_ids = Lengths.shared_ids

    def mapping(lengths: Lengths, ids: Any, named: str) -> tuple[int, ...]:
        nonlocal num_mapped
        made = shared_ids(lengths, ids, named)
        num_mapped += 0 if isinstance(ids, SharedIds) and made is ids.ids else len(ids)
        return made

    monkeypatch.setattr(Lengths, "shared_ids", mapping)
    prompts = [[number % 100 + 3 for number in range(40)] for _ in range(500)]
    body = json.dumps({"model": MODEL, "prompt": prompts, "max_tokens": 1})
    assert len(body) > LONG_BODY
    assert (
        await harness.http(timeout=120).post("/v1/completions", content=body)
    ).status_code == 200
    assert [list(submit.prompt_token_ids) for submit in harness.decodes[0].submits()] == prompts
    assert num_mapped == 500 * 40


async def test_ids_are_checked_again_when_the_vocabulary_has_become_smaller() -> None:
    ids = SharedIds((5, 300), 400)
    assert NARROW.shared_ids(ids, "prompt") is ids.ids
    with pytest.raises(ApiError, match=r"vocabulary 0\.\.299"):
        Lengths(Limits(256, 300), None, 13).shared_ids(ids, "prompt")


async def test_the_loop_goes_on_while_a_long_body_is_looked_at(make: Make) -> None:
    """8 MB of empty lists kept it for a second, and 200 MB. What counts is the loop's own work
    between two turns."""
    harness = await make(0, 1).start()
    body = b'{"model":"demo","prompt":"x","metadata":[' + b"[]," * 2_700_000 + b"[]]}"
    moments: list[float] = []

    async def tick() -> None:
        while True:
            moments.append(time.thread_time())
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    answer = await harness.http().post("/v1/completions", content=body)
    ticking.cancel()
    assert answer.status_code == 400
    assert max(b - a for a, b in itertools.pairwise(moments)) < 0.3


async def test_long_prompts_still_work(make: Make) -> None:
    harness = make(0, 1)
    harness.decodes[0].max_tokens = 200_000
    await harness.start()
    http = harness.http(timeout=120)
    ids = [number % 400 + 3 for number in range(131_000)]
    text = "The quick fox jumps over the lazy dog. " * 4000
    for prompt in (ids, text, [ids[:40_000], ids[40_000:]], [text, "short"]):
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1, "seed": 1})
        assert len(body) > LONG_BODY
        answer = await http.post("/v1/completions", content=body)
        assert answer.status_code == 200, answer.text
    sent = [submit.prompt_token_ids for submit in harness.decodes[0].submits()]
    assert sent[0] == tuple(ids) == sent[2] + sent[3]
    assert sent[1] == sent[4] == tuple(harness.tokenizer.encode(text))
    chat = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
    assert counted(harness) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"x" * 30_000: 1},
        {"stream_options": {" - at `$.n`" * 2000: 1}, "stream": True},
        {"stop": ["s" * 30_000, ""]},
        {"echo": "e" * 30_000},
    ],
)
async def test_errors_are_made_without_searching_what_was_sent(
    make: Make, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[int] = []
    search = body_parsing.re.search
    similar = body_parsing.difflib.get_close_matches

    def searching(pattern: Any, text: str) -> Any:
        searched.append(len(text))
        return search(pattern, text)

    def comparing(word: str, names: Any, **options: Any) -> Any:
        searched.append(len(word) if names else 0)
        return similar(word, names, **options)

    monkeypatch.setattr(body_parsing.re, "search", searching)
    monkeypatch.setattr(body_parsing.difflib, "get_close_matches", comparing)
    harness = await make(0, 1).start()
    body = {"model": MODEL, "prompt": [5]} | change
    answer = await harness.http().post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert (
        answer.status_code == 400
        and error["param"] == next(iter(change))[:200]
        and len(answer.content) < 5000
    )
    assert max(searched, default=0) <= 400


@pytest.mark.parametrize("number", ["1e400", "-1e400", "9" * 4000, "9" * 5000, "NaN", "Infinity"])
async def test_numbers_beyond_all_bounds_are_bad_requests(make: Make, number: str) -> None:
    harness = await make(0, 1).start()
    for name in ("n", "max_tokens", "temperature", "seed", "priority", "top_k"):
        body = '{"model":"demo","prompt":[5],"%s":%s}' % (name, number)  # noqa: UP031
        assert (await harness.http().post("/v1/completions", content=body)).status_code == 400
    for prompt in (f"[{number}]", f"[[{number}]]", f"[{number}, 1.5]"):
        body = '{"model":"demo","prompt":%s}' % prompt  # noqa: UP031
        assert (await harness.http().post("/v1/completions", content=body)).status_code == 400


class Sender:
    """A client that sends its body as it likes."""

    def __init__(self, bodies: Bodies, told: int | None = None) -> None:
        self.parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.done = asyncio.Event()
        headers = [] if told is None else [(b"content-length", str(told).encode())]
        request = Request({"type": "http", "method": "POST", "headers": headers}, self._receive)
        self.task = asyncio.create_task(self._run(bodies, request))

    async def _receive(self) -> Any:
        part = await self.parts.get()
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}

    async def _run(self, bodies: Bodies, request: Request) -> bytes:
        with await bodies.read(request) as body:
            await self.done.wait()
            return bytes(body)

    def send(self, *sizes: int, last: bool = False) -> None:
        for size in sizes:
            self.parts.put_nowait(b"x" * size)
        if last:
            self.parts.put_nowait(None)


def counted(harness: Harness) -> float | None:
    return harness.service.metrics.registry.get_sample_value("pdserve_router_body_bytes")


async def refused(sender: Sender) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await asyncio.wait_for(sender.task, 60)
    return caught.value


async def test_bodies_share_a_budget() -> None:
    bodies = Bodies(200, 1000, 60)
    first = Sender(bodies)
    first.send(150)
    await until(lambda: bodies.num_bytes == 150)
    promising = [Sender(bodies, told=200) for _ in range(9)]
    await asyncio.sleep(0.01)
    assert not any(sender.task.done() for sender in promising), "what is promised costs nothing"
    first.send(51)
    error = await refused(first)
    assert (error.status, error.code) == (413, "body_too_large") and bodies.num_bytes == 0
    for sender in promising:
        sender.send(100)
    await until(lambda: sum(sender.task.done() for sender in promising) >= 2)
    assert bodies.num_bytes <= 1000
    error = await refused(next(sender for sender in promising if sender.task.done()))
    assert (error.status, error.code, error.retry_after) == (429, "too_many_body_bytes", 1)
    late = Sender(bodies, told=150)
    assert (await refused(late)).status == 429, "before anything is read"
    small = Sender(bodies, told=20)
    small.send(20, last=True)
    small.done.set()
    assert await asyncio.wait_for(small.task, 60) == b"x" * 20, (
        "there is always room for short ones"
    )
    for sender in promising:
        sender.task.cancel()
    await asyncio.wait([sender.task for sender in promising])
    assert bodies.num_bytes == 0
    assert (await refused(Sender(bodies, told=201))).status == 413


async def test_bytes_count_until_the_prompts_are_made(make: Make) -> None:
    harness = await make(0, 1, max_body_bytes=1024, max_total_body_bytes=4096).start()
    seen: list[float | None] = []
    token_ids = harness.service.prompts.token_ids

    async def watching(*args: Any) -> Any:
        seen.append(counted(harness))
        return await token_ids(*args)

    harness.service.prompts.token_ids = watching  # type: ignore[method-assign, assignment]
    body = json.dumps({"model": MODEL, "prompt": [5] * 100, "max_tokens": 1})
    assert (await harness.http().post("/v1/completions", content=body)).status_code == 200
    assert seen == [len(body)] and counted(harness) == 0
    for bad in ("x", "[]", '{"model":1}', body[:-1]):
        assert (await harness.http().post("/v1/completions", content=bad)).status_code == 400
        assert counted(harness) == 0


async def test_of_very_long_bodies_one_is_decoded_at_a_time_and_none_of_a_client_that_left(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await make(0, 1).start()
    at_once = 0
    most = 0
    gate = asyncio.Event()
    begun = 0
    parse_it = parse_long

    async def watching(*args: Any) -> Any:
        nonlocal at_once, most, begun
        begun += 1
        at_once += 1
        most = max(most, at_once)
        try:
            await gate.wait()
            return await parse_it(*args)
        finally:
            at_once -= 1

    monkeypatch.setattr("pdserve.router.http.calls.parse_long", watching)
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": [5],
            "max_tokens": 1,
            "user": "u" * 900_000,
            "metadata": "m" * 900_000,
        }
    )
    http = harness.http(timeout=120)

    async def pieces() -> AsyncIterator[bytes]:
        yield body.encode()

    asked = [asyncio.create_task(http.post("/v1/completions", content=pieces())) for _ in range(4)]
    await until(lambda: begun == 1 and (counted(harness) or 0) > 4 * MEGABYTE)
    asked[2].cancel()
    await asyncio.wait([asked[2]])
    gate.set()
    assert [(await task).status_code for task in (asked[0], asked[1], asked[3])] == [200] * 3
    assert most == 1 and begun == 3


@pytest.mark.parametrize(
    ("num_bytes", "most"), [(LONG_BODY + 1000, LONG_AT_ONCE), (ALONE_BYTES + 1000, 1)]
)
async def test_few_long_bodies_are_decoded_at_a_time(
    make: Make, num_bytes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values made from a body may take several times its size, until its prompts are
    admitted."""
    harness = await make(0, 1).start()
    now = 0
    peak = 0
    decode = calls.parse_long
    admit = Service.admit

    async def decoding(*given: Any) -> Any:
        nonlocal now, peak
        now += 1
        peak = max(peak, now)
        return await decode(*given)

    async def admitting(*given: Any, **options: Any) -> Any:
        nonlocal now
        try:
            await settle()
            return await admit(*given, **options)
        finally:
            now -= 1

    monkeypatch.setattr(calls, "parse_long", decoding)
    monkeypatch.setattr(Service, "admit", admitting)
    body = json.dumps({"model": MODEL, "prompt": [5], "max_tokens": 1}).encode() + b" " * num_bytes
    http = harness.http(timeout=120)
    answers = await asyncio.gather(
        *(http.post("/v1/completions", content=body) for _ in range(3 * LONG_AT_ONCE))
    )
    assert {answer.status_code for answer in answers} == {200}
    assert peak == most and now == 0
