"""Engine hosts in their own processes: hand-off by NIXL, idle cost, death of a peer."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from support.hosts import Host, LocalLink, hosts
from support.waiting import until_async

from pdserve.engine.llm import LLM
from pdserve.protocol.codec import decode_batch
from pdserve.protocol.commands import Cancel, ConnectPeer, Start, Submit
from pdserve.protocol.events import Arrived, Delta, Event, Handoff, Hello, PeerStatus, Snapshot
from pdserve.protocol.handoff import Ticket
from pdserve.protocol.request_key import Phase, RequestKey
from pdserve.protocol.sampling_params import SamplingParams

PROMPT = tuple((i * 37) % 251 for i in range(300))
GREEDY = SamplingParams(temperature=0, max_tokens=20, seed=1)

Kind = TypeVar("Kind")


class Wire:
    """A router by hand: one event stream, everything that came on it."""

    def __init__(self, host: Host) -> None:
        self.link = LocalLink(host)
        self.events: list[Event] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for batch in self.link.events("router", 1):
            self.events += decode_batch(batch).events

    async def submit(
        self, attempt: int, phase: Phase, ticket: Ticket | None = None, forced: tuple[int, ...] = ()
    ) -> RequestKey:
        key = RequestKey("router", 1, "request", attempt)
        starts = (Start(0, forced),)
        await self.link.send(
            Submit(
                key=key,
                phase=phase,
                prompt_token_ids=PROMPT,
                sampling=GREEDY,
                starts=starts,
                ticket=ticket,
            )
        )
        return key

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, kind: type[Kind], test: Callable[[Kind], object] = bool) -> Kind:
        await until_async(lambda: any(test(event) for event in self.of(kind)))
        return next(event for event in self.of(kind) if test(event))

    async def next(self, kind: type[Kind]) -> Kind:
        """The first that comes from now on."""
        seen = len(self.of(kind))
        await self.until(kind, lambda _: len(self.of(kind)) > seen)
        return self.of(kind)[seen]

    def tokens(self) -> list[int]:
        return [token for delta in self.of(Delta) for token in delta.token_ids]

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self.link.client.close()


def metric(snapshot: Snapshot, name: str) -> float:
    """Sum of a metric's samples over their labels."""
    return sum(s.value for family in snapshot.metrics for s in family.samples if s.name == name)


@asynccontextmanager
async def wires(*pair: Host) -> AsyncIterator[list[Wire]]:
    made = [Wire(host) for host in pair]
    try:
        for wire in made:
            await wire.until(Hello)
        yield made
    finally:
        for wire in made:
            await wire.close()


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[int]:
    llm = LLM(str(tiny_llama), tokenizer=False, device="cpu")
    return llm.generate([list(PROMPT)], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture
def pair(tiny_llama: Path, request: pytest.FixtureRequest) -> Iterator[list[Host]]:
    """Parametrised by how long D waits for a pull."""
    with hosts(tiny_llama, "P", "D", transfer={"pull_deadline_s": request.param}) as started:
        yield started


async def connect(p: Wire, d: Wire) -> PeerStatus:
    meta = p.of(Hello)[0].kv_cache
    assert meta is not None
    await d.link.send(ConnectPeer(meta=meta))
    return await d.until(PeerStatus)


@pytest.mark.parametrize("pair", [300.0], indirect=True, ids=[""])
async def test_idle_cost_and_hand_off(pair: list[Host], expected: list[int]) -> None:
    async with wires(*pair) as (p, d):
        assert (await connect(p, d)).connected
        await _idle_is_cheap(pair)
        prefilled = await p.submit(1, "prefill")
        handoff = await p.until(Handoff)
        await d.submit(2, "decode", handoff.ticket, tuple(p.tokens()[:1]))
        await d.until(Delta, lambda delta: delta.finish_reason)
        assert p.tokens() + d.tokens() == expected
        arrived = d.of(Arrived)[0]
        assert arrived.source == "p2p" and arrived.num_bytes > 0 and arrived.transport
        await d.link.send(Cancel(key=prefilled))  # of another worker's leg: nothing happens
        snapshot = await d.until(Snapshot, lambda s: metric(s, "pdserve_kv_transfer_bytes_total"))
        assert metric(snapshot, "pdserve_kv_transfer_bytes_total") == arrived.num_bytes
        assert metric(snapshot, "pdserve_kv_transfer_descriptors_total") == arrived.num_descriptors
        for wire in (p, d):
            last = await wire.next(Snapshot)
            assert last.free_blocks == last.total_blocks and not last.quarantined_blocks


async def _idle_is_cheap(pair: list[Host]) -> None:
    """The engine process alone; replica and engine together are measured in tests/cluster."""
    processes = [psutil.Process(host.process.pid) for host in pair]
    shares = [1.0]
    for _ in range(5):
        before = [sum(process.cpu_times()[:2]) for process in processes]
        began = time.monotonic()
        await asyncio.sleep(4.0)  # the time over which CPU is counted
        spent = [
            sum(process.cpu_times()[:2]) - start
            for process, start in zip(processes, before, strict=True)
        ]
        shares = [seconds / (time.monotonic() - began) for seconds in spent]
        if max(shares) < 0.04:
            break
    assert max(shares) < 0.04


@pytest.mark.parametrize("pair", [2.0], indirect=True, ids=[""])
async def test_killed_p_means_recompute(pair: list[Host], expected: list[int]) -> None:
    async with wires(*pair) as (p, d):
        await connect(p, d)
        await p.submit(1, "prefill")
        handoff = await p.until(Handoff)
        first = p.tokens()
        pair[0].kill()
        await d.submit(2, "decode", handoff.ticket, tuple(first))
        arrived = await d.until(Arrived)
        assert arrived.source == "recompute"
        await d.until(Delta, lambda delta: delta.finish_reason)
        assert first + d.tokens() == expected
