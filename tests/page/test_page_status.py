"""The page's view of the cluster in a real browser: what it shows, and when it asks."""

import asyncio

import pytest
from page.browser import Browser, missing
from page.conftest import Serve, engine_figures
from router.harness import MODEL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() != "", reason=missing() or "all is there"),
]


async def test_workers_queues_blocks_and_rates(serve: Serve, browser: Browser) -> None:
    served = await serve(num_decode=2)
    served.answers["hi"] = "Hello."
    for number, worker in enumerate(served.workers):
        engine_figures(worker, running=number, waiting=7, owned=10, free=30, tokens=100)
    await browser.open(served.url)
    await browser.shows("#model-name", MODEL)
    await browser.click("#tab-status")
    await browser.shows("#figures", "1 prefill, 2 decode")
    assert MODEL in await browser.text("#figures")
    assert await browser.texts("#workers tbody th") == ["d0", "d1", "p0"]
    lines = await browser.texts("#workers tbody tr")
    assert lines[0].split("\t")[1:5] == ["decode", "1", "7", "10 of 40"]
    assert await browser.text("#now-waiting") == "21"
    assert await browser.text("#now-blocks") == "25 %"
    # rates are of two looks
    for worker in served.workers:
        engine_figures(worker, running=0, waiting=0, owned=20, free=20, tokens=220)
    await browser.shows("#now-blocks", "50 %")
    rate = float(await browser.text("#now-rate"))
    assert 120 < rate < 200, "360 tokens in two seconds"
    assert await browser.count("#plot-rate polyline") == 1
    [points] = await browser.do("attributes", at="#plot-blocks polyline", name="points")
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert heights[0] > heights[-1], "more blocks are higher"
    # a first token, and a worker that leaves
    await browser.click("#tab-chat")
    await browser.say("hi")
    await browser.shows(".assistant .text", "Hello.")
    served.harness.decodes[1].die()
    await browser.click("#tab-status")
    await browser.shows("#now-ttft", "ms")
    await browser.shows("#figures", "1 prefill, 1 decode")
    assert await browser.texts("#workers tbody th") == ["d0", "p0"]


async def test_it_asks_only_while_it_is_seen(serve: Serve, browser: Browser) -> None:
    served = await serve()
    await browser.open(served.url)
    await browser.shows("#model-name", MODEL)

    async def asked() -> int:
        seen = await browser.seen()
        return sum(request["url"].endswith("/metrics") for request in seen["requests"])

    assert await asked() == 0
    await browser.press("#tab-chat", "ArrowRight")
    assert await browser.do("focused") == "tab-status"
    await browser.shows("#figures", MODEL)
    await asyncio.sleep(4.5)  # the time between two looks is what is tested
    assert await asked() in (2, 3)
    await browser.click("#tab-chat")
    before = await asked()
    await asyncio.sleep(3)  # as above
    assert await asked() == before


async def test_a_server_that_is_gone_and_comes_back(serve: Serve, browser: Browser) -> None:
    served = await serve()
    await browser.open(served.url)
    await browser.click("#tab-status")
    await browser.shows("#figures", MODEL)
    await browser.do("offline", **{"is": True})
    await browser.shows("#status-said", "The server cannot be reached.")
    await browser.do("offline", **{"is": False})
    await browser.shows("#status-said", "")
    assert await browser.is_visible("#plots")
