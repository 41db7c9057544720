import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from router.fake_worker import VOCAB
from router.harness import Harness
from text.backends import TEMPLATE, byte_level_backend

from pdserve.configs.schema import RouterConfig, SloConfig
from pdserve.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    backend = byte_level_backend()
    specials = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
    loaded = Tokenizer(backend, specials, (2,), TEMPLATE)
    assert loaded.vocab_size <= VOCAB
    return loaded


@pytest.fixture
async def make(tokenizer: Tokenizer) -> AsyncIterator[Callable[..., Harness]]:
    """make(num_prefill, num_decode, slo={...}, **RouterConfig fields) -> a running Harness, closed after the test."""
    made: list[Harness] = []

    def build(
        num_prefill: int = 1,
        num_decode: int = 1,
        resume_wait_s: float = 0.3,
        slo: dict[str, Any] | None = None,
        now: Callable[[], float] = time.monotonic,
        sampling_defaults: dict[str, Any] | None = None,
        **config: Any,
    ) -> Harness:
        router = RouterConfig(**{"split": "always", **config})
        promise = SloConfig(**slo or {})
        harness = Harness(tokenizer, router, num_prefill, num_decode, resume_wait_s, promise, now, sampling_defaults)
        made.append(harness)
        return harness

    yield build
    for harness in made:
        await harness.fleet.close()
        await harness.world.close()
