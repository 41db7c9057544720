"""The tokenizer's endpoints work as vLLM's clients and lm-eval's remote tokenizer use them.

So do the pages for load balancers.
"""

from collections.abc import Callable
from typing import Any

import jinja2
import pytest
from router.harness import MODEL, Harness
from text.backends import TEMPLATE

import pdserve

Make = Callable[..., Harness]

TEXT = "the quick brown fox, caf\u00e9"
SAID = [{"role": "user", "content": TEXT}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}


async def posted(harness: Harness, path: str, **body: Any) -> dict[str, Any]:
    answer = await harness.http(timeout=120).post(path, json=body)
    assert answer.status_code == 200, answer.text[:500]
    data: dict[str, Any] = answer.json()
    return data


async def test_a_text(make: Make) -> None:
    harness = await make(1, 1).start()
    tokenizer = harness.tokenizer
    for adds in (None, True, False):
        data = await posted(harness, "/tokenize", prompt=TEXT, add_special_tokens=adds)
        ids = tokenizer.encode(TEXT, add_special_tokens=adds is not False)
        assert data == {
            "count": len(ids),
            "max_model_len": harness.decodes[0].max_tokens,
            "tokens": ids,
            "token_strs": None,
        }
    assert (await posted(harness, "/tokenize", prompt="", add_special_tokens=False))["tokens"] == []
    named = await posted(harness, "/tokenize", prompt=TEXT, model=MODEL, return_token_strs=True)
    texts = named["token_strs"]
    assert len(texts) == named["count"] and texts[0] == "<|bos|>" and "\u0120" in "".join(texts)


async def test_a_conversation(make: Make) -> None:
    harness = await make(1, 1).start()
    tokenizer = harness.tokenizer
    begun = [*SAID, {"role": "assistant", "content": "It"}]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"messages": SAID}, tokenizer.render_chat(SAID)),
        (
            {"messages": SAID, "add_generation_prompt": False},
            tokenizer.render_chat(SAID, add_generation_prompt=False),
        ),
        (
            {"messages": begun, "continue_final_message": True, "add_generation_prompt": False},
            tokenizer.render_chat(begun, continue_final_message=True),
        ),
    ]
    for body, text in cases:
        for adds in (None, False, True):
            data = await posted(harness, "/tokenize", **body, add_special_tokens=adds)
            assert data["tokens"] == tokenizer.encode(text, add_special_tokens=bool(adds))
    asked = {"model": MODEL, "messages": SAID, "max_tokens": 2}
    answer = await posted(harness, "/v1/chat/completions", **asked)
    counted = await posted(harness, "/tokenize", messages=SAID)
    assert answer["usage"]["prompt_tokens"] == counted["count"]


async def test_tools_are_part_of_the_prompt(say: Any) -> None:
    harness = await say("x")
    plain = await posted(harness, "/tokenize", messages=SAID)
    shown = await posted(harness, "/tokenize", messages=SAID, tools=[TOOL])
    assert shown["count"] > plain["count"]
    text = await posted(harness, "/detokenize", tokens=shown["tokens"])
    assert "get_weather" in text["prompt"]


@pytest.mark.parametrize("size", [5, 9000, 200_000])
async def test_a_text_may_be_longer_than_the_context(make: Make, size: int) -> None:
    harness = make(1, 1)
    for worker in (*harness.prefills, *harness.decodes):
        worker.max_tokens = 256
    await harness.start()
    text = "fox " * size
    data = await posted(harness, "/tokenize", prompt=text)
    assert data["tokens"] == harness.tokenizer.encode(text)
    said = await posted(harness, "/tokenize", messages=[{"role": "user", "content": text}])
    assert said["count"] > data["count"] - 2
    given = await posted(harness, "/detokenize", tokens=data["tokens"][1:100_000])
    assert text.startswith(given["prompt"]) and given["prompt"]


async def test_ids_to_text_and_back(make: Make) -> None:
    harness = await make(1, 1).start()
    for ids in ([], harness.tokenizer.encode(TEXT), [0, 1, 2]):
        data = await posted(harness, "/detokenize", tokens=ids, model=MODEL)
        assert data == {"prompt": harness.tokenizer.decode(ids, skip_special_tokens=False)}
    data = await posted(harness, "/detokenize", tokens=[0])
    assert data == {"prompt": "<|bos|>"}


WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": SAID}, 400, "prompt"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"),
    ("/tokenize", {"prompt": "x", "tools": [TOOL]}, 400, "tools"),
    ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
    ("/tokenize", {"prompt": "x", "temperature": 1}, 400, "temperature"),
    ("/tokenize", {"messages": []}, 400, "messages"),
    ("/tokenize", {"messages": [{"role": "alien", "content": "x"}]}, 400, "messages"),
    (
        "/tokenize",
        {"messages": SAID, "continue_final_message": True, "add_generation_prompt": True},
        400,
        "add_generation_prompt",
    ),
    ("/tokenize", {"messages": SAID, "chat_template": "x"}, 400, "chat_template"),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": "x"}, 400, "tokens"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/detokenize", {"tokens": [403]}, 400, "tokens"),
    ("/detokenize", {"tokens": [5], "model": "other"}, 404, "model"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), WRONG)
async def test_what_is_wrong_is_named(
    make: Make, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    harness = await make(1, 1).start()
    answer = await harness.http().post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


class RemoteTokenizer:
    """As lm-eval's: no model is named, and templates are rendered by the client."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness

    async def info(self) -> dict[str, Any]:
        answer = await self._harness.http().get("/tokenizer_info")
        assert answer.status_code == 200
        data: dict[str, Any] = answer.json()
        return data

    async def encode(self, text: str) -> list[int]:
        data = await posted(self._harness, "/tokenize", prompt=text, add_special_tokens=False)
        return list(data["tokens"])

    async def decode(self, ids: list[int]) -> str:
        return str((await posted(self._harness, "/detokenize", tokens=ids))["prompt"])


async def test_lm_evals_remote_tokenizer(make: Make) -> None:
    harness = await make(1, 1).start()
    client = RemoteTokenizer(harness)
    info = await client.info()
    assert (info["eos_token"], info["bos_token"], info["pad_token"]) == (
        "<|im_end|>",
        "<|bos|>",
        None,
    )
    assert await client.encode(info["eos_token"]) == [2]
    assert await client.decode(await client.encode(TEXT)) == TEXT
    assert info["chat_template"] == TEMPLATE
    rendered = jinja2.Template(info["chat_template"], trim_blocks=True, lstrip_blocks=True).render(
        messages=SAID, add_generation_prompt=True, bos_token=info["bos_token"]
    )
    shown = await posted(harness, "/tokenize", messages=SAID)
    assert await client.encode(rendered) == shown["tokens"]
    assert info["model_max_length"] == harness.decodes[0].max_tokens
    assert info["added_tokens_decoder"]["0"]["content"] == "<|bos|>"
    assert info["added_tokens_decoder"]["0"]["special"] is True


async def test_pages_for_load_balancers(make: Make) -> None:
    harness = await make(1, 1).start()
    http = harness.http()
    assert (await http.get("/ping")).status_code == 200
    assert (await http.post("/ping")).status_code == 200
    assert (await http.get("/version")).json() == {"version": pdserve.__version__}
    assert (await http.get("/load")).json() == {"server_load": 0}
    seats = harness.service.admission.enter(2)
    assert (await http.get("/load")).json() == {"server_load": 2}
    for seat in seats:
        seat.leave()
    alone = make(1, 0)
    assert (await alone.http().get("/ping")).status_code == 503


async def test_keys_protect_all_but_health_and_version(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEYS", "first-key")
    harness = await make(1, 1, api_key_env="SOME_KEYS").start()
    http = harness.http()
    key = {"authorization": "Bearer first-key"}
    for method, path, body in (
        ("POST", "/tokenize", {"prompt": "x"}),
        ("POST", "/detokenize", {"tokens": [5]}),
        ("GET", "/tokenizer_info", None),
        ("GET", "/load", None),
    ):
        assert (await http.request(method, path, json=body)).status_code == 401
        assert (await http.request(method, path, json=body, headers=key)).status_code == 200
    for path in ("/ping", "/version", "/health"):
        assert (await http.get(path)).status_code == 200


async def test_the_model_card_has_what_vllms_has(make: Make) -> None:
    harness = await make(1, 1).start()
    [card] = (await harness.http().get("/v1/models")).json()["data"]
    created = card.pop("created")
    assert isinstance(created, int) and created > 1_700_000_000
    assert card == {
        "id": MODEL,
        "object": "model",
        "owned_by": "pdserve",
        "root": MODEL,
        "parent": None,
        "max_model_len": harness.decodes[0].max_tokens,
    }
    [again] = [model async for model in await harness.openai().models.list()]
    assert again.created == created
