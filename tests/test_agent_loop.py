"""An agent of 20 turns over each dialect, against a model that a script writes: router, HTTP and
sockets are real, workers are not.

Workers are lost in the middle of turns: in reasoning, in content, in the name and in the arguments
of calls, and before a turn's first token. Every stream must keep to its protocol, and the agent
must come to the same transcript as one that nothing disturbs.
"""

import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from router.agent_dialects import DIALECTS, Call
from router.fake_worker import EOS, FakeWorker
from router.harness import Harness, until
from router.turn_models import HERMES, make_speak, tokenizer_of

from pdserve.cluster.deployments.http_server import Address, HttpServer
from pdserve.configs.router import RouterConfig
from pdserve.protocol.events import Delta, Event
from pdserve.text.tokenizer import Tokenizer

pytestmark = pytest.mark.lengthy

NUM_TURNS = 20
WORDS = ["It may rain.", "Grüße aus Köln.", "你好 🙂", 'a "quoted" \\ word', "Two\nlines.", "{1}"]


@dataclass(frozen=True)
class Loss:
    """In the answer of this turn, once the model has written up to `where` in it and `past`
    characters more. role: of the worker that is lost."""

    turn: int
    where: str
    past: int = 3
    role: str = "decode"


LOSSES = (
    Loss(0, '"arguments": {'),
    Loss(2, "<think>"),
    Loss(4, "", past=0, role="prefill"),
    Loss(6, '{"name": "', past=2),
    Loss(9, "</think>", past=5),
    Loss(10, '"arguments": {', past=0),
    Loss(13, '"arguments": {', past=9),
    Loss(16, "</tool_call>", past=0),
    Loss(19, "That is", past=4),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of(HERMES, "<tool_call>", "</tool_call>", "<think>", "</think>")


def written(turn: int) -> str:
    """Returns the model's text of this turn: reasoning, words and calls by chance. The last turn
    has an answer."""
    draw = random.Random(turn)
    thinks = turn in (2, 9) or draw.random() < 0.5
    text = f"<think>\nTurn {turn}. {draw.choice(WORDS)}\n</think>\n\n" if thinks else ""
    if turn == NUM_TURNS - 1:
        return text + f"That is all of {turn} turns."
    if turn == 9 or draw.random() < 0.5:
        text += f"Let me look. {draw.choice(WORDS)}\n"
    calls = [
        {"name": "clock", "arguments": {}}
        if turn not in (0, 10, 13) and draw.random() < 0.2
        else {"name": "get_weather", "arguments": _arguments(draw, turn)}
        for _ in range(draw.randint(1, 2))
    ]
    shown = (json.dumps(call, ensure_ascii=draw.random() < 0.5) for call in calls)
    return text + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in shown)


def _arguments(draw: random.Random, turn: int) -> dict[str, object]:
    words = draw.sample(WORDS, 2)
    return {"city": words[0], "turn": turn, "more": [1.5, None, {"x": words[1]}, True]}


def result_of(call: Call) -> str:
    """Returns the tool's result, which only depends on its arguments."""
    seen = json.dumps([call.name, call.arguments], ensure_ascii=False, sort_keys=True)
    return f"{sum(map(ord, seen))}: {seen}"


class Model:
    """Writes the script: the prompt says which turn it is. Notes the prompt of each turn, and loses
    workers where it is told to; another takes the place of each."""

    def __init__(self, tokenizer: Tokenizer, losses: Sequence[Loss]) -> None:
        config = RouterConfig(split="always", worker_silence_s=600.0)
        self.harness = Harness(tokenizer, config, 2, 2, 5.0)
        self.prompts: dict[int, set[str]] = {}
        self.lost: list[Loss] = []
        self._tokenizer = tokenizer
        self._losses = {loss.turn: loss for loss in losses}
        self._turns: dict[tuple[int, ...], int] = {}
        self._ids = [
            [*tokenizer.encode(written(turn), add_special_tokens=False), EOS]
            for turn in range(NUM_TURNS)
        ]
        for worker in (*self.harness.prefills, *self.harness.decodes):
            self._teach(worker)

    def _teach(self, worker: FakeWorker) -> None:
        make_speak(worker, self._tokenizer, "")
        worker.answers = lambda prompt, choice: self._ids[self._turn(prompt)]
        worker.mangle = lambda events: self._sent(worker, events)

    def _turn(self, prompt: tuple[int, ...]) -> int:
        if prompt not in self._turns:
            text = self._tokenizer.decode(prompt, skip_special_tokens=False)
            turn = text.count("<|im_start|>assistant") - 1
            self._turns[prompt] = turn
            self.prompts.setdefault(turn, set()).add(text)
        return self._turns[prompt]

    def _sent(self, worker: FakeWorker, events: list[Event]) -> list[Event]:
        """The events; when it is time, the worker is lost with them."""
        deltas = [event for event in events if isinstance(event, Delta)]
        if not deltas:
            return events
        turn = self._turn(worker.submits()[-1].prompt_token_ids)
        loss = self._losses.get(turn)
        if loss is None or loss.role != worker.role or loss in self.lost:
            return events
        answer = written(turn)
        assert loss.where in answer, f"turn {turn} has no {loss.where!r}: {answer}"
        wanted = answer.index(loss.where) + len(loss.where) + loss.past
        ids = self._ids[turn][: deltas[-1].position + len(deltas[-1].token_ids)]
        if len(self._tokenizer.decode(ids, skip_special_tokens=False)) >= wanted:
            self.lost.append(loss)
            worker.die()
            self._teach(self.harness.add(f"again-{len(self.lost)}", worker.role))
        return events


@asynccontextmanager
async def served(model: Model) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of the model's router, over a socket."""
    harness = await model.harness.start()
    server = HttpServer(harness.app, Address("127.0.0.1", 0), 60.0)
    server.start()
    try:
        url = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            yield client
    finally:
        await server.close()
        await harness.fleet.close()
        await harness.world.close()


async def transcript(
    tokenizer: Tokenizer, dialect: str, losses: Sequence[Loss] = (), streams: bool = True
) -> tuple[list[tuple[Any, ...]], dict[int, set[str]]]:
    """Returns what the agent saw in each turn, and what the model was shown. Raises AssertionError
    unless every loss happened, nothing is left at workers, and the agent reached the last turn."""
    model = Model(tokenizer, losses)
    agent = DIALECTS[dialect]()
    agent.ask("Look it all up.")
    seen = []
    async with served(model) as client:
        for _ in range(NUM_TURNS):
            body = agent.body() | {"stream": streams}
            answer = await client.post(agent.path, json=body)
            assert answer.status_code == 200, answer.text
            read = agent.read_stream(answer.text) if streams else agent.read_whole(answer.json())
            seen.append(read.shown())
            agent.report([(call, result_of(call)) for call in read.calls])
            if read.is_final:
                break
        await until(lambda: model.harness.world.held() == 0)
    assert len(seen) == NUM_TURNS and seen[-1][-1]
    assert model.lost == list(losses)
    return seen, model.prompts


def expected() -> list[tuple[Any, ...]]:
    """The script, read by hand."""
    found = []
    for turn in range(NUM_TURNS):
        text = written(turn)
        thought, _, rest = text.rpartition("</think>")
        content, _, calls = rest.partition("<tool_call>")
        parts = [part.strip().removesuffix("</tool_call>") for part in calls.split("<tool_call>")]
        made = [json.loads(part) for part in parts if part]
        shown = [(call["name"], call["arguments"]) for call in made]
        found.append((thought.removeprefix("<think>").strip(), content.strip(), shown, not shown))
    return found


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_undisturbed_agent_sees_the_script(tokenizer: Tokenizer, dialect: str) -> None:
    streamed, prompts = await transcript(tokenizer, dialect)
    assert streamed == expected()
    whole, same = await transcript(tokenizer, dialect, streams=False)
    assert (whole, same) == (streamed, prompts)
    assert prompts.keys() == set(range(NUM_TURNS))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_agent_that_loses_workers_comes_to_the_same(
    tokenizer: Tokenizer, dialect: str, streams: bool
) -> None:
    """Also of what the model was shown in each turn, which holds all that the agent kept."""
    undisturbed = await transcript(tokenizer, dialect)
    disturbed = await transcript(tokenizer, dialect, LOSSES, streams)
    assert disturbed == undisturbed and disturbed[0] == expected()


async def test_the_model_is_shown_the_same_over_every_dialect(tokenizer: Tokenizer) -> None:
    shown = [(await transcript(tokenizer, dialect))[1] for dialect in DIALECTS]
    assert all(prompts == shown[0] for prompts in shown)


def test_the_script_has_all_that_a_turn_can_have() -> None:
    turns = expected()
    assert {bool(thought) for thought, *_ in turns} == {True, False}
    assert {bool(content) for _, content, *_ in turns} == {True, False}
    assert {len(calls) for *_, calls, _ in turns} == {0, 1, 2}
