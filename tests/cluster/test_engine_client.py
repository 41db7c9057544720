"""The zmq end of the replica shell, against a fake engine in a thread: no Ray, no torch."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine_host import FakeEngineHost, journal_path

from pdserve.configs.schema import WorkerConfig
from pdserve.protocol.codec import decode_batch
from pdserve.protocol.commands import Cancel, Start, Submit
from pdserve.protocol.events import Delta, Event, EventBatch, Hello, Snapshot
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.worker import engine_client
from pdserve.worker.engine_client import EngineClient, EngineGone

ID = "Decode#abc"


class Engine:
    def __init__(self, address: str) -> None:
        self.address = address
        self.host = FakeEngineHost(WorkerConfig(), ID, 1, address)
        self.thread = threading.Thread(target=self.host.run, daemon=True)

    def commands(self) -> str:
        path = journal_path(ID)
        return path.read_text() if path.exists() else ""


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    monkeypatch.setenv("WORKER_JOURNAL", str(tmp_path))
    engine = Engine(f"ipc://{tmp_path}/engine")
    engine.thread.start()
    yield engine


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[EngineClient]:
    client = EngineClient(engine.address)
    yield client
    # a Stop to an engine that has not bound its socket yet waits a second only
    if not client.closed.is_set():
        await asyncio.wait_for(client.connected.wait(), 60)
    client.close()
    await asyncio.to_thread(engine.thread.join, 60)
    assert not engine.thread.is_alive(), "Stop must reach the engine"


def submit(request_id: str, router: str = "r", session: int = 1, max_tokens: int = 3) -> Submit:
    return Submit(
        key=RequestKey(router, session, request_id),
        phase="full",
        prompt_token_ids=(7, 8),
        sampling=SamplingParams(max_tokens=max_tokens, seed=1),
        starts=(Start(0),),
    )


async def received(stream: AsyncIterator[bytes], kind: type[Event]) -> Any:
    """The next event of a kind. An engine reports once a second, also before."""
    while True:
        for event in (await receive(stream)).events:
            if isinstance(event, kind):
                return event


async def receive(stream: AsyncIterator[bytes]) -> EventBatch:
    async with asyncio.timeout(60):
        return decode_batch(await anext(stream))


async def wait_for(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.01)


async def test_hello_comes_first_and_tokens_come_in_order(client: EngineClient) -> None:
    stream = client.subscribe("r", 1)
    assert isinstance((await receive(stream)).events[0], Hello)
    client.send(submit("a"))
    assert [(await received(stream, Delta)).token_ids for _ in range(3)] == [(7,), (8,), (9,)]


async def test_a_client_may_connect_before_the_engine_binds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKER_JOURNAL", str(tmp_path))
    engine = Engine(f"ipc://{tmp_path}/late")
    client = EngineClient(engine.address)
    first = asyncio.ensure_future(receive(client.subscribe("r", 1)))
    await asyncio.sleep(0.1)
    engine.thread.start()
    assert isinstance((await first).events[0], Hello)
    client.close()


async def test_each_router_reads_its_own_and_all_read_broadcasts(client: EngineClient) -> None:
    one = client.subscribe("one", 1)
    two = client.subscribe("two", 1)
    await receive(one), await receive(two)
    client.send(submit("a", router="one", max_tokens=1))
    await received(one, Delta)
    await received(one, Snapshot)
    for _ in range(2):
        assert isinstance((await receive(two)).events[0], Snapshot)


async def test_a_broadcast_never_precedes_the_hello(client: EngineClient) -> None:
    stream = client._open("r", 1)
    client._deliver(b"*", b"broadcast")
    client._deliver(b"r/1", b"hello")
    client._deliver(b"*", b"broadcast")
    assert [await stream.get(), await stream.get()] == [b"hello", b"broadcast"]


async def test_closing_a_stream_loses_the_router(client: EngineClient, engine: Engine) -> None:
    stream = client.subscribe("r", 1)
    await receive(stream)
    client.send(submit("a", max_tokens=1000))
    await receive(stream)
    await stream.aclose()
    await wait_for(lambda: '"router_lost"' in engine.commands())
    await wait_for(lambda: engine.host.requests == {})


async def test_a_newer_session_replaces_the_older_stream(
    client: EngineClient, engine: Engine
) -> None:
    old = client.subscribe("r", 1)
    await receive(old)
    new = client.subscribe("r", 2)
    assert isinstance((await receive(new)).events[0], Hello)
    with pytest.raises(StopAsyncIteration):
        await anext(old)
    await old.aclose()
    with pytest.raises(EngineGone, match="newer stream"):
        await anext(client.subscribe("r", 1))
    client.send(Cancel(key=RequestKey("r", 2, "x")))
    await wait_for(lambda: '"cancel"' in engine.commands())
    assert engine.commands().count('"router_lost"') == 1


async def test_the_engines_end_closes_everything(client: EngineClient, engine: Engine) -> None:
    stream = client.subscribe("r", 1)
    await receive(stream)
    client.send(submit("a", max_tokens=1000))
    client.send(engine_client.Stop())
    async with asyncio.timeout(60):
        await client.closed.wait()
        rest = [batch async for batch in stream]
    assert len(rest) < 900, "it does not go on to the end"
    with pytest.raises(EngineGone):
        client.send(submit("b"))
    with pytest.raises(EngineGone):
        await anext(client.subscribe("r", 2))


async def test_a_router_that_reads_nothing_is_dropped(
    client: EngineClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "STREAM_LIMIT", 3)
    slow = client.subscribe("slow", 1)
    fast = client.subscribe("fast", 1)
    await receive(slow), await receive(fast)
    client.send(submit("a", router="slow", max_tokens=1000))
    await wait_for(lambda: '"router_lost"' in engine.commands())
    async with asyncio.timeout(60):
        assert len([batch async for batch in slow]) == 4
    assert isinstance((await receive(fast)).events[0], Snapshot)


async def test_an_idle_client_uses_no_processor(client: EngineClient) -> None:
    stream = client.subscribe("r", 1)
    await receive(stream)
    iterations = 0
    loop = asyncio.get_running_loop()
    run_once = loop._run_once  # type: ignore[attr-defined]

    def counted() -> None:
        nonlocal iterations
        iterations += 1
        run_once()

    loop._run_once = counted  # type: ignore[attr-defined]
    await asyncio.sleep(0.5)
    assert iterations < 10
