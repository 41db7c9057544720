"""Event streams of workers that do not begin: how soon and how often a router asks again. No Ray:
what stands for Serve loses calls."""

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
from router.fake_worker import FakeWorker, World
from router.harness import until

from pdserve.cluster.links import serve_links
from pdserve.cluster.links.framing import cut
from pdserve.cluster.links.membership import publish
from pdserve.cluster.links.serve_links import MembershipWatcher, ServeLink
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.fleet.link import WorkerLost

FIRST_S = 0.02
WORKER = "Decode#a"


class Call:
    """A streaming call of Serve. With `stream` None it was lost: nobody answers it."""

    def __init__(self, stream: Any) -> None:
        self.is_cancelled = False
        self._stream = stream

    def cancel(self) -> None:
        self.is_cancelled = True

    async def __aiter__(self) -> Any:
        if self._stream is None:
            await asyncio.Event().wait()
        async for message in self._stream:
            for piece in cut(message):
                yield piece


class Handle:
    """The handle of a deployment with one worker. `lost` are the numbers of the calls that do not
    reach it."""

    deployment_id = SimpleNamespace(app_name="starts", name="Decode")

    def __init__(self, lost: Collection[int]) -> None:
        self.worker = FakeWorker(World(), WORKER, "decode")
        self.calls: list[Call] = []
        self._lost = lost

    def options(self, **_: Any) -> "Handle":
        return self

    def remote(self, router_id: str, session: int, worker_id: str) -> Call:
        is_lost = len(self.calls) in self._lost
        self.calls.append(Call(None if is_lost else self.worker.events(router_id, session)))
        return self.calls[-1]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_links, "FIRST_HELLO_S", FIRST_S)
    monkeypatch.setattr(serve_links, "LAST_HELLO_S", 5 * FIRST_S)
    monkeypatch.setattr(serve_links, "REJOIN_S", 0.001)


async def test_a_worker_whose_first_call_was_lost_joins_soon() -> None:
    """The lost call is cancelled, and the next one brings the worker into the fleet."""
    handle: Any = Handle(lost=(0,))
    fleet = Fleet()
    watcher = MembershipWatcher(fleet, [handle])
    watcher.start()
    publish("starts#Decode", frozenset({WORKER}))
    await until(lambda: [worker.worker_id for worker in fleet.workers] == [WORKER], 20.0)
    assert [call.is_cancelled for call in handle.calls] == [True, False]
    watcher.stop()
    await fleet.close()


async def test_a_worker_that_never_answers_is_asked_ever_more_rarely() -> None:
    handle: Any = Handle(lost=range(5))
    link = ServeLink(handle, WORKER)
    waits = []
    for session in range(5):
        with pytest.raises(WorkerLost, match="it has not answered for") as lost:
            await anext(link.events("r", session))
        waits.append(float(str(lost.value).split()[-2]))
    assert waits == pytest.approx([FIRST_S * factor for factor in (1, 2, 4, 5, 5)])
    assert all(call.is_cancelled for call in handle.calls)


async def test_an_answer_makes_the_next_deadline_short_again() -> None:
    """The third call is answered, and the fourth is lost again."""
    handle: Any = Handle(lost=(0, 1, 3))
    link = ServeLink(handle, WORKER)
    for session in range(2):
        with pytest.raises(WorkerLost):
            await anext(link.events("r", session))
    stream = link.events("r", 2)
    await anext(stream)
    await stream.aclose()
    with pytest.raises(WorkerLost, match=f"for {FIRST_S:g} s"):
        await anext(link.events("r", 3))
