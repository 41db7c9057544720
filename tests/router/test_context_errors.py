"""Errors about the context's length: in the words by which clients know them, and with the names of
the fields that the client sent, in every dialect."""

from collections.abc import Callable
from typing import Any

import pytest
from router.harness import MODEL, Harness

Make = Callable[..., Harness]

LONG = "fox " * 400  # more than the 256 tokens of a worker; its characters alone do not tell
WORDS = "This model's maximum context length is"
CHAT = "/v1/chat/completions"


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def refused(harness: Harness, path: str, **body: Any) -> dict[str, Any]:
    answer = await harness.http().post(path, json={"model": MODEL, **body})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert WORDS in error["message"] and "However, you requested" in error["message"], error
    return error


CASES: list[tuple[str, dict[str, Any], str, list[str], list[str]]] = [
    # path, body, param, names that the message has, and those that it must not have
    ("/v1/completions", {"prompt": LONG}, "prompt", ["prompt"], ["max_tokens", "messages"]),
    ("/v1/completions", {"prompt": [5] * 300}, "prompt", ["prompt"], ["messages"]),
    (
        "/v1/completions",
        {"prompt": "fox", "max_tokens": 300},
        "max_tokens",
        ["prompt", "max_tokens"],
        ["messages", "max_completion_tokens"],
    ),
    ("/v1/completions", {"prompt": [5] * 250}, "prompt", ["default"], ["in max_tokens"]),
    (CHAT, {"messages": said(LONG)}, "messages", ["messages"], ["prompt", "max_"]),
    (
        CHAT,
        {"messages": said("fox"), "max_completion_tokens": 300},
        "max_completion_tokens",
        ["messages", "max_completion_tokens"],
        ["prompt", "max_tokens"],
    ),
    (
        CHAT,
        {"messages": said("fox"), "max_tokens": 300},
        "max_tokens",
        ["messages", "max_tokens"],
        ["prompt", "max_completion_tokens"],
    ),
    (
        CHAT,
        {"messages": said("fox"), "min_tokens": 300},
        "min_tokens",
        ["messages", "min_tokens"],
        ["max_"],
    ),
    ("/v1/responses", {"input": LONG}, "input", ["input"], ["messages", "prompt", "max_"]),
    (
        "/v1/responses",
        {"input": "fox", "max_output_tokens": 300},
        "max_output_tokens",
        ["input", "max_output_tokens"],
        ["messages", "prompt", "max_tokens"],
    ),
    ("/v1/responses/input_tokens", {"input": LONG}, "input", ["input"], ["messages"]),
]


@pytest.mark.parametrize(("path", "body", "param", "named", "unnamed"), CASES)
async def test_it_names_what_the_client_sent(
    make: Make, path: str, body: dict[str, Any], param: str, named: list[str], unnamed: list[str]
) -> None:
    harness = make(1, 1)
    for worker in (*harness.prefills, *harness.decodes):
        worker.max_tokens = 256
    await harness.start()
    error = await refused(harness, path, **body)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert f"{WORDS} 256 tokens" in error["message"]
    for name in named:
        assert name in error["message"], error
    for name in unnamed:
        assert name not in error["message"], error


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_anthropics_words_stand_before_it(make: Make, path: str) -> None:
    harness = make(1, 1)
    for worker in (*harness.prefills, *harness.decodes):
        worker.max_tokens = 256
    await harness.start()
    limit = {} if path.endswith("count_tokens") else {"max_tokens": 5}
    for text in (LONG, "fox " * 50_000):
        error = await refused(harness, path, messages=said(text), **limit)
        assert error["message"].startswith(f"messages: prompt is too long: {WORDS} 256 tokens")


async def test_a_routers_own_limit_reads_alike(make: Make) -> None:
    harness = await make(1, 1, max_prompt_tokens=20).start()
    error = await refused(harness, "/v1/completions", prompt=[5] * 30)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "router.max_prompt_tokens" in error["message"] and "30" in error["message"]


async def test_too_many_alternatives_are_named_as_sent(make: Make) -> None:
    harness = await make(1, 1, max_logprobs=3).start()
    bodies: list[tuple[str, dict[str, Any], str]] = [
        (CHAT, {"messages": said("fox"), "logprobs": True, "top_logprobs": 9}, "top_logprobs"),
        ("/v1/completions", {"prompt": "fox", "logprobs": 9}, "logprobs"),
    ]
    for path, body, param in bodies:
        answer = await harness.http().post(path, json={"model": MODEL, **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert error["message"].startswith(f"{param} (9) must not exceed 3")
