"""When a router begins to listen, without Ray: the replica's own object over a fake worker."""

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from router.fake_worker import FakeWorker, World, row_of
from router.turn_models import CLOCK, HERMES, MESSAGES, make_speak, tokenizer_of
from support.tiny_models import make_embedding
from support.trace_receivers import grpc_receiver
from text.backends import write_folder

from pdserve.cluster.deployments import router_replica
from pdserve.cluster.deployments.http_server import Address
from pdserve.cluster.deployments.router_replica import RouterReplica
from pdserve.cluster.links.handle_api import (
    EmbeddedWhole,
    EmbedFields,
    GenerateCall,
    OutputChunks,
    Refused,
    Whole,
    decode_answer,
    encode,
)
from pdserve.configs.schema import ClusterConfig
from pdserve.protocol.logit_rules import RULES, RuleKind
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.text.answers.pieces import Piece, calls_of
from pdserve.text.grammars.checker import shared_checker
from pdserve.turns.turn import make_turn

ROOT = Path(__file__).parents[2]


class Router(RouterReplica):
    """Serve calls `__del__` once, and awaits it; Python shall not call it again."""

    close = RouterReplica.__del__

    def __del__(self) -> None:  # type: ignore[override]
        pass


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    made = Router.__new__(Router)
    yield made
    await made.close()


def start(router: Router, **fields: Any) -> asyncio.Task[None]:
    config = ClusterConfig.model_validate({"mode": "aggregated", **fields})
    begin: Any = router.__init__  # type: ignore[misc]
    return asyncio.create_task(begin(config, Address("127.0.0.1", 0)))


async def health(router: Router) -> int | None:
    """None: nobody listens."""
    assert router._http is not None
    async with httpx.AsyncClient() as client:
        try:
            return (await client.get(f"http://127.0.0.1:{router._http.port}/health")).status_code
        except httpx.ConnectError:
            return None


async def bound(router: Router) -> None:
    async with asyncio.timeout(60):
        while getattr(router, "_http", None) is None:
            await asyncio.sleep(0.01)


async def test_it_listens_once_it_knows_a_decode_worker(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_replica, "FIRST_WORKER_S", 600.0)
    starting = start(router)
    await bound(router)
    router._fleet.join(FakeWorker(World(), "p0", "prefill"))
    for _ in range(10):
        assert await health(router) is None
        await asyncio.sleep(0.02)
    assert not starting.done()
    router._fleet.join(FakeWorker(World(), "d0", "decode"))
    async with asyncio.timeout(60):
        await starting
        while (status := await health(router)) is None:
            await asyncio.sleep(0.01)
    assert status == 200
    await router.check_health()


async def test_without_a_worker_it_says_so_before_long(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_replica, "FIRST_WORKER_S", 0.2)
    await asyncio.wait_for(start(router), 60)
    async with asyncio.timeout(60):
        while (status := await health(router)) is None:
            await asyncio.sleep(0.01)
    assert status == 503


@pytest.mark.parametrize("generation_config", ["auto", "none"])
async def test_the_models_sampling_defaults_are_named_and_taken(
    router: Router, tmp_path: Path, caplog: pytest.LogCaptureFixture, generation_config: str
) -> None:
    folder = shutil.copytree(
        ROOT / "demo/pdserve-demo", tmp_path / "model", ignore=shutil.ignore_patterns("*.safet*")
    )
    (folder / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "max_new_tokens": 3}'
    )
    worker = FakeWorker(World(), "d0", "both")
    caplog.handler.level = logging.INFO
    logging.getLogger("ray.serve").addHandler(caplog.handler)
    try:
        starting = start(
            router, model={"path": str(folder), "generation_config": generation_config}
        )
        await bound(router)
        router._fleet.join(worker)
        await asyncio.wait_for(starting, 60)
    finally:
        logging.getLogger("ray.serve").removeHandler(caplog.handler)
    said = (
        "default sampling parameters from generation_config.json: temperature=0.6, top_k=20, "
        "max_tokens=3"
    )
    assert (said in caplog.text) == (generation_config == "auto")
    call = GenerateCall(prompt=[5, 6], sampling=None, stream=False)
    [answer] = [decode_answer(data[1:]) async for data in router.generate(encode(call))]
    assert isinstance(answer, Whole)
    sampling = worker.submits()[-1].sampling
    expected = (0.6, 20, 3) if generation_config == "auto" else (1.0, 0, 16)
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == expected


async def test_scores_of_a_prompt_come_whole_and_are_held_no_longer_than_the_answer(
    router: Router,
) -> None:
    starting = start(router)
    sampling = SamplingParams(max_tokens=2, seed=1, prompt_logprobs=3)
    await bound(router)
    router._fleet.join(FakeWorker(World(), "d0", "both"))
    await asyncio.wait_for(starting, 60)
    prompt = list(range(5, 205))
    call = GenerateCall(prompt=prompt, sampling=sampling, stream=False)
    [answer] = [decode_answer(data[1:]) async for data in router.generate(encode(call))]
    assert isinstance(answer, Whole) and answer.prompt_logprobs is not None
    assert [scored and scored.token_id for scored in answer.prompt_logprobs] == [None, *prompt[1:]]
    assert router._service.held.num_bytes == 0
    call = GenerateCall(prompt=prompt, sampling=sampling, stream=True)
    async for _ in router.generate(encode(call)):
        assert router._service.held.num_bytes > 0
    assert router._service.held.num_bytes == 0


@pytest.mark.processes
async def test_a_call_of_the_handle_may_ask_for_a_form(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, "grammar", RuleKind("grammar:Grammar", lambda settings, size: None))
    starting = start(router)
    await bound(router)
    worker = FakeWorker(World(), "d0", "both")
    worker.grammar_engine = "llguidance 1.9.1"
    router._fleet.join(worker)
    await asyncio.wait_for(starting, 60)

    async def answer(**asked: Any) -> Any:
        call = GenerateCall(prompt=[5, 6], sampling=None, stream=False, structured_outputs=asked)
        [found] = [decode_answer(data[1:]) async for data in router.generate(encode(call))]
        return found

    try:
        assert isinstance(await answer(choice=["yes", "no"]), Whole)
        rules = worker.submits()[-1].sampling.logit_rules
        assert rules == {"grammar": 'start: CHOICE\nCHOICE: "yes" | "no"\n'}
        for asked, message in (
            ({"regex": "("}, "structured_outputs.regex cannot be used"),
            ({"yaml": 1}, "structured_outputs.yaml is unknown"),
        ):
            refused = await answer(**asked)
            assert isinstance(refused, Refused) and refused.status == 400
            assert refused.message.startswith(message)
        assert len(worker.submits()) == 1
    finally:
        shared_checker().close()


async def test_a_prompt_is_embedded_through_the_handle(router: Router, tmp_path: Path) -> None:
    """The replica finds in the checkpoint that the model embeds."""
    folder = make_embedding(tmp_path / "tiny", hidden_size=8)
    starting = start(router, model={"path": str(folder)})
    await bound(router)
    router._fleet.join(FakeWorker(World(), "d0", "both"))
    await asyncio.wait_for(starting, 60)
    call = GenerateCall(prompt=[5, 6, 7], sampling=None, stream=False, embed=EmbedFields())

    async def answer(**embed: Any) -> Any:
        asked = msgspec.structs.replace(call, embed=EmbedFields(**embed))
        [found] = [decode_answer(data[1:]) async for data in router.generate(encode(asked))]
        return found

    whole = await answer(dimensions=4, truncate_prompt_tokens=2)
    assert isinstance(whole, EmbeddedWhole) and whole.prompt_token_ids == [5, 6]
    row = row_of((5, 6))[:4]
    values = np.frombuffer(whole.values, dtype="<f4")
    np.testing.assert_allclose(values, row / np.linalg.norm(row), rtol=1e-6)
    refused = await answer(dimensions=9)
    assert isinstance(refused, Refused) and refused.message.startswith("dimensions must be from 1")
    plain = msgspec.structs.replace(call, embed=None)
    [refused] = [decode_answer(data[1:]) async for data in router.generate(encode(plain))]
    assert isinstance(refused, Refused) and "is for embeddings" in refused.message


async def test_a_conversation_through_the_handle_has_pieces(router: Router, tmp_path: Path) -> None:
    """And the configuration says how calls are read, for HTTP and the handle alike."""
    tokenizer = tokenizer_of(HERMES, "<tool_call>", "</tool_call>")
    write_folder(tmp_path, tokenizer._backend, eos_token="<|im_end|>", chat_template=HERMES)
    worker = FakeWorker(World(), "d0", "both")
    call = '<tool_call>{"name": "clock", "arguments": {"a": 1}}</tool_call>'
    make_speak(worker, tokenizer, "<think>Hm.</think>I look. " + call)
    starting = start(router, model={"path": str(tmp_path), "reasoning_format": "none"})
    await bound(router)
    router._fleet.join(worker)
    await asyncio.wait_for(starting, 60)
    asked = GenerateCall(
        prompt="", sampling=None, stream=False, turn=make_turn(MESSAGES, tools=[CLOCK])
    )
    [answer] = [decode_answer(data[1:]) async for data in router.generate(encode(asked))]
    assert isinstance(answer, Whole)
    [choice] = answer.choices
    [found] = choice.tool_calls
    assert (found.name, found.arguments, found.is_complete) == ("clock", '{"a": 1}', True)
    assert choice.text == "<think>Hm.</think>I look." and choice.reasoning == ""
    assert choice.finish_reason == "tool_calls"
    asked = msgspec.structs.replace(asked, stream=True)
    pieces: list[Piece] = []
    async for data in router.generate(encode(asked)):
        chunks = decode_answer(data[1:])
        assert isinstance(chunks, OutputChunks)
        pieces += [piece for chunk in chunks.chunks for piece in chunk.all_pieces()]
    assert [(c.name, c.arguments) for c in calls_of(pieces)] == [("clock", '{"a": 1}')]
    bad = msgspec.structs.replace(
        asked, turn=make_turn(MESSAGES, tools=[CLOCK], tool_choice="required")
    )
    [refused] = [decode_answer(data[1:]) async for data in router.generate(encode(bad))]
    assert isinstance(refused, Refused) and refused.status == 400
    assert refused.message.startswith("tool_choice 'required'")


async def test_a_call_of_the_handle_is_traced_and_flushed_at_the_end(router: Router) -> None:
    with grpc_receiver() as receiver:
        starting = start(router, traces={"endpoint": receiver.url, "service_name": "mine"})
        await bound(router)
        router._fleet.join(FakeWorker(World(), "d0", "both"))
        await asyncio.wait_for(starting, 60)
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        sampling = SamplingParams(max_tokens=3)
        call = GenerateCall(prompt=[5, 6], sampling=sampling, stream=False, traceparent=parent)
        async for _ in router.generate(encode(call)):
            pass
        refused = msgspec.structs.replace(call, prompt=[], traceparent="")
        async for _ in router.generate(encode(refused)):
            pass
        assert receiver.spans == []
        await router.close()
        answered, alone = sorted(await receiver.traces(2), key=len, reverse=True)
    root = answered[0]
    assert root.span.parent_span_id.hex() == parent.split("-")[2]
    assert (root.has["pdserve.outcome"], root.resource["service.name"]) == ("ok", "mine")
    assert root.has["gen_ai.response.id"].startswith("gen-")
    assert [received.has["pdserve.outcome"] for received in alone] == ["refused"]
