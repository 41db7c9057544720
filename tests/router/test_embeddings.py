"""/v1/embeddings over fake workers: forms of input and answer, where prompts go, failures, and what
is refused."""

import base64
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from router.fake_worker import row_of
from router.harness import MODEL, Harness

from pdserve.configs.embedding import EmbeddingModel
from pdserve.protocol.commands import Submit

Make = Callable[..., Harness]

TEXT = "the quick brown fox"


@pytest.fixture
def embeds(make: Make) -> Make:
    return partial(make, embedding=EmbeddingModel(size=8))


def unit(ids: Any, size: int = 8) -> np.ndarray:
    row = row_of(tuple(ids))[:size]
    return row / np.linalg.norm(row)


async def posted(harness: Harness, status: int = 200, **body: Any) -> dict[str, Any]:
    path = body.pop("path", "/v1/embeddings")
    answer = await harness.http(timeout=60).post(path, json={"model": MODEL, **body})
    assert answer.status_code == status, answer.text[:500]
    data: dict[str, Any] = answer.json()
    return data if status == 200 else data["error"]


def submits(harness: Harness) -> dict[str, list[Submit]]:
    return {
        name: [each for each in worker.commands if isinstance(each, Submit)]
        for name, worker in harness.world.workers.items()
    }


async def test_inputs_of_every_form(embeds: Make) -> None:
    harness = await embeds(1, 1).start()
    ids = harness.tokenizer.encode(TEXT)
    for given, prompts in (
        (TEXT, [ids]),
        ([TEXT, "dog"], [ids, harness.tokenizer.encode("dog")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ):
        data = await posted(harness, input=given)
        assert [item["index"] for item in data["data"]] == list(range(len(prompts)))
        for item, prompt in zip(data["data"], prompts, strict=True):
            np.testing.assert_allclose(item["embedding"], unit(prompt), rtol=1e-6)
        count = sum(map(len, prompts))
        assert (data["object"], data["model"]) == ("list", MODEL)
        assert data["usage"]["prompt_tokens"] == data["usage"]["total_tokens"] == count
    plain = await posted(harness, input=TEXT, add_special_tokens=False)
    assert plain["usage"]["prompt_tokens"] == len(ids) - 1
    assert harness.world.held() == 0


async def test_answers_of_every_form(embeds: Make) -> None:
    """OpenAI's client asks for base64 by itself."""
    harness = await embeds(1, 1).start()
    ids = [5, 6, 7]
    found = await harness.openai().embeddings.create(model=MODEL, input=ids)
    np.testing.assert_allclose(found.data[0].embedding, unit(ids), rtol=1e-6)
    asked: dict[str, Any] = {
        "model": MODEL,
        "input": ids,
        "encoding_format": "float",
        "dimensions": 3,
    }
    cut = await harness.openai().embeddings.create(**asked)
    np.testing.assert_allclose(cut.data[0].embedding, unit(ids, 3), rtol=1e-6)
    [item] = (await posted(harness, input=ids, encoding_format="base64"))["data"]
    values = np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4")
    np.testing.assert_allclose(values, unit(ids), rtol=1e-6)
    [raw] = (await posted(harness, input=ids, normalize=False))["data"]
    np.testing.assert_allclose(raw["embedding"], row_of(tuple(ids)), rtol=1e-6)


async def test_prompts_go_to_workers_that_compute_prompts(embeds: Make) -> None:
    """Nothing is handed over; a decode worker takes them when nobody else is left."""
    harness = await embeds(2, 1, max_attempts=3).start()
    await posted(harness, input=[[n] * 20 for n in range(5, 11)])
    sent = submits(harness)
    assert sorted(map(len, sent.values())) == [0, 3, 3] and not sent["d0"]
    every = [each for of in sent.values() for each in of]
    assert {(each.phase, each.kind, each.ticket) for each in every} == {("full", "embed", None)}
    for worker in harness.prefills:
        worker.fail_submit = lambda submit: "internal"
    await posted(harness, input=TEXT)
    assert len(submits(harness)["d0"]) == 1 and harness.world.held() == 0


async def test_calls_count_as_requests(embeds: Make) -> None:
    harness = await embeds(1, 1).start()
    await posted(harness, input=[[5, 6], [7]])
    page = (await harness.http().get("/metrics")).text
    values = {
        (sample.name, sample.labels.get("outcome")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert values["pdserve_router_requests_total", "ok"] == 2
    assert values["pdserve_router_prompt_tokens_total", None] == 3
    assert values["pdserve_router_generation_tokens_total", None] == 0
    assert values["pdserve_router_time_to_first_token_seconds_count", None] == 2


async def test_inputs_are_cut_to_their_first_tokens(embeds: Make) -> None:
    harness = await embeds(1, 1).start()
    ids = list(range(5, 105))
    data = await posted(harness, input=ids, truncate_prompt_tokens=10)
    np.testing.assert_allclose(data["data"][0]["embedding"], unit(ids[:10]), rtol=1e-6)
    long = [5] * 70_000  # of a long body, too
    data = await posted(harness, input=[long, [6]], truncate_prompt_tokens=-1)
    assert data["usage"]["prompt_tokens"] == harness.prefills[0].max_tokens + 1


async def test_what_is_wrong_is_named(embeds: Make) -> None:
    harness = await embeds(1, 1, max_concurrent_prompts=100).start()
    most = harness.prefills[0].max_tokens
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"input": ""}, "input", "input is empty"),
        ({"input": []}, "input", "input is an empty list"),
        ({"input": ["a", ""]}, "input", "input[1] is empty"),
        ({"input": [[5], []]}, "input", "input[1] is empty"),
        ({"input": ["a", 5]}, "input", "mixes texts and token ids"),
        (
            {"input": [5] * (most + 1)},
            "input",
            f"{most + 1} tokens in input: shorten input",
        ),
        ({"input": [[5] * 70_000]}, "input", "you requested 70000 tokens in input: shorten"),
        ({"input": [999]}, "input", "input holds token ids outside the vocabulary"),
        ({"input": [[5]] * 101}, "input", "input: 101 prompts in a call"),
        ({"input": "a", "dimensions": 9}, "dimensions", "dimensions must be from 1 to 8"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions must be from 1 to 8"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "Invalid enum value"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or from 1 to"),
        ({"messages": []}, "messages", "render the conversation yourself"),
        ({"input": "a", "stream": True}, "stream", "embeddings come at once"),
        ({}, "input", "missing required field `input`"),
    ]
    for body, param, message in cases:
        error = await posted(harness, 400, **body)
        assert error["param"] == param and message in error["message"], error
    assert not any(submits(harness).values())
    await posted(harness, input=[5] * most)


async def test_a_model_is_for_one_thing(embeds: Make, make: Make) -> None:
    embedding = await embeds(1, 1).start()
    said = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": said}),
        ("/v1/responses", {"input": "a"}),
    ):
        error = await posted(embedding, 400, path=path, **body)
        assert (error["param"], error["code"]) == ("model", "wrong_task")
        assert "send texts to /v1/embeddings" in error["message"]
    generating = await make(1, 1).start()
    error = await posted(generating, 400, input="a")
    assert (error["param"], error["code"]) == ("model", "wrong_task")
    with pytest.raises(openai.NotFoundError):
        await embedding.openai().embeddings.create(model="other", input="a")
