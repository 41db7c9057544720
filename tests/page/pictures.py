"""Makes the pictures of docs/use/page.md: asks a running server some questions in the page, and
takes a picture of each view.

    python tests/page/pictures.py http://127.0.0.1:8000 docs/images
"""

import asyncio
import json
import sys
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from clients.asks import CHAT_TOOL, THINK_WORDS, WEATHER_NAME, WEATHER_RESULT, WEATHER_WORDS
from page.browser import browsing, missing

LOAD_S = 60  # so long the status view looks on while requests come


async def load(url: str, seconds: float) -> None:
    """Some requests at a time, more and fewer."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        number = 0
        while loop.time() < until:
            number += 1
            prompts = [f"Story {number}.{at}: once upon a time" for at in range(1 + number % 4)]
            body = {"model": model, "prompt": prompts, "max_tokens": 96, "ignore_eos": True}
            (await http.post("/v1/completions", json=body)).raise_for_status()
            await asyncio.sleep(0.5 * (number % 3))


async def main(url: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    async with browsing() as browser:
        await browser.open(url, width=960, height=780)
        while not await browser.text("#model-name"):
            await asyncio.sleep(0.05)
        await browser.click("#settings summary")
        await browser.fill("#temperature", "0")
        await browser.click("#settings summary")
        await browser.say(THINK_WORDS)
        await browser.shows(".assistant >> nth=0", "tokens/s")
        await browser.click("#settings summary")
        await browser.fill("#tools", json.dumps([CHAT_TOOL]))
        await browser.click("#settings summary")
        await browser.say(WEATHER_WORDS)
        await browser.shows(".call strong", WEATHER_NAME)
        await browser.fill(".call textarea", WEATHER_RESULT)
        await browser.click("text=Send the results")
        await browser.shows(".assistant >> nth=2", "tokens/s")
        path = folder.resolve() / "page-chat.png"
        await browser.do("screenshot", path=str(path))
        await browser.click("#tab-status")
        await load(url, LOAD_S)
        await browser.do("screenshot", path=str(path.with_name("page-status.png")))


if __name__ == "__main__":
    if reason := missing():
        sys.exit(f"{sys.argv[0]}: {reason}")
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
