"""When a router begins to listen, without Ray: the replica's own object over a fake worker."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from router.fake_worker import FakeWorker, World

from pdserve.cluster import router_replica
from pdserve.cluster.http_server import Address
from pdserve.cluster.router_replica import RouterReplica
from pdserve.configs.schema import ClusterConfig


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


def start(router: Router) -> asyncio.Task[None]:
    config = ClusterConfig.model_validate({"mode": "aggregated"})
    return asyncio.create_task(router.__init__(config, Address("127.0.0.1", 0)))  # type: ignore[misc]


async def health(router: Router) -> int | None:
    """None: nobody listens."""
    assert router._http is not None
    async with httpx.AsyncClient() as client:
        try:
            return (await client.get(f"http://127.0.0.1:{router._http.port}/health")).status_code
        except httpx.ConnectError:
            return None


async def bound(router: Router) -> None:
    async with asyncio.timeout(10):
        while getattr(router, "_http", None) is None:
            await asyncio.sleep(0.01)


async def test_it_listens_once_it_knows_a_decode_worker(router: Router) -> None:
    starting = start(router)
    await bound(router)
    router._fleet.join(FakeWorker(World(), "p0", "prefill"))
    for _ in range(10):
        assert await health(router) is None
        await asyncio.sleep(0.02)
    assert not starting.done()
    router._fleet.join(FakeWorker(World(), "d0", "decode"))
    async with asyncio.timeout(5):
        await starting
        while (status := await health(router)) is None:
            await asyncio.sleep(0.01)
    assert status == 200
    await router.check_health()


async def test_without_a_worker_it_says_so_before_long(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_replica, "FIRST_WORKER_S", 0.2)
    await asyncio.wait_for(start(router), 10)
    async with asyncio.timeout(5):
        while (status := await health(router)) is None:
            await asyncio.sleep(0.01)
    assert status == 503
