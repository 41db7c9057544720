"""A browser that tests drive: Debian's Chromium behind `browser.mjs`, and why there is none."""

import asyncio
import json
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ANSWER_S = 60
SHOWN_S = 20


def missing() -> str:
    """Names what the tests need and this machine lacks; "": nothing."""
    if chromium() is None:
        return "needs Chromium (Debian's package chromium)"
    if shutil.which("node") is None:
        return "needs node"
    if not (HERE / "node_modules" / "playwright-core").is_dir():
        return "needs the package of tests/page/package.json: make test-page"
    return ""


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page at a time. at: a selector of Playwright's."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._last = 0

    async def do(self, action: str, **more: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._last += 1
        command = {"id": self._last, "do": action} | more
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), ANSWER_S)
        answer = json.loads(line)
        assert answer["id"] == self._last
        assert "error" not in answer, f"{command}: {answer.get('error')}"
        return answer["value"]

    async def open(
        self, url: str, dark: bool = False, width: int = 1000, height: int = 720
    ) -> None:
        await self.do("open", url=url, dark=dark, width=width, height=height)

    async def click(self, at: str) -> None:
        await self.do("click", at=at)

    async def fill(self, at: str, text: str) -> None:
        await self.do("fill", at=at, text=text)

    async def press(self, at: str, key: str) -> None:
        await self.do("press", at=at, key=key)

    async def texts(self, at: str) -> list[str]:
        """Returns the visible texts of all matching elements."""
        found: list[str] = await self.do("text", at=at)
        return found

    async def text(self, at: str) -> str:
        return "\n".join(await self.texts(at))

    async def count(self, at: str) -> int:
        return int(await self.do("count", at=at))

    async def is_visible(self, at: str) -> bool:
        return bool(await self.do("visible", at=at))

    async def shows(self, at: str, words: str) -> None:
        """Wait until these words are seen there."""
        limit = time.monotonic() + SHOWN_S
        while words not in (saw := await self.text(at)):
            assert time.monotonic() < limit, f"{at} has {saw!r}, not {words!r}"
            await asyncio.sleep(0.02)

    async def say(self, text: str) -> None:
        await self.fill("#message", text)
        await self.press("#message", "Enter")

    async def seen(self) -> dict[str, Any]:
        """Returns requests, console, dialogs and the number of windows since `open`."""
        found: dict[str, Any] = await self.do("seen")
        return found


@asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    path = chromium()
    assert path is not None
    # Chromium's own sandbox refuses to start as root
    more = ["--no-sandbox"] if os.geteuid() == 0 else []
    process = await asyncio.create_subprocess_exec(
        *("node", "browser.mjs", path, *more),
        cwd=HERE,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )
    try:
        yield Browser(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait_for(process.wait(), ANSWER_S)
