"""Habits of OpenAI's and vLLM's clients work: values that ask for nothing, usage in every event,
tokens named by their ids, prompts to be cut."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from router.harness import MODEL, Harness

from pdserve.text.long_texts import LEAST_PROBE
from pdserve.text.tokenizer import Tokenizer

Make = Callable[..., Harness]

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
SAID = [{"role": "user", "content": "the quick brown fox"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETION: {"model": MODEL, "prompt": "the quick brown fox", "max_tokens": 6, "seed": 5},
    CHAT: {"model": MODEL, "messages": SAID, "max_tokens": 6, "seed": 5},
    RESPONSES: {"model": MODEL, "input": "fox", "max_output_tokens": 6, "seed": 5},
    MESSAGES: {"model": MODEL, "messages": SAID, "max_tokens": 6, "seed": 5},
}

# as vLLM's and OpenAI's clients write what they do not use
EVERYWHERE: dict[str, Any] = {
    "stream": False,
    "echo": False,
    "n": 1,
    "top_logprobs": 0,
    "length_penalty": 1.0,
    "use_beam_search": False,
    "spaces_between_special_tokens": True,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "logit_bias": {},
    "bad_words": [],
    "allowed_token_ids": None,
    "stop_token_ids": [],
    "min_tokens": 0,
    "prompt_logprobs": None,
    "top_k": -1,
    "truncate_prompt_tokens": None,
}
OPENAIS: dict[str, Any] = EVERYWHERE | {
    "best_of": 1,
    "continue_final_message": False,
    "add_special_tokens": False,
    "frequency_penalty": 0,
    "function_call": "none",
    "functions": [],
    "tools": [],
    "tool_choice": "none",
    "modalities": ["text"],
    "mm_processor_kwargs": {},
    "logits_processors": [],
    "kv_transfer_params": {},
    "vllm_xargs": {},
    "documents": [],
    "chat_template_kwargs": {},
    "guided_json": None,
    "response_format": {"type": "text"},
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "stream_options": {},
    "suffix": "",
    "verbosity": "medium",
}


@pytest.mark.parametrize("path", BODIES)
async def test_values_that_ask_for_nothing_are_taken(make: Make, path: str) -> None:
    harness = await make(1, 1).start()
    http = harness.http()
    values = OPENAIS if path in (COMPLETION, CHAT) else EVERYWHERE
    for name, value in values.items():
        answer = await http.post(path, json=BODIES[path] | {name: value})
        assert answer.status_code == 200, (name, answer.text)
    answer = await http.post(path, json=BODIES[path] | values)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("value", ["none", "auto"])
async def test_old_function_calls_may_be_switched_off(make: Make, value: str) -> None:
    harness = await make(1, 1).start()
    for path in (COMPLETION, CHAT, RESPONSES):
        body = BODIES[path] | {"function_call": value}
        assert (await harness.http().post(path, json=body)).status_code == 200
    body = BODIES[CHAT] | {"function_call": {"name": "f"}}
    error = (await harness.http().post(CHAT, json=body)).json()["error"]
    assert error["param"] == "function_call" and "send tool_choice" in error["message"]


async def events(harness: Harness, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = await harness.http().post(path, json=BODIES[path] | {"stream": True} | body)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


NEUTRAL_OPTIONS: list[dict[str, Any] | None] = [
    None,
    {},
    {"include_usage": False},
    {"include_usage": None, "continuous_usage_stats": None},
    {"continuous_usage_stats": False},
    {"continuous_usage_stats": True},  # alone it asks for nothing, as with vLLM
    {"include_obfuscation": False},
    {"include_obfuscation": True},
]


@pytest.mark.parametrize("options", NEUTRAL_OPTIONS)
@pytest.mark.parametrize("path", [COMPLETION, CHAT])
async def test_neutral_stream_options_change_nothing(
    make: Make, path: str, options: dict[str, Any] | None
) -> None:
    harness = await make(1, 1).start()
    shown = [event["choices"] for event in await events(harness, path)]
    given = await events(harness, path, stream_options=options)
    assert [event["choices"] for event in given] == shown
    assert not any("usage" in event for event in given)


async def test_stream_options_that_ask_for_something_need_a_stream(make: Make) -> None:
    harness = await make(1, 1).start()
    for options, status in (({"include_usage": True}, 400), ({"include_usage": False}, 200)):
        body = BODIES[CHAT] | {"stream_options": options}
        assert (await harness.http().post(CHAT, json=body)).status_code == status


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
async def test_usage_in_every_event(make: Make, path: str) -> None:
    harness = await make(1, 1).start()
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {"n": 2, "return_token_ids": True, "stream_options": options}
    *given, last = await events(harness, path, **asked)
    num_prompt = last["usage"]["prompt_tokens"]
    counted = {0: 0, 1: 0}
    for event in given:
        [choice] = event["choices"]
        counted[choice["index"]] += len(choice.get("token_ids") or ())
        now = counted[choice["index"]]
        assert event["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": now,
            "total_tokens": num_prompt + now,
        }
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == sum(counted.values())
    assert min(counted.values()) > 1 and len(given) > 4


async def test_usage_of_each_prompt_is_its_own(make: Make) -> None:
    harness = await make(1, 1).start()
    options = {"include_usage": True, "continuous_usage_stats": True}
    prompts = [[5], [5, 6, 7]]
    *given, last = await events(harness, COMPLETION, prompt=prompts, n=2, stream_options=options)
    for event in given:
        index = event["choices"][0]["index"]
        assert event["usage"]["prompt_tokens"] == len(prompts[index // 2])
    assert last["usage"]["prompt_tokens"] == 4


async def test_log_probabilities_by_token_ids(make: Make) -> None:
    harness = await make(1, 1).start()
    http = harness.http()
    asked: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    body = BODIES[COMPLETION] | asked | {"logprobs": 2, "echo": True}
    [choice] = (await http.post(COMPLETION, json=body)).json()["choices"]
    plain = await http.post(COMPLETION, json=body | {"return_tokens_as_token_ids": False})
    [other] = plain.json()["choices"]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    shown = choice["logprobs"]
    assert shown["tokens"] == [f"token_id:{token}" for token in ids] != other["logprobs"]["tokens"]
    assert shown["token_logprobs"] == other["logprobs"]["token_logprobs"]
    assert shown["text_offset"] == other["logprobs"]["text_offset"]
    for token, top in zip(ids[1:], shown["top_logprobs"][1:], strict=True):
        assert f"token_id:{token}" in top and all(name.startswith("token_id:") for name in top)

    body = BODIES[CHAT] | asked | {"logprobs": True, "top_logprobs": 2}
    [choice] = (await http.post(CHAT, json=body)).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [p["token"] for p in content] == [f"token_id:{t}" for t in choice["token_ids"]]
    for position in content:
        for entry in (position, *position["top_logprobs"]):
            token = int(entry["token"].removeprefix("token_id:"))
            assert bytes(entry["bytes"]) == harness.tokenizer.token_bytes(token)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_prompt_is_cut_to_its_last_tokens(make: Make, streams: bool) -> None:
    harness = await make(1, 1).start()
    text = "the quick brown fox " * 20
    ids = harness.tokenizer.encode(text)
    begins = ids[:1]  # the special token before a text, which stays, as with vLLM
    rendered = harness.tokenizer.apply_chat_template([{"role": "user", "content": text}])
    asked: dict[str, Any] = {"truncate_prompt_tokens": 7, "return_token_ids": True}
    cases: list[tuple[str, dict[str, Any], list[int]]] = [
        (COMPLETION, {"prompt": text}, begins + ids[-6:]),
        (COMPLETION, {"prompt": [text]}, begins + ids[-6:]),
        (COMPLETION, {"prompt": text, "add_special_tokens": False}, ids[-7:]),
        (COMPLETION, {"prompt": ids}, ids[-7:]),
        (CHAT, {"messages": [{"role": "user", "content": text}]}, rendered[-7:]),
    ]
    for path, prompt, expected in cases:
        if streams:
            first = (await events(harness, path, **prompt, **asked))[0]
            shown = first if path == CHAT else first["choices"][0]
        else:
            answer = await harness.http().post(path, json=BODIES[path] | prompt | asked)
            assert answer.status_code == 200, answer.text
            data = answer.json()
            assert data["usage"]["prompt_tokens"] == 7
            shown = data if path == CHAT else data["choices"][0]
        assert shown["prompt_token_ids"] == expected
        assert harness.prefills[0].submits()[-1].prompt_token_ids == tuple(expected)


async def test_an_echo_shows_what_was_left(make: Make) -> None:
    harness = await make(1, 1).start()
    text = "the quick brown fox " * 20
    asked = {"prompt": text, "truncate_prompt_tokens": 7, "echo": True}
    answer = await harness.http().post(COMPLETION, json=BODIES[COMPLETION] | asked)
    left = harness.tokenizer.decode(harness.tokenizer.encode(text)[-6:])
    assert answer.json()["choices"][0]["text"].startswith(left)
    assert len(left) < 40


@pytest.mark.parametrize("size", [1, LEAST_PROBE // 4, 40_000, 400_000])
async def test_minus_one_keeps_as_much_as_leaves_room(make: Make, size: int) -> None:
    """The sizes cover every way: tokenised at once, in a thread, from the end of a long text, and
    in a long body."""
    harness = make(1, 1)
    for worker in (*harness.prefills, *harness.decodes):
        worker.max_tokens = 256
    await harness.start()
    text = "fox " * size
    ids = harness.tokenizer.encode(text)
    asked: dict[str, Any] = {"truncate_prompt_tokens": -1, "max_tokens": 6}
    rendered = harness.tokenizer.apply_chat_template([{"role": "user", "content": text}])
    cases: list[tuple[str, dict[str, Any], list[int]]] = [
        (COMPLETION, {"prompt": text}, ids[:1] + ids[1:][-249:]),
        (COMPLETION, {"prompt": ids}, ids[-250:]),
        (CHAT, {"messages": [{"role": "user", "content": text}]}, rendered[-250:]),
    ]
    for path, prompt, expected in cases:
        answer = await harness.http(timeout=120).post(path, json=BODIES[path] | prompt | asked)
        assert answer.status_code == 200, answer.text[:500]
        assert harness.prefills[0].submits()[-1].prompt_token_ids == tuple(expected)


async def test_what_truncation_cannot_be(make: Make) -> None:
    harness = await make(1, 1).start()
    limit = harness.decodes[0].max_tokens
    for value in (0, -2, limit):
        body = BODIES[COMPLETION] | {"truncate_prompt_tokens": value}
        answer = await harness.http().post(COMPLETION, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "truncate_prompt_tokens"), error
        assert f"from 1 to {limit - 1}" in error["message"]


def test_special_tokens_around_a_text_stay(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the quick brown fox")
    assert ids[0] == 0 and len(ids) > 5
    assert tokenizer.encode_last("the quick brown fox", 5) == [0, *ids[-4:]]
    assert tokenizer.encode_last("the quick brown fox", 99) == ids
    assert tokenizer.encode_last("the quick brown fox", 5, False) == ids[-5:]
    assert tokenizer.encode_last("the quick brown fox", 1) == [0]


async def test_whole_answers_have_the_null_fields_of_vllm(make: Make) -> None:
    harness = await make(1, 1).start()
    http = harness.http()
    data = (await http.post(COMPLETION, json=BODIES[COMPLETION])).json()
    [choice] = data["choices"]
    names = {"logprobs", "prompt_logprobs", "prompt_token_ids", "token_ids", "stop_reason"}
    assert all(name in choice and choice[name] is None for name in names), choice
    assert (data["service_tier"], data["system_fingerprint"]) == (None, None)
    data = (await http.post(CHAT, json=BODIES[CHAT])).json()
    [choice] = data["choices"]
    assert all(name in choice and choice[name] is None for name in ("logprobs", "token_ids"))
    names = {"prompt_logprobs", "prompt_token_ids", "service_tier", "system_fingerprint"}
    assert all(name in data and data[name] is None for name in names), data
    assert set(choice["message"]) == {"role", "content"}  # which clients send back
    asked = {"return_token_ids": True, "prompt_logprobs": 0}
    data = (await http.post(CHAT, json=BODIES[CHAT] | asked)).json()
    assert len(data["prompt_token_ids"]) == len(data["prompt_logprobs"]) > 0


@pytest.mark.parametrize("path", BODIES)
async def test_a_wrong_bias_names_its_key(make: Make, path: str) -> None:
    harness = await make(1, 1).start()
    bad: list[tuple[dict[str, Any], str]] = [
        ({"fox": 1}, "fox"),
        ({"5": 1, "-7": 1}, "-7"),
        ({"5": 1, "78": "x"}, "78"),
        ({"5": 1, "78": True}, "78"),
        ({"5": 1, "78": 101}, "78"),
        ({"5": 1, "9999999": 1}, "9999999"),
    ]
    for bias, key in bad:
        answer = await harness.http().post(path, json=BODIES[path] | {"logit_bias": bias})
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and message.startswith("logit_bias"), message
        assert key in message, message


@pytest.mark.parametrize(
    ("path", "name", "near"),
    [
        (COMPLETION, "max_token", "max_tokens"),
        (COMPLETION, "temprature", "temperature"),
        (CHAT, "max_new_tokens", "max_tokens"),
        (MESSAGES, "stop_sequence", "stop_sequences"),
        (COMPLETION, "watermark", None),
        (CHAT, "typical_p", None),
        (CHAT, "stop_words", None),
        (MESSAGES, "guidance", None),
        (RESPONSES, "best", None),
    ],
)
async def test_a_name_is_suggested_only_when_it_is_near(
    make: Make, path: str, name: str, near: str | None
) -> None:
    harness = await make(1, 1).start()
    answer = await harness.http().post(path, json=BODIES[path] | {name: 1})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and f"{name} is not supported" in message
    assert (f"did you mean {near}?" in message) if near else ("did you mean" not in message)


async def test_alternatives_are_named_as_sent_where_there_are_none(make: Make) -> None:
    harness = await make(1, 1).start()
    for name, value in (("top_logprobs", 3), ("logprobs", True)):
        answer = await harness.http().post(MESSAGES, json=BODIES[MESSAGES] | {name: value})
        message = answer.json()["error"]["message"]
        assert message.startswith(f"{name} is not supported: send the request to"), message
    answer = await harness.http().post(COMPLETION, json=BODIES[COMPLETION] | {"top_logprobs": 3})
    assert "top_logprobs is not supported: send logprobs" in answer.json()["error"]["message"]
