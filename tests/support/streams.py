"""Streams of the failover tests: many kinds of requests to one router, and what of their answers
must not differ.

`kinds` makes the requests, `Ask` is one on its way, and `fold` joins an answer's events. How tokens
are cut into events depends on timing; everything else must be equal to the byte. Knows no workers;
used by tests/test_failover*.py.
"""

import json
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import httpx

from demo.recall import recall_prompts

Json = dict[str, Any]

LENGTH = 128  # tokens of a choice, where nothing ends it before
MODEL = "pdserve-demo"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class Ask:
    """One request and what came of it. times: perf_counter() of every event."""

    def __init__(self, name: str, path: str, body: Json) -> None:
        self.name = name
        self.path = path
        self.body = {"model": MODEL, "stream": True, **body}
        self.lines: list[str] = []
        self.times: list[float] = []
        self.counts: dict[int, int] = {}
        self.ended: set[int] = set()

    @property
    def streams(self) -> bool:
        return bool(self.body["stream"])

    @property
    def shows_tokens(self) -> bool:
        return self.streams and bool(self.body.get("return_token_ids"))

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)

    async def run(self, client: httpx.AsyncClient, **more: Any) -> bytes:
        """The folded answer; AssertionError when it is no whole one. Nobody has KV of its
        prompt."""
        body = self.body | more | {"cache_salt": uuid.uuid4().hex}
        if not self.streams:
            answer = await client.post(self.path, json=body)
            assert answer.status_code == 200, (self.name, answer.text)
            whole = answer.json()
            return _encode(
                {key: value for key, value in whole.items() if key not in ("id", "created")}
            )
        async with client.stream("POST", self.path, json=body) as response:
            assert response.status_code == 200, (self.name, await response.aread())
            async for line in response.aiter_lines():
                if line:
                    self._take(line)
        return fold(self.lines)

    def _take(self, line: str) -> None:
        self.lines.append(line)
        self.times.append(time.perf_counter())
        if line == "data: [DONE]":
            return
        for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
            index = choice["index"]
            self.counts[index] = self.counts.get(index, 0) + len(choice.get("token_ids") or ())
            if choice["finish_reason"] is not None:
                self.ended.add(index)


def fold(lines: list[str]) -> bytes:
    """One JSON text of a stream: the events of each choice joined, usage, and the fields all events
    share but `id` and `created`. AssertionError for a stream that is not well formed."""
    *data, done = [line.removeprefix("data: ") for line in lines]
    assert done == "[DONE]", lines[-3:]
    heads = set()
    choices = dict[int, Json]()
    usage = None
    for event in map(json.loads, data):
        assert "error" not in event, event
        heads.add((event.pop("id"), event.pop("created"), event["object"], event["model"]))
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            before = choices.setdefault(choice["index"], {})
            assert before.get("finish_reason") is None, f"an event behind the end: {choice}"
            choices[choice["index"]] = _join(before, choice)
    [(_, _, kind, model)] = heads
    assert all(choice["finish_reason"] for choice in choices.values())
    return _encode({"object": kind, "model": model, "choices": choices, "usage": usage})


def _join(before: Any, new: Any) -> Any:
    if before is None or new is None:
        return new if before is None else before
    if isinstance(new, dict):
        return {**before, **{key: _join(before.get(key), value) for key, value in new.items()}}
    if isinstance(new, (str, list)):
        return before + new
    assert before == new
    return new


def _encode(answer: Json) -> bytes:
    return json.dumps(answer, sort_keys=True).encode()


def prompts(num_chars: Sequence[int]) -> list[str]:
    """Makes one prompt of each length."""
    return [
        p.prompt[-n:]
        for p, n in zip(recall_prompts(seed=55, num_prompts=len(num_chars)), num_chars, strict=True)
    ]


GREEDY: Json = {
    "temperature": 0,
    "ignore_eos": True,
    "max_tokens": LENGTH,
    "return_token_ids": True,
}
SAMPLED: Json = GREEDY | {"temperature": 0.9, "top_p": 0.95}


def kinds(
    prompt: str, seed: int, greedy: list[int], sampled: list[list[int]], decode: Callable[..., str]
) -> list[Ask]:
    """One request of each kind. greedy: tokens of GREEDY with this prompt; sampled: of the three
    choices of SAMPLED with it and this seed. The strings that stop lie over tokens 6 to 70: what is
    cut between is cut within them.
    """
    base = GREEDY | {"prompt": prompt}
    drawn = SAMPLED | {"prompt": prompt, "seed": seed}
    stop = decode(greedy[:70]).removeprefix(decode(greedy[:6]))
    early = ending(sampled, 8)
    late = greedy[LENGTH - 20]
    chat = [{"role": "user", "content": f"Go on: {prompt[-60:]}"}]
    usage = {"stream_options": {"include_usage": True}}

    def completion(name: str, body: Json) -> Ask:
        return Ask(name, COMPLETIONS, body)

    return [
        completion("greedy", base | usage),
        completion("text alone", base | {"return_token_ids": False}),
        completion("seeded", drawn),
        completion("hot", drawn | {"temperature": 3.0, "top_p": 1.0, "skip_special_tokens": False}),
        completion(
            "filters", drawn | {"top_k": 20, "min_p": 0.02, "logit_bias": {str(greedy[3]): -5}}
        ),
        completion(
            "penalties",
            drawn | {"presence_penalty": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        ),
        completion(
            "greedy penalties", base | {"repetition_penalty": 1.3, "frequency_penalty": 1.0}
        ),
        completion("three choices", drawn | {"n": 3, "stop_token_ids": [early]} | usage),
        completion("logprobs", drawn | {"logprobs": 3}),
        completion("echo", base | {"echo": True, "logprobs": 2}),
        completion(
            "prompt logprobs",
            drawn | {"stream": False, "prompt_logprobs": 2, "logprobs": 1, "n": 2},
        ),
        completion("stop string", base | {"stop": [stop]} | usage),
        completion(
            "stop string shown", base | {"stop": [stop, "\0"], "include_stop_str_in_output": True}
        ),
        completion(
            "min tokens", drawn | {"n": 2, "min_tokens": 60, "stop_token_ids": [early, late]}
        ),
        Ask("chat", CHAT, GREEDY | usage | {"messages": chat}),
        Ask(
            "chat logprobs",
            CHAT,
            SAMPLED | {"messages": chat, "seed": seed, "logprobs": True, "top_logprobs": 2},
        ),
    ]


async def drafted(
    client: httpx.AsyncClient, texts: Sequence[str], decode: Callable[..., str]
) -> Callable[[], list[Ask]]:
    """Returns what makes one request of each kind for every text.

    The requests are made for what an undisturbed server answers to the texts.
    """

    async def tokens(body: Json) -> list[list[int]]:
        answer = await client.post(COMPLETIONS, json={"model": MODEL, **body})
        assert answer.status_code == 200, answer.text
        return [choice["token_ids"] for choice in answer.json()["choices"]]

    drafts: list[Callable[[], list[Ask]]] = []
    for seed, text in enumerate(texts):
        [greedy] = await tokens(GREEDY | {"prompt": text})
        sampled = await tokens(SAMPLED | {"prompt": text, "seed": seed, "n": 3})
        drafts.append(partial(kinds, text, seed, greedy, sampled, decode))
    return lambda: [ask for draft in drafts for ask in draft()]


def mid_stream(asks: Sequence[Ask], num_tokens: int) -> bool:
    """Every stream has so many tokens of some choice."""
    return all(
        max(ask.counts.values(), default=0) >= num_tokens for ask in asks if ask.shows_tokens
    )


def check(
    asks: Sequence[Ask], answers: Sequence[bytes | BaseException], expected: Sequence[bytes]
) -> float:
    """The longest gap of any stream in seconds, all answers being as expected."""
    for ask, answer, right in zip(asks, answers, expected, strict=True):
        if isinstance(answer, BaseException):
            raise AssertionError(f"{ask.name}: {ask.lines[-2:]}") from answer
        assert answer == right, f"{ask.name}: {differences(json.loads(answer), json.loads(right))}"
    return max((ask.longest_gap_s for ask in asks if ask.streams), default=0.0)


def differences(answer: Any, right: Any, place: str = "") -> list[str]:
    """Where two answers differ, and how."""
    if isinstance(answer, dict) and isinstance(right, dict):
        keys = sorted({*answer, *right}, key=str)
        return [
            d
            for key in keys
            for d in differences(answer.get(key), right.get(key), f"{place}.{key}")
        ]
    return [] if answer == right else [f"{place}: {answer!r} instead of {right!r}"]


def ending(choices: list[list[int]], within: int) -> int:
    """A token among the first ones of one choice that the others draw late or never."""
    for i, choice in enumerate(choices):
        others = {
            token for j, other in enumerate(choices) if j != i for token in other[: LENGTH // 2]
        }
        for token in choice[:within]:
            if token not in others:
                return token
    raise AssertionError("every choice begins with tokens of the others: take another seed")
