"""Workers behind Serve, with a fake engine: delivery to the named replica, and every way in which
one end can go."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from support.lines import json_lines
from support.waiting import until_async

from pdserve.cluster import app as cluster_app
from pdserve.cluster.links import serve_links
from pdserve.cluster.links.serve_links import MembershipWatcher, ServeLink
from pdserve.configs.schema import ClusterConfig
from pdserve.protocol.codec import decode_batch
from pdserve.protocol.commands import Cancel, Start, Submit
from pdserve.protocol.events import Delta, Hello
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.fleet.link import WorkerLink, WorkerLost

FAKE = "fake_engine_host:FakeEngineHost"
APP = "workers"


class Members:
    """Stands for the fleet: remembers who is there."""

    def __init__(self) -> None:
        self.links: dict[str, WorkerLink] = {}

    @property
    def worker_ids(self) -> set[str]:
        return set(self.links)

    def join(self, link: WorkerLink) -> None:
        self.links[link.worker_id] = link

    def leave(self, worker_id: str) -> None:
        del self.links[worker_id]


@pytest.fixture(scope="module")
def decode(local_ray: None) -> Iterator[DeploymentHandle]:
    config = ClusterConfig.model_validate({"mode": "aggregated", "decode": {"replicas": 2}})
    yield serve.run(
        cluster_app.worker_deployment(config, "decode", FAKE), name=APP, route_prefix=None
    )
    serve.delete(APP)


@pytest.fixture
async def members(
    decode: DeploymentHandle, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Members]:
    monkeypatch.setattr(serve_links, "FIRST_HELLO_S", 60.0)  # a stream is opened only once here
    members = Members()
    watcher = MembershipWatcher(members, [decode])
    watcher.start()
    await wait_for(lambda: len(members.links) == 2)
    yield members
    watcher.stop()


async def wait_for(condition: Callable[[], Any]) -> None:
    await until_async(condition, pause_s=0.02)


def submit(session: int, max_tokens: int, request_id: str = "a", first: int = 7) -> Submit:
    return Submit(
        key=RequestKey("r", session, request_id),
        phase="full",
        prompt_token_ids=(first,),
        sampling=SamplingParams(max_tokens=max_tokens, seed=1),
        starts=(Start(0),),
    )


def received(journal: Path, link: WorkerLink, kind: str) -> list[dict[str, Any]]:
    """Reads the journal lines of one worker's engine for one type of command."""
    path = journal / link.worker_id.replace("#", "-")
    lines = json_lines(path) if path.exists() else []
    return [line for line in lines if line["command"]["type"] == kind]


async def opened(link: WorkerLink, session: int, router: str = "r") -> AsyncGenerator[bytes, None]:
    """A stream that has said Hello."""
    stream = cast(ServeLink, link).events(router, session)
    async with asyncio.timeout(60):
        assert isinstance(decode_batch(await anext(stream)).events[0], Hello)
    return stream


async def tokens(stream: AsyncIterator[bytes], count: int) -> list[int]:
    found: list[int] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            for event in decode_batch(await anext(stream)).events:
                if isinstance(event, Delta):
                    found.extend(event.token_ids)
    return found


def engine_pid(journal: Path, link: WorkerLink) -> int:
    return int(received(journal, link, "subscribe")[-1]["pid"])


def replica_pid(link: WorkerLink) -> int:
    """The Serve replica's process, asked through its actor."""
    actor = ray.get_actor(f"SERVE_REPLICA::{APP}#{link.worker_id}", namespace="serve")
    pid: Any = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    return int(pid)


async def test_calls_go_to_the_named_replica(members: Members, journal: Path) -> None:
    one, two = members.links.values()
    streams = [await opened(one, 1), await opened(two, 1)]
    await asyncio.gather(
        *(one.send(submit(1, 3, f"one-{i}", first=10 * i)) for i in range(5)),
        two.send(submit(1, 3, "two", 90)),
    )
    assert sorted(await tokens(streams[0], 15)) == sorted(
        10 * i + p for i in range(5) for p in range(3)
    )
    assert await tokens(streams[1], 3) == [90, 91, 92]
    assert len(received(journal, one, "submit")) == 5
    assert len(received(journal, two, "submit")) == 1
    for stream in streams:
        await stream.aclose()


async def test_an_unknown_worker_is_not_waited_for(
    members: Members, decode: DeploymentHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    for deadline in ("SEND_DEADLINE_S", "FIRST_HELLO_S"):
        monkeypatch.setattr(serve_links, deadline, 600.0)
    link = ServeLink(decode, "Decode#nobody")
    async with asyncio.timeout(60):
        with pytest.raises(WorkerLost, match="Decode#nobody is not among the running replicas"):
            await link.send(submit(1, 1))
        with pytest.raises(WorkerLost, match="not among"):
            await anext(link.events("r", 1))


async def test_a_worker_that_stands_still_is_not_waited_for(
    members: Members, decode: DeploymentHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_links, "FIRST_HELLO_S", 0.5)
    link = ServeLink(decode, next(iter(members.links)))
    pid = replica_pid(link)
    os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):
            with pytest.raises(WorkerLost, match=r"has not answered for 0\.5 s"):
                await anext(link.events("r", 2))
    finally:
        os.kill(pid, signal.SIGCONT)
    await (await opened(members.links[link.worker_id], 3)).aclose()


async def test_a_command_too_large_for_serve_is_refused_by_name(members: Members) -> None:
    link = next(iter(members.links.values()))
    big = msgspec.structs.replace(submit(1, 1), prompt_token_ids=(100_000,) * 1_000_000)
    with pytest.raises(ValueError, match="prompt"):
        await link.send(big)


async def test_cancel_reaches_the_engine(members: Members, journal: Path) -> None:
    link = next(iter(members.links.values()))
    stream = await opened(link, 10)
    await link.send(submit(10, 1000))
    await tokens(stream, 2)
    await link.send(Cancel(key=RequestKey("r", 10, "a")))
    await wait_for(lambda: received(journal, link, "cancel"))
    await stream.aclose()


async def test_a_closed_stream_is_a_lost_router(members: Members, journal: Path) -> None:
    link = next(iter(members.links.values()))
    stream = await opened(link, 20)
    await link.send(submit(20, 1000))
    await tokens(stream, 2)
    await stream.aclose()
    lost = [20]
    await wait_for(
        lambda: (
            [c["command"]["session"] for c in received(journal, link, "router_lost")][-1:] == lost
        )
    )


async def test_a_killed_router_process_is_a_lost_router(members: Members, journal: Path) -> None:
    link = next(iter(members.links.values()))
    script = """
        import asyncio, sys, ray
        from ray import serve
        from pdserve.cluster.links.serve_links import ServeLink
        from pdserve.protocol.codec import decode_batch
        ray.init(address=sys.argv[1], log_to_driver=False, namespace="serve")
        async def main():
            handle = serve.get_deployment_handle("Decode", "workers")
            handle.options(_by_reference=False)
            await asyncio.sleep(1)
            stream = ServeLink(handle, sys.argv[2]).events("killed", 1)
            decode_batch(await anext(stream))
            print("streaming", flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
    """
    router = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(script),
            ray.get_runtime_context().gcs_address,
            link.worker_id,
        ],
        stdout=subprocess.PIPE,
    )
    assert router.stdout is not None
    assert await asyncio.to_thread(router.stdout.readline) == b"streaming\n"
    router.kill()
    router.wait()

    def lost() -> bool:
        return any(
            c["command"]["router_id"] == "killed" for c in received(journal, link, "router_lost")
        )

    await wait_for(lost)


@pytest.mark.parametrize("victim", ["engine", "replica"])
async def test_a_killed_process_takes_its_worker_and_a_new_one_comes(
    members: Members, journal: Path, victim: str
) -> None:
    link = next(iter(members.links.values()))
    stream = await opened(link, 30)
    await link.send(submit(30, 10_000))
    await tokens(stream, 2)
    pids = {"engine": engine_pid(journal, link), "replica": replica_pid(link)}
    old = set(members.links)

    os.kill(pids[victim], signal.SIGKILL)
    with pytest.raises((WorkerLost, StopAsyncIteration)):
        await tokens(stream, 10_000)
    with pytest.raises(WorkerLost):
        await link.send(submit(30, 1, "b"))
    await wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.values()))
    await wait_for(lambda: link.worker_id not in members.links and len(members.links) == 2)

    [new] = [members.links[w] for w in members.links.keys() - old]
    fresh = await opened(new, 31)
    await new.send(submit(31, 2))
    assert await tokens(fresh, 2) == [7, 8]
    await fresh.aclose()
