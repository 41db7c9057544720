"""1,000 requests that ask for a form of their answer, while prefill and decode workers are frozen
and killed at random.

Every answer that finishes equals the one that an engine alone gives, and is of the form. Schemas,
regular expressions and choices are drawn by PDSERVE_SOAK_SEED, greedy and sampled, in streams and
whole. What aborts, bursts and dying routers do: test_soak.py.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from support.hosts import hosts
from support.routers import RouterProcess
from support.served import DEMO, MODEL
from support.victims import Chaos, Victim, WorkerVictim
from tqdm import tqdm

from pdserve.configs.router import RouterConfig
from pdserve.engine.llm import LLM, SamplingParams
from pdserve.text.grammars.grammar_of import grammar_of
from pdserve.text.grammars.structured import structured_outputs

SEED = int(os.environ.get("PDSERVE_SOAK_SEED", "1"))
NUM_REQUESTS = 1000
CONCURRENCY = 12
MAX_TOKENS = 160
ENGINE = {"num_kv_blocks": 512, "max_num_seqs": 16, "max_num_batched_tokens": 128}
ROUTER = RouterConfig(split="always", worker_silence_s=3.0, attempt_deadline_s=10.0, max_attempts=4)
LIMIT_S = 150.0
LEAST_KILLS = 10
LEAST_KILLS_PER_ROLE = 2
PATIENCE_S = 120.0  # of clients who are told that no worker is there
WORDS = "the worker reads a block and writes its name into the table of the router"

Json = dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """One request. form: its structured_outputs."""

    prompt: str
    form: Json
    settings: Json

    def body(self, streams: bool) -> Json:
        return {
            "model": MODEL,
            "prompt": self.prompt,
            "structured_outputs": self.form,
            "stream": streams,
            **self.settings,
        }

    def params(self) -> SamplingParams:
        rules = {"grammar": grammar_of(structured_outputs(self.form))}
        return SamplingParams(**self.settings, logit_rules=rules)

    def check(self, text: str) -> None:
        """AssertionError when the text is not of the form."""
        if "json" in self.form:
            jsonschema.validate(json.loads(text), self.form["json"])
        elif "regex" in self.form:
            assert re.fullmatch(self.form["regex"], text), text
        else:
            assert text in self.form["choice"], text


@dataclass(frozen=True)
class Answer:
    text: str
    finish_reason: str


def drawn_schema(draw: random.Random, level: int = 0) -> Json:
    """An object whose strings and lists are short, so that most answers end by themselves."""
    kinds: list[Json] = [
        {"type": "integer", "minimum": 0, "maximum": draw.randint(10, 10**6)},
        {"enum": [f"value-{draw.randrange(10**4)}" for _ in range(draw.randint(2, 6))]},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,6}$"},
        {"type": "string", "maxLength": draw.randint(3, 12)},
        {"type": ["boolean", "null"]},
        {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    ]
    if level < 2:
        kinds.append(drawn_schema(draw, level + 1))
    properties = {f"field_{draw.randrange(10**4)}": draw.choice(kinds) for _ in range(3)}
    required = [name for name in properties if draw.random() < 0.7]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def drawn_form(draw: random.Random) -> Json:
    kind = draw.choice(["json", "json", "json", "regex", "choice"])
    if kind == "json":
        return {"json": drawn_schema(draw)}
    if kind == "regex":
        return {"regex": f"[a-z]{{{draw.randint(2, 6)}}}(-[0-9]{{2}}){{1,{draw.randint(1, 9)}}}"}
    return {"choice": [f"answer number {draw.randrange(10**6)}" for _ in range(5)]}


def drawn_asks(draw: random.Random, count: int) -> list[Ask]:
    forms = [drawn_form(draw) for _ in range(100)]
    words = WORDS.split()
    asks = []
    for index in range(count):
        prompt = " ".join(draw.choice(words) for _ in range(draw.randint(2, 90)))
        sampled = {"temperature": 1.0, "top_p": 0.95} if index % 2 else {"temperature": 0}
        settings = {**sampled, "max_tokens": MAX_TOKENS, "seed": index}
        asks.append(Ask(prompt, draw.choice(forms), settings))
    return asks


def answers_of(asks: Sequence[Ask]) -> list[Answer]:
    """Returns the answers of one engine alone."""
    outputs = LLM(str(DEMO), device="cpu").generate(
        [ask.prompt for ask in asks], [ask.params() for ask in asks]
    )
    answers = []
    for output in outputs:
        reason = output.outputs[0].finish_reason
        assert reason is not None
        answers.append(Answer(output.outputs[0].text, reason))
    return answers


class Clients:
    def __init__(self, url: str, asks: Sequence[Ask], expected: Sequence[Answer]) -> None:
        self._url = f"{url}/v1/completions"
        self._asks = asks
        self._expected = expected
        self.ends: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    async def run(self, draw: random.Random) -> None:
        left = list(range(len(self._asks)))
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=LIMIT_S, limits=limits) as http:
            with tqdm(total=len(left), desc="constrained requests") as progress:

                async def client() -> None:
                    while left:
                        await self._ask(http, left.pop(), draw.random() < 0.5)
                        progress.update()

                async with asyncio.TaskGroup() as group:
                    for _ in range(CONCURRENCY):
                        group.create_task(client())

    async def _ask(self, http: httpx.AsyncClient, index: int, streams: bool) -> None:
        """Asks again, after a second, while the router says that nobody is there."""
        ask, expected = self._asks[index], self._expected[index]
        send = self._stream if streams else self._whole
        gives_up = time.monotonic() + PATIENCE_S
        while (answer := await send(http, ask, expected)) is None:
            if time.monotonic() > gives_up:
                self.ends["no answer"] += 1
                return
            await asyncio.sleep(1.0)
        assert answer == expected, f"request {index}"
        if answer.finish_reason == "stop":
            ask.check(answer.text)
        self.ends[answer.finish_reason] += 1

    async def _whole(self, http: httpx.AsyncClient, ask: Ask, expected: Answer) -> Answer | None:
        response = await http.post(self._url, json=ask.body(False))
        if response.status_code != 200:
            self._refused(response.status_code, response.json())
            return None
        choice = response.json()["choices"][0]
        return Answer(choice["text"], choice["finish_reason"])

    async def _stream(self, http: httpx.AsyncClient, ask: Ask, expected: Answer) -> Answer | None:
        """Text that comes before a stream fails is right, too."""
        text, reason = "", ""
        async with http.stream("POST", self._url, json=ask.body(True)) as response:
            if response.status_code != 200:
                self._refused(response.status_code, json.loads(await response.aread()))
                return None
            async for line in response.aiter_lines():
                if not line or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self._refused(200, event)
                    return None
                choice = event["choices"][0]
                text += choice["text"]
                reason = choice["finish_reason"] or reason
                assert expected.text.startswith(text), f"{text!r} begins no {expected.text!r}"
        return Answer(text, reason)

    def _refused(self, status: int, body: Json) -> None:
        """Nobody may be told that the form is wrong, nor that the server failed."""
        error = body["error"]
        assert error["code"] not in ("invalid_grammar", None), error
        assert error["type"] == "service_unavailable_error" or status == 429, error
        self.refusals[f"{status}, {error['code']}"] += 1


@pytest.mark.slow
async def test_constrained_requests_under_kills(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    asks = drawn_asks(draw, NUM_REQUESTS)
    expected = answers_of(asks)
    assert sum(answer.finish_reason == "stop" for answer in expected) > 0.9 * len(asks)
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(
            hosts(DEMO, "P0", "P1", "D0", "D1", engine=ENGINE, shells=tmp_path)
        )
        router = RouterProcess(DEMO, ROUTER, 30.0, tmp_path)
        stack.callback(router.close)
        router.wait()
        victims: list[Victim] = [WorkerVictim(workers, index) for index in range(len(workers))]
        chaos = Chaos(victims, random.Random(draw.random()))
        clients = Clients(router.url, asks, expected)
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(clients.run(random.Random(draw.random())))
            group.create_task(chaos.run())
            asking.add_done_callback(lambda _: chaos.stop())
        for victim in victims:
            victim.check()
    print(f"PDSERVE_SOAK_SEED={SEED} ends: {dict(clients.ends)}")
    print(f"refusals, asked again: {dict(clients.refusals)}, strikes: {dict(chaos.struck)}")
    kills = {
        role: sum(chaos.struck[f"{role} {what}"] for what in ("killed", "frozen killed"))
        for role in ("prefill", "decode")
    }
    assert sum(kills.values()) >= LEAST_KILLS, "too few died: this was calm"
    assert min(kills.values()) >= LEAST_KILLS_PER_ROLE, kills
    assert clients.ends["stop"] + clients.ends["length"] > 0.99 * len(asks), clients.ends
