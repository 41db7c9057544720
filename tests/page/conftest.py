"""A router with fake workers on a port of loopback, whose page a real browser opens."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from page.browser import Browser, browsing
from router.fake_worker import EOS, FakeWorker
from router.harness import MODEL, Harness
from router.turn_models import HERMES, make_speak, tokenizer_of
from text.backends import byte_level_backend

from pdserve.cluster.deployments.http_server import Address, HttpServer
from pdserve.configs.router import RouterConfig
from pdserve.protocol.events import Snapshot
from pdserve.protocol.metric_families import MetricFamily, Sample
from pdserve.router.http.app import build_app

DELIMITERS = "<tool_call>", "</tool_call>", "<think>", "</think>"
Serve = Callable[..., Any]


class Served:
    """A router on a port. answers: what the model says, by the last message. prompts: what workers
    were given."""

    def __init__(self, step_s: float, num_decode: int, **config: Any) -> None:
        self.tokenizer = tokenizer_of(HERMES, *DELIMITERS)
        self.answers: dict[str, str] = {}
        self.prompts: list[str] = []
        self._written: dict[tuple[int, ...], list[int]] = {}  # answers by prompt
        self.step_s = step_s
        router = RouterConfig(**{"split": "always", "worker_silence_s": 600.0, **config})
        self.harness = Harness(self.tokenizer, router, 1, num_decode, 0.3)
        self._backend = byte_level_backend(*DELIMITERS)
        for worker in (*self.harness.prefills, *self.harness.decodes):
            self.teach(worker)

    @property
    def workers(self) -> list[FakeWorker]:
        return list(self.harness.world.workers.values())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.port}"

    def teach(self, worker: FakeWorker) -> None:
        make_speak(worker, self.tokenizer, "x")
        worker.answers = self._answer
        worker.step_s = self.step_s

    def _answer(self, prompt: tuple[int, ...], choice: int) -> list[int]:
        """Called for every token."""
        if prompt not in self._written:
            text = self._backend.decode(list(prompt), skip_special_tokens=False)
            self.prompts.append(text)
            said = text.split("<|im_start|>")[-2].partition("\n")[2].split("<|im_end|>")[0]
            ids = self.tokenizer.encode(self.answers[said], add_special_tokens=False)
            self._written[prompt] = [*ids, EOS]
        return self._written[prompt]

    @asynccontextmanager
    async def run(self) -> AsyncIterator["Served"]:
        harness = self.harness
        await harness.start()
        service = harness.service
        app = build_app(
            *(harness.fleet, self.tokenizer, service.config, MODEL, service), on_loopback=True
        )
        self._http = HttpServer(app, Address("127.0.0.1", 0), 600)
        self._http.start()
        try:
            yield self
        finally:
            await self._http.close()
            await harness.fleet.close()
            await harness.world.close()


def engine_figures(worker: FakeWorker, **figures: float) -> None:
    """The worker's snapshot has these of an engine's metrics from now on; it says so at once.
    figures: running, waiting, owned, free, tokens."""

    def family(name: str, kind: str, *samples: Sample) -> MetricFamily:
        return MetricFamily(name, kind, "For the test.", samples)

    tokens, running = "pdserve_engine_generation_tokens", "pdserve_num_requests_running"
    waiting, blocks = "pdserve_num_requests_waiting", "pdserve_kv_blocks"
    states = [Sample(blocks, {"state": name}, figures[name]) for name in ("free", "owned")]
    families = (
        family(tokens, "counter", Sample(f"{tokens}_total", {}, figures["tokens"])),
        family(running, "gauge", Sample(running, {}, figures["running"])),
        family(waiting, "gauge", Sample(waiting, {}, figures["waiting"])),
        family(blocks, "gauge", *states),
    )

    def snapshot() -> Snapshot:
        return msgspec.structs.replace(FakeWorker.snapshot(worker), metrics=families)

    worker.snapshot = snapshot  # type: ignore[method-assign]
    worker.report()


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """serve(step_s=..., num_decode=..., **RouterConfig fields) -> a Served."""
    async with AsyncExitStack() as stack:

        async def build(step_s: float = 0.0, num_decode: int = 1, **config: Any) -> Served:
            return await stack.enter_async_context(Served(step_s, num_decode, **config).run())

        yield build


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """At the end no request has left the page's origin, nothing was blocked by the page's policy
    and nothing has failed in its scripts."""
    async with browsing() as made:
        yield made
        seen = await made.seen()
        origins = {urlsplit(request["url"]).netloc for request in seen["requests"]}
        assert len(origins) == 1, f"requests left the page's origin: {origins}"
        # Chromium itself notes each answer that is an error
        wrong = [line for line in seen["console"] if "Failed to load resource" not in line]
        assert not wrong
        assert seen["dialogs"] == [] and seen["pages"] == 0


async def bodies(browser: Browser) -> list[dict[str, Any]]:
    """Returns the bodies that the page has sent to the chat endpoint."""
    seen = await browser.seen()
    return [json.loads(each["body"]) for each in seen["requests"] if each["body"]]
