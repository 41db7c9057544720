"""Clients that ask one request after the other while a test disturbs the cluster; every answer is
compared, to the byte, with an undisturbed one. Used by tests/test_elasticity*.py.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import httpx
from support.streams import Ask, check, mid_stream


class Calm:
    """Makes each request, and knows its undisturbed answer."""

    def __init__(self, drafts: Callable[[], Sequence[Ask]], expected: Sequence[bytes]) -> None:
        self.drafts = drafts
        self.expected = expected

    def make(self, number: int) -> Ask:
        return self.drafts()[number]


async def calmed(client: httpx.AsyncClient, drafts: Callable[[], Sequence[Ask]]) -> Calm:
    return Calm(drafts, await asyncio.gather(*(ask.run(client) for ask in drafts())))


class Load:
    """A load that never pauses. `started` holds all asks so far."""

    def __init__(self, client: httpx.AsyncClient, calm: Calm) -> None:
        self._client = client
        self._calm = calm
        self._numbers = itertools.cycle(range(len(calm.expected)))
        self.is_over = False
        self.started: list[Ask] = []
        self.longest_gap_s = 0.0

    async def run(self) -> None:
        while not self.is_over:
            number = next(self._numbers)
            ask = self._calm.make(number)
            self.started.append(ask)
            answer = await ask.run(self._client)
            self.longest_gap_s = max(
                self.longest_gap_s, check([ask], [answer], [self._calm.expected[number]])
            )

    async def until_round(self) -> None:
        """Every kind of request is begun, and has begun to answer, from now on."""
        begin = len(self.started)
        while len(self.started) < begin + len(self._calm.expected) or not mid_stream(
            self.started[begin:], 1
        ):
            await asyncio.sleep(0.01)

    @property
    def longest_stream_s(self) -> float:
        """From an answer's first event to its last."""
        return max(ask.times[-1] - ask.times[0] for ask in self.started if ask.times)


@asynccontextmanager
async def load(
    client: httpx.AsyncClient, calm: Calm, timeout_s: float = 600.0
) -> AsyncIterator[Load]:
    """As many clients as there are kinds of requests; behind the block all their answers were
    right."""
    made = Load(client, calm)
    async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as clients:
        for _ in calm.expected:
            clients.create_task(made.run())
        try:
            yield made
        finally:
            made.is_over = True
    gaps = f"longest gap {made.longest_gap_s:.2f} s, longest stream {made.longest_stream_s:.1f} s"
    print(f"{len(made.started)} requests, {gaps}")
