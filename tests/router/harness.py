"""A router over fake workers, and the few things most tests do with it."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
from router.fake_worker import FakeWorker, World, expected_tokens
from support.clock import Clock
from support.waiting import Condition, until_async

from pdserve.configs.embedding import EmbeddingModel
from pdserve.configs.router import LogConfig, RouterConfig, SloConfig
from pdserve.configs.traces import TracesConfig
from pdserve.protocol.codec import decode_routed, encode
from pdserve.protocol.events import EventBatch, PackedScores, PromptScored
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.fleet.watch import TICK_S
from pdserve.router.http.app import build_app
from pdserve.router.request.generation import ChoiceResult
from pdserve.router.request.service import Service
from pdserve.text.tokenizer import Tokenizer

MODEL = "demo"


class Harness:
    def __init__(
        self,
        tokenizer: Tokenizer,
        config: RouterConfig,
        num_prefill: int,
        num_decode: int,
        wait_s: float,
        slo: SloConfig | None = None,
        now: Callable[[], float] = time.monotonic,
        sampling_defaults: dict[str, Any] | None = None,
        logs: LogConfig | None = None,
        traces: TracesConfig | None = None,
        embedding: EmbeddingModel | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.world = World()
        self.fleet = Fleet(
            config.worker_silence_s,
            drain_s=config.drain_s,
            attempt_deadline_s=config.attempt_deadline_s,
            now=now,
        )
        self.service = Service(
            self.fleet,
            tokenizer,
            config,
            MODEL,
            wait_s,
            slo,
            logs=logs,
            sampling_defaults=sampling_defaults,
            traces=traces,
            embedding=embedding,
        )
        self.service.admission.clock = now
        self.app = build_app(self.fleet, tokenizer, config, MODEL, self.service)
        self.prefills = [FakeWorker(self.world, f"p{i}", "prefill") for i in range(num_prefill)]
        self.decodes = [FakeWorker(self.world, f"d{i}", "decode") for i in range(num_decode)]

    async def start(self) -> "Harness":
        for worker in [*self.prefills, *self.decodes]:
            self.fleet.join(worker)
        pairs = {(d.worker_id, p.worker_id) for d in self.decodes for p in self.prefills}
        await until(
            lambda: (
                pairs <= self.connected_pairs()
                and len(self.fleet.workers) == len(self.world.workers)
            )
        )
        return self

    def connected_pairs(self) -> set[tuple[str, str]]:
        workers = self.fleet.workers
        return {
            (d.worker_id, p.worker_id) for d in workers for p in workers if d.is_connected_to(p)
        }

    def add(self, worker_id: str, role: str, **options: Any) -> FakeWorker:
        worker = FakeWorker(self.world, worker_id, role, **options)
        self.fleet.join(worker)
        return worker

    def http(self, **options: Any) -> httpx.AsyncClient:
        """Bodies that a test writes by itself are said to be JSON, too."""
        options["headers"] = {"content-type": "application/json"} | options.get("headers", {})
        transport = httpx.ASGITransport(app=self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://router", **options)

    def openai(self) -> openai.AsyncOpenAI:
        client: Any = self.http()
        return openai.AsyncOpenAI(
            api_key="x", base_url="http://router/v1", http_client=client, max_retries=0
        )

    async def pass_time(self, clock: Clock, seconds: float) -> None:
        """Ticks, before each of which every worker that is not mute says how it is. The fleet was
        made with this clock."""
        for _ in range(int(seconds / TICK_S)):
            clock.seconds += TICK_S
            for worker in self.world.workers.values():
                worker.report()
            await settle()
            self.fleet.watch.look()
            await settle()

    async def collect(self, prompt: Any, sampling: SamplingParams) -> list[ChoiceResult]:
        return await asyncio.wait_for(self.service.collect([prompt], sampling), 60)

    def check(
        self, results: list[ChoiceResult], prompt: tuple[int, ...], sampling: SamplingParams
    ) -> None:
        """Every choice has exactly the tokens, the text and the end that an undisturbed worker
        gives it."""
        assert len(results) == sampling.n
        for result in results:
            tokens, reason = expected_tokens(prompt, sampling, result.index)
            assert (result.token_ids, result.finish_reason) == (tokens, reason)
            shown = tokens[:-1] if reason == "stop" else tokens
            assert result.text == self.tokenizer.decode(shown)


def routed(event: PromptScored) -> PackedScores:
    """As a router reads what a worker sends."""
    [read] = decode_routed(encode(EventBatch(worker_id="w", incarnation=1, events=(event,)))).events
    assert isinstance(read, PackedScores)
    return read


async def settle() -> None:
    """Let everything happen that needs no time."""
    for _ in range(50):
        await asyncio.sleep(0)


async def until(condition: Condition, seconds: float = 60.0) -> None:
    await until_async(condition, seconds)
