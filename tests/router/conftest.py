import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from router import workers
from router.fake_worker import VOCAB
from router.harness import Harness
from router.turn_models import HERMES, Say, speaking, tokenizer_of
from support.clock import Clock
from text.backends import TEMPLATE, byte_level_backend

from pdserve.configs.embedding import EmbeddingModel
from pdserve.configs.router import LogConfig, RouterConfig, SloConfig
from pdserve.configs.traces import TracesConfig
from pdserve.router.choosing import choose
from pdserve.router.http import calls
from pdserve.router.request import legs, request_clock, request_run, run_report, service
from pdserve.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    backend = byte_level_backend()
    specials = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
    loaded = Tokenizer(backend, specials, (2,), TEMPLATE)
    assert loaded.vocab_size <= VOCAB
    return loaded


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The router's time stands still but for what the test makes pass. Fleets need it, too:
    make(..., now=clock)."""
    clock = Clock()
    for module in (calls, choose, legs, request_clock, request_run, run_report, service, workers):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
async def make(tokenizer: Tokenizer) -> AsyncIterator[Callable[..., Harness]]:
    """Returns make(num_prefill, num_decode, slo={...}, logs={...}, traces={...}, **RouterConfig
    fields), which returns a running Harness that is closed after the test.

    Its workers report only when a test tells them to, but are silent only if a test says so.
    """
    made: list[Harness] = []

    def build(
        num_prefill: int = 1,
        num_decode: int = 1,
        resume_wait_s: float = 0.3,
        slo: dict[str, Any] | None = None,
        now: Callable[[], float] = time.monotonic,
        sampling_defaults: dict[str, Any] | None = None,
        logs: dict[str, Any] | None = None,
        traces: dict[str, Any] | None = None,
        embedding: EmbeddingModel | None = None,
        **config: Any,
    ) -> Harness:
        router = RouterConfig(**{"split": "always", "worker_silence_s": 600.0, **config})
        promise = SloConfig(**slo or {})
        harness = Harness(
            tokenizer,
            router,
            num_prefill,
            num_decode,
            resume_wait_s,
            promise,
            now,
            sampling_defaults,
            LogConfig(**logs or {}),
            TracesConfig(**traces or {}),
            embedding,
        )
        made.append(harness)
        return harness

    yield build
    for harness in made:
        await harness.fleet.close()
        await harness.world.close()
        if harness.service.tracer is not None:
            await asyncio.to_thread(harness.service.tracer.close)


@pytest.fixture(scope="module")
def hermes() -> Tokenizer:
    """Delimiters are tokens, which the tokenizer does not call special, as with Qwen3."""
    return tokenizer_of(HERMES, "<tool_call>", "</tool_call>", "<think>", "</think>")


@pytest.fixture
async def say(hermes: Tokenizer) -> AsyncIterator[Say]:
    """Returns say(*answers, **options of speaking), which returns a running router that is closed
    after the test."""
    made: list[Harness] = []

    async def build(*answers: str, tokenizer: Tokenizer = hermes, **options: Any) -> Harness:
        made.append(speaking(tokenizer, *answers, **options))
        return await made[-1].start()

    yield build
    for harness in made:
        await harness.fleet.close()
        await harness.world.close()
